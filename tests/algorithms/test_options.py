"""An algorithm's own options: resolved once, refused with a reason, the same however they are given."""

import json
import subprocess
import sys
import textwrap
from dataclasses import dataclass, fields, replace

import pytest

from fsl_sage import cli, run
from fsl_sage.algorithms import ALGORITHMS, Algorithm, option_fields, resolve
from fsl_sage.algorithms.fsl_sage import FSLSAGEOptions
from fsl_sage.algorithms.names import _class_in, find_algorithm
from fsl_sage.cli import commands
from fsl_sage.cli.own_options import help_of
from fsl_sage.config import Config, digest, from_dict, load_preset, to_dict
from fsl_sage.errors import InputError
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.report.options import concerns


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_option_has_a_help_text_and_a_name_of_its_own(name):
    options = ALGORITHMS[name].Options
    assert help_of(options).keys() >= option_fields(ALGORITHMS[name]).keys()
    assert not {each.name for each in fields(options)} & {each.name for each in fields(Config)}


def test_a_name_is_that_of_the_file_which_defines_its_class():
    for name, kind in ALGORITHMS.items():
        assert kind.__module__ == f"fsl_sage.algorithms.{name.replace('-', '_')}"
        assert not kind.__abstractmethods__


def test_names_are_known_without_importing_the_files():
    code = """
    import sys
    from fsl_sage.algorithms import ALGORITHMS, find_algorithm
    before = len([name for name in ALGORITHMS if f"fsl_sage.algorithms.{name.replace('-', '_')}" in sys.modules])
    find_algorithm("fedgkt")
    print(before, "fedgkt" in ALGORITHMS, "fsl_sage.algorithms.cpsl" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["0", "True", "False"]


def test_a_file_with_two_algorithms_is_refused(tmp_path, monkeypatch):
    (tmp_path / "pair.py").write_text(
        "from fsl_sage.algorithms.fedavg import FedAvg\nclass One(FedAvg): ...\nclass Two(FedAvg): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="pair must define one class that derives from Algorithm; it defines 2"):
        _class_in("pair")


@pytest.mark.parametrize("options", [None, {}, {"align_every": 5}, FSLSAGEOptions(), FSLSAGEOptions(upload_every=5)])
def test_defaults_are_the_same_run_however_they_are_given(options):
    config = resolve(Config(options=options))
    assert config == resolve(Config())
    assert hash(config) == hash(resolve(Config()))
    assert digest(config) == digest(resolve(Config())) == digest(Config())


def test_options_go_through_plain_values_beside_the_others():
    config = resolve(Config(options={"align_rounds": (1, 3), "warm_start": True}))
    plain = json.loads(json.dumps(to_dict(config)))
    assert (plain["align_rounds"], plain["warm_start"], plain["upload_every"]) == ([1, 3], True, 5)
    assert "options" not in plain
    assert resolve(from_dict(plain)) == config
    assert digest(config) != digest(resolve(Config()))


def test_an_option_of_another_algorithm_is_refused_in_python():
    said = "--align-every is an option of fsl-sage and lazy-fsl-sage, not of fedavg"
    for options in ({"align_every": 2}, FSLSAGEOptions(align_every=2)):
        with pytest.raises(InputError, match=said):
            resolve(Config(algorithm="fedavg", options=options))
    assert resolve(Config(algorithm="fedavg", options=FSLSAGEOptions())) == resolve(Config(algorithm="fedavg"))
    with pytest.raises(InputError, match="'algn_every' is not an option: did you mean align_every"):
        resolve(Config(options={"algn_every": 2}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"align_until": -1}, "--align-until -1 is not possible: give a round, from 0 up"),
        ({"upload_every": 0}, "--upload-every 0 is not possible: give a whole number from 1 up"),
        ({"upload_every": "often"}, "--upload-every 'often' is not possible: give a whole number"),
        ({"align_rounds": [-2]}, "--align-rounds -2 is not possible"),
        ({"align_at": "noon"}, "--align-at 'noon' is not possible: give end or start"),
        ({"align_at": "start", "warm_start": True}, "--warm-start cannot run with --align-at start"),
    ],
)
def test_impossible_values_are_refused(options, said):
    with pytest.raises(InputError) as error:
        resolve(Config(options=options))
    assert said in str(error.value)


def test_what_depends_on_other_options_is_checked_before_a_run_starts(tiny):
    from fsl_sage.algorithms import make_algorithm

    with pytest.raises(InputError, match="--align-at start cannot run with --order blocked"):
        make_algorithm(tiny(align_at="start", order="blocked"))
    with pytest.raises(InputError, match="lazy-fsl-sage needs --align-until"):
        resolve(Config(algorithm="lazy-fsl-sage"))


# Presets


def test_each_algorithm_takes_its_own_options_of_a_preset():
    paper = load_preset("paper")
    assert resolve(paper).options.align_every == 10
    assert resolve(replace(paper, algorithm="cse-fsl")).options.upload_every == 5
    assert resolve(replace(paper, algorithm="fedavg")) == resolve(replace(paper, algorithm="fedavg", options=None))


def test_a_preset_that_names_its_algorithm_has_options_of_that_one_alone(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('algorithm = "fedavg"\nalign_every = 3\n')
    with pytest.raises(InputError, match=r"mine.toml: --align-every is an option of .*, not of fedavg"):
        resolve(load_preset(file))
    file.write_text("align_every = 3\nalgn_until = 2\n")
    with pytest.raises(InputError, match=r"mine.toml: 'algn_until' is not an option"):
        resolve(load_preset(file))


def test_a_configuration_of_an_older_version_is_read(tmp_path):
    """It held every option of every algorithm, and not all of today's."""
    written = to_dict(Config(algorithm="fedavg", out=tmp_path)) | {"upload_every": 5, "align_every": 7}
    (tmp_path / "config.json").write_text(json.dumps({"config": written}))
    assert resolve(RunDirectory(tmp_path).config()) == resolve(Config(algorithm="fedavg", out=tmp_path))
    written |= {"algorithm": "fsl-sage"}
    (tmp_path / "config.json").write_text(json.dumps({"config": written}))
    assert resolve(RunDirectory(tmp_path).config()).options == FSLSAGEOptions(align_every=7)


# The command line


def seen_by_run(monkeypatch, *words):
    seen = []
    monkeypatch.setattr(commands, "run", lambda config, callbacks: seen.append(config) or pytest.exit("seen"))
    with pytest.raises(pytest.exit.Exception):
        cli.main(["run", *words])
    return seen[0]


def test_options_on_the_command_line_override_a_presets(monkeypatch, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("upload_every = 3\nalign_every = 4\nalign_until = 6\n")
    config = seen_by_run(monkeypatch, str(file), "--align-every", "2", "--warm-start", "--align-rounds", "0,2")
    expected = FSLSAGEOptions(upload_every=3, align_every=2, align_until=6, warm_start=True, align_rounds=(0, 2))
    assert config.options == expected
    assert seen_by_run(monkeypatch, str(file), "--algorithm", "cse-fsl").options.upload_every == 3
    assert seen_by_run(monkeypatch, str(file), "--algorithm=fedavg").options == ALGORITHMS["fedavg"].Options()
    assert seen_by_run(monkeypatch, str(file), "--algorithm", "lazy-fsl-sage").options.align_until == 6


@pytest.mark.parametrize("word", ["--align-every=2", "--warm-start", "--no-warm-start"])
def test_an_option_of_another_algorithm_is_refused_on_the_command_line(capsys, word):
    with pytest.raises(SystemExit) as left:
        cli.main(["run", "--algorithm", "cse-fsl", word])
    assert left.value.code == 2
    assert "is an option of fsl-sage and lazy-fsl-sage, not of cse-fsl" in " ".join(capsys.readouterr().err.split())


def test_help_shows_the_options_of_the_algorithm(capsys):
    for name in ("fsl-sage", "cse-fsl", "fedavg"):
        with pytest.raises(SystemExit):
            cli.main(["run", "--algorithm", name, "--help"])
        said = capsys.readouterr().out
        assert ("--align-every" in said) == (name == "fsl-sage")
        assert ("--upload-every" in said) == (name != "fedavg")
        assert "--options" not in said


# Which options concern an algorithm


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("rounds", set(ALGORITHMS)),
        ("align_every", {"fsl-sage", "lazy-fsl-sage"}),
        ("align_until", {"lazy-fsl-sage"}),
        ("upload_every", {"fsl-sage", "lazy-fsl-sage", "cse-fsl", "heron-sfl"}),
        ("alignment.steps", {"fsl-sage", "lazy-fsl-sage"}),
        ("alignment.samples", {"fsl-sage", "lazy-fsl-sage", "cse-fsl", "heron-sfl"}),
        ("alignment.total_samples", {"fsl-sage", "lazy-fsl-sage", "cse-fsl", "heron-sfl"}),
        ("model.auxiliary", {"fsl-sage", "lazy-fsl-sage", "cse-fsl", "heron-sfl", "fedgkt", "local-loss"}),
        ("optimizer.server_lr", set(ALGORITHMS) - {"fedavg", "fedprox", "fedadam", "fedyogi", "scaffold"}),
        ("averaging.proximal", set(ALGORITHMS)),
    ],
)
def test_which_options_concern_which_algorithms(path, names):
    assert {name for name in ALGORITHMS if concerns(name, path)} == names


# Classes of the user's own


def test_options_that_cannot_be_used_are_refused(monkeypatch):
    @dataclass
    class Thawed:
        mu: float = 1.0

    @dataclass(frozen=True)
    class Taken:
        rounds: int = 1

    refusals = {Thawed: "must be a dataclass with frozen=True", Taken: "--rounds is an option of every run"}
    for options, said in refusals.items():
        monkeypatch.setattr("tests.algorithms.test_options.Mine.Options", options)
        with pytest.raises(InputError, match=said):
            find_algorithm("tests.algorithms.test_options:Mine")


class Mine(Algorithm):
    def local_round(self, client, t):
        yield from ()


@dataclass(frozen=True)
class Needy:
    mu: float
    """It must be given."""


def test_an_option_without_a_default_must_be_given(monkeypatch, capsys):
    monkeypatch.setattr(Mine, "Options", Needy)
    name = "tests.algorithms.test_options:Mine"
    with pytest.raises(InputError, match=f"{name} needs --mu"):
        resolve(Config(algorithm=name))
    assert seen_by_run(monkeypatch, "--algorithm", name, "--mu", "3").options == Needy(3.0)
    with pytest.raises(SystemExit):
        cli.main(["run", "--algorithm", name])
    assert "needs --mu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("algorithm", "averaging", "reason"),
    [
        (
            "heron-sfl",
            {"proximal": 0.1},
            "--averaging.proximal cannot run with heron-sfl: its clients take no",
        ),
        ("fedgkt", {"optimizer": "adam"}, "--averaging.optimizer cannot run with fedgkt: it averages no weights"),
        ("sl", {"proximal": 0.1}, "--averaging.proximal cannot run with sl: its clients hand the model on"),
        ("cpsl", {"optimizer": "yogi"}, "--averaging.optimizer cannot run with cpsl: its clients hand the model on"),
        ("adaptsfl", {"control_variates": True}, "--averaging.control-variates cannot run with adaptsfl"),
    ],
)
def test_averages_without_anything_to_act_on_are_refused(tiny, algorithm, averaging, reason):
    with pytest.raises(InputError, match=reason):
        run(tiny(algorithm=algorithm, averaging=averaging))
