"""What a newcomer writes in the first hour, right or nearly right."""

import inspect
import sys
from dataclasses import replace

import numpy as np
import pytest

import fsl_sage
from fsl_sage import Config, DataConfig, InputError, Tracker, TrainingError, compare, cost, predict, resume, run
from fsl_sage.compare.grid import make_grid
from fsl_sage.experiment.cuts import cuts_of
from fsl_sage.problems.images.sources import load_images
from fsl_sage.records.plain_lines import describe
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.units import gib_text


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
    with pytest.raises(InputError, match=rf"{out} already holds a run, which is finished: give another --out"):
        run(tiny(out=out))
    (out / "result.json").unlink()
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


OWN_CODE = """
from dataclasses import dataclass
from types import SimpleNamespace
from torch import nn
from fsl_sage import Algorithm
from fsl_sage.algorithms.cse_fsl import CSEFSL
from fsl_sage.algorithms.fedavg import FedAvg

def needs_width(classes, width):
    return nn.Linear(width, classes)

def raises(classes):
    raise RuntimeError("no weights today")

def too_narrow(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(7, classes))

class Gives(nn.Sequential):
    def __init__(self, form, classes):
        layers = (nn.Linear(3072, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        super().__init__(nn.Flatten(), *layers, nn.Linear(8, classes))
        self.form = form

    def forward(self, x):
        return self.form(super().forward(x))

def pair(classes):
    return Gives(lambda logits: (logits, logits), classes)

def unnamed(classes):
    return Gives(lambda logits: {"scores": logits}, classes)

def namespace(classes):
    return Gives(lambda logits: SimpleNamespace(logits=logits), classes)

def transformer_like(classes):
    return Gives(lambda logits: {"logits": logits, "more": None}, classes)

def lazy(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), nn.ReLU(), nn.LazyLinear(8), nn.Linear(8, classes))

class Forgot(Algorithm):
    \"\"\"Without a local round.\"\"\"

class Mistyped(FedAvg):
    def local_round(self, client, t):
        client.forwrd
        yield from ()

class Plain(FedAvg):
    def local_round(self, client, t):
        pass

class Painted(FedAvg):
    colour = "notacolour"

class Nameless(FedAvg):
    title = None

class Typo(FedAvg):
    averaged = ("client", "srver")

class HoldsLess(FedAvg):
    holds = ("client",)

class NoTuple(FedAvg):
    averaged = holds = "client"

class UsesTypo(FedAvg):
    uses = ("alignmnt",)

class Counts(FedAvg):
    def local_round(self, client, t):
        yield from super().local_round(client, t)
        client.extra["n"] = 1

class YieldsSmash(FedAvg):
    def local_round(self, client, t):
        for batch in client.batches(t):
            yield client.forward(batch)

class Unmade(FedAvg):
    def __init__(self, config):
        raise RuntimeError("not today")

@dataclass(frozen=True)
class Positive:
    mu: float = -1.0

    def __post_init__(self):
        if self.mu < 0:
            raise ValueError("mu must not be negative")

class Ranged(FedAvg):
    Options = Positive

class FailsAtServer(CSEFSL):
    def on_upload(self, server, client, upload):
        raise ValueError("no room")

number = 3
"""


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    (tmp_path / "own_code.py").write_text(OWN_CODE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_code", None)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "needs_widht",
            "--model.name own_code:needs_widht is not there: own_code has no needs_widht: did you mean needs_width?",
        ),
        ("needs_width", "--model.name own_code:needs_width needs 'width': a factory is given classes and channels, "),
        ("raises", "failed to make a model: RuntimeError: no weights today (own_code.py, line 13)."),
        ("number", "own_code:number is no class and no function: give one that makes a model."),
        (
            "too_narrow",
            "the model fails on a batch of the shape [2, 3, 32, 32]: its module 1 raises RuntimeError: mat1",
        ),
    ],
)
def test_what_is_wrong_with_an_own_model_is_said(own_code, tiny, name, said):
    with pytest.raises(InputError) as refused:
        run(tiny(model={"name": f"own_code:{name}", "cut": "0"}))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pair", "The model gives a tuple for a batch, where a number for each class is needed: let it return"),
        ("unnamed", "The model gives a dict with scores for a batch, where a number for each class is needed: let"),
        ("namespace", "The model gives a SimpleNamespace for a batch, in which there is no tensor with a gradient"),
        ("lazy", "the model's '3.weight' has no shape yet, as in torch's lazy modules: let what makes the model"),
    ],
)
def test_a_model_that_no_loss_can_take_is_refused_by_every_command(own_code, tiny, name, said):
    config = tiny(model={"name": f"own_code:{name}", "cut": "1", "auxiliary": "linear"})
    commands = [lambda: run(config), lambda: cuts_of(config)]
    if name != "namespace":  # a dry round has no gradients, and looks at outputs only where they travel
        commands.append(lambda: cost(config, algorithms=["fedgkt"]))
    for command in commands:
        with pytest.raises(InputError) as refused:
            command()
        assert said in str(refused.value)


def test_logits_may_stand_among_other_things(own_code, tiny):
    model = {"name": "own_code:transformer_like", "cut": "1", "auxiliary": "linear"}
    assert run(tiny(model=model, rounds=1)).metrics
    assert cost(tiny(model=model))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Forgot", "--algorithm own_code:Forgot lacks local_round: define it in Forgot."),
        (
            "Mistyped",
            "Client 0 failed in round 0: AttributeError: 'Client' object has no attribute 'forwrd' (own_code.py",
        ),
        (
            "Plain",
            "local_round of Plain gave a NoneType: it must be a generator. If it uploads nothing, let it end with",
        ),
        ("Painted", "The colour of own_code:Painted is notacolour: give one such as #0072B2, or a name that CSS has"),
        ("Nameless", "The title of own_code:Nameless is None: give a text."),
        ("Typo", "averaged of own_code:Typo has 'srver': did you mean server?"),
        ("HoldsLess", "holds of own_code:HoldsLess lacks server, which averaged names: clients train it, so they must"),
        ("NoTuple", "averaged of own_code:NoTuple is 'client': give a tuple of names, such as ('client',)."),
        ("UsesTypo", "uses of own_code:UsesTypo has 'alignmnt': did you mean alignment?"),
        (
            "Counts",
            "Client 0 failed in round 0: client.extra['n'] is of type int: an algorithm keeps tensors by",
        ),
        ("YieldsSmash", "YieldsSmash.local_round yields a tuple: what goes up is a Message, such as Smashed(z, batch"),
        ("Unmade", "--algorithm own_code:Unmade cannot be made: RuntimeError: not today (own_code.py, line"),
        ("Ranged", "The options of own_code:Ranged are not possible: ValueError: mu must not be negative (own_code"),
    ],
)
def test_what_is_wrong_with_an_own_algorithm_is_said(own_code, tiny, name, said):
    config = tiny(algorithm="fedavg")
    with pytest.raises((InputError, TrainingError)) as refused:
        run(replace(config, algorithm=f"own_code:{name}", options=None))
    assert said in str(refused.value)
    why = RunDirectory(config.out).failure()
    assert (why is not None and said in why) if isinstance(refused.value, TrainingError) else not config.out.exists()


def test_why_the_code_of_an_s_server_failed_is_written_down(own_code, tiny):
    config = tiny(algorithm="own_code:FailsAtServer")
    with pytest.raises(ValueError, match="no room"):
        run(config)
    assert RunDirectory(config.out).failure().startswith("ValueError: no room (own_code.py, line")


def test_a_module_that_fails_is_named(tmp_path, monkeypatch, tiny):
    (tmp_path / "failing_module.py").write_text("\nvalue = 1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"cannot be imported: ZeroDivisionError: .* \(failing_module.py, line 2\)"):
        run(tiny(model={"name": "failing_module:Net"}))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pictures", "is a folder: to learn from it give folder:"),
        ("rows.jsonl", "is a file: to learn from it give jsonl:"),
    ],
)
def test_a_path_alone_is_no_data_set(tmp_path, tiny, name, said):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "rows.jsonl").touch()
    path = str(tmp_path / name)
    with pytest.raises(InputError, match=said):
        run(tiny(data={"name": path}))


def test_a_folder_with_the_name_of_an_architecture_is_not_taken_for_it(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from fsl_sage.models.factory import make_model

    monkeypatch.chdir(tmp_path)
    (tmp_path / "resnet").mkdir()
    (tmp_path / "resnet" / "config.json").write_text('{"config": {}}')  # a run's
    assert type(make_model("hf:resnet", 2, (3, 32, 32))).__name__ == "ResNetForImageClassification"


def test_a_relative_path_is_of_the_folder_where_the_run_began(tmp_path, monkeypatch, tiny):
    data = load_images("cifar10-mini", train_images=20, test_images=10)
    names = np.array(data.classes)
    np.savez(
        tmp_path / "mine.npz", x=data.train.x, y=data.train.y, x_test=data.test.x, y_test=data.test.y, classes=names
    )
    monkeypatch.chdir(tmp_path)
    options = {"name": "npz:mine.npz", "train_images": None, "test_images": None}
    run(tiny(out=tmp_path / "run", rounds=1, data=options, keep_checkpoint=True))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    said = r"mine.npz is not a file: .* was started in another folder than this, and npz:mine.npz is relative to that"
    with pytest.raises(InputError, match=said):
        fsl_sage.evaluate("../run")
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(InputError, match=said):
        resume("../run")


def test_one_is_singular(tiny, capsys):
    ended = run(tiny(rounds=1, clients=1))
    assert ended.stopped == "its one round played"
    assert "1 client, batch" in describe(ended.config, 0)
    assert describe(ended.config, 1).endswith("1 round, going on after 1 round")


def test_few_bytes_are_not_shown_as_none():
    assert gib_text(134_912) == "0.000126 GiB"
