"""What a newcomer writes in Python in the first hour, right or nearly right."""

import inspect

import numpy as np
import pytest

import fsl_sage
from fsl_sage import Config, DataConfig, InputError, Tracker, compare, predict, resume, run
from fsl_sage.compare.grid import make_grid


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Config(rouns=3), "'rouns' is not an option of Config: did you mean rounds?"),
        (lambda: DataConfig(nmae="x"), "'nmae' is not an option of DataConfig: did you mean name?"),
        (lambda: run({"rounds": 1}), "run takes a Config, not a dict: write run(Config(rounds=3, …)), or "),
        (lambda: run("mine.toml"), "run(load_preset(FILE)) for what stands in a TOML file."),
        (lambda: compare({"rounds": 1}), "compare takes a Config, not a dict"),
        (lambda: resume(3), "A run's directory is given by its path, not by 3."),
    ],
)
def test_what_was_meant_is_said(wrong, said):
    with pytest.raises(InputError) as refused:
        wrong()
    assert said in str(refused.value)


def test_the_signature_of_a_configuration_stays():
    assert inspect.signature(Config).parameters["rounds"].default == 10


def test_one_value_may_stand_alone_in_a_grid():
    grid = make_grid("fedavg", 3, "iid", {"align_every": 2, "order": "blocked"})
    assert grid == make_grid(["fedavg"], [3], ["iid"], {"align_every": [2], "order": ["blocked"]})


def test_one_callback_may_stand_alone(tiny):
    class Counting(Tracker):
        rounds = 0

        def round(self, metrics):
            self.rounds += 1

    counting = Counting()
    run(tiny(), counting)
    assert counting.rounds == tiny().rounds


def test_a_function_is_no_callback(tiny):
    with pytest.raises(InputError, match=r"callbacks has a builtin_function_or_method: give objects of a class that"):
        run(tiny(), [print])
    run(tiny())  # into the same directory: nothing was left in it


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    from PIL import Image

    path = tmp_path_factory.mktemp("pictures") / "grey.png"
    Image.new("RGB", (40, 40), "grey").save(path)
    return path


def test_one_path_is_not_a_row_of_letters(tiny, picture):
    """A text was taken apart, and its "/" stood for all files of the machine."""
    made = run(tiny()).directory
    (said,) = predict(made, str(picture))
    assert said.file == picture
    assert predict(made, picture) == predict(made, [picture]) == [said]
    with pytest.raises(InputError, match=r"predict takes the paths of image files, not a ndarray"):
        predict(made, np.zeros((16, 16, 3)))
    assert fsl_sage.load_model(str(made)) is not None


def test_a_command_to_copy_is_quoted(tiny, tmp_path):
    out = tmp_path / "my first run"
    run(tiny(out=out))
    with pytest.raises(InputError, match=rf"resume it with 'fsl-sage resume '{out}''"):
        run(tiny(out=out))


def test_a_file_is_no_directory(tiny, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("hello")
    with pytest.raises(InputError, match=r"notes.txt is a file: give the directory of a run"):
        resume(file)
    with pytest.raises(InputError, match=r"--out .*notes.txt is a file: give a directory for the run"):
        run(tiny(out=file))
    with pytest.raises(InputError, match=r"holds no run: there is no such folder"):
        resume(tmp_path / "nowhere")
