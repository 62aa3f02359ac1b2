"""The command line as a user types it: in a process of its own."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fsl_sage import cli
from fsl_sage.cli import commands
from fsl_sage.cli.arguments import CostArguments, RunArguments
from fsl_sage.cli.consoles import OUT
from fsl_sage.cli.front import COMMANDS
from fsl_sage.cli.parsing import parse, parse_comparison
from fsl_sage.errors import InputError
from fsl_sage.records.files import load_tensors
from tests.processes import Started, command

SMALL = [
    "--model.name", "small-cnn", "--data.train-images", "150", "--data.test-images", "100", "--clients", "3",
    "--batch-size", "16", "--rounds", "2", "--align-every", "1", "--alignment.steps", "3", "--device", "cpu",
]  # fmt: skip


def refused(*args, code=2, **options):
    """The one sentence on standard error; no traceback."""
    done = command(*args, **options)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_help():
    done = command("--help")
    assert done.returncode == 0
    assert all(word in done.stdout for word in ("run", "resume", "cost", "data"))
    options = command("run", "--help").stdout
    assert "--data.alpha" in options
    assert "Dirichlet parameter" in options


@pytest.mark.parametrize("words", [["0,1,4"], ["0", "1", "4"], ["0,1", "4"]])
def test_rounds_may_be_joined_by_commas(monkeypatch, words):
    seen = []
    monkeypatch.setattr(commands, "run", lambda config, callbacks: seen.append(config) or pytest.exit("seen"))
    for args in (["--align-rounds", *words], [f"--align-rounds={','.join(words)}"]):
        with pytest.raises(pytest.exit.Exception):
            cli.main(["run", *args, "--rounds", "7"])
    assert {config.options.align_rounds for config in seen} == {(0, 1, 4)}
    assert {config.rounds for config in seen} == {7}


def test_the_defaults_are_those_of_the_data_that_the_options_name(monkeypatch):
    seen = []
    monkeypatch.setattr(commands, "run", lambda config, callbacks: seen.append(config) or pytest.exit("seen"))
    for args in (["--data.name", "e2e"], ["--data.name", "e2e", "--optimizer.lr", "1e-3"], ["--preset", "paper"]):
        with pytest.raises(pytest.exit.Exception):
            cli.main(["run", *args])
    texts, other_rate, images = seen
    assert (texts.batch_size, texts.optimizer.name, texts.optimizer.lr) == (8, "adamw", 2e-4)
    assert (other_rate.batch_size, other_rate.optimizer.name, other_rate.optimizer.lr) == (8, "adamw", 1e-3)
    assert (images.batch_size, images.optimizer.name) == (256, "adam")


@pytest.mark.slow
def test_what_texts_have_by_default_may_be_varied():
    vary = "compare --data.name e2e --model.name hf:gpt2 --vary batch_size=4,8 --out unused --dry-run"
    done = command(*vary.split())
    assert done.returncode == 0, done.stderr
    assert "batch-size4" in done.stdout.replace("\n", "")


@pytest.mark.slow
def test_run_as_the_docs_say(tmp_path):
    out = tmp_path / "run"
    options = """run --algorithm fsl-sage --model.name small-cnn --data.name cifar10-mini --data.partition dirichlet
        --data.alpha 0.5 --clients 4 --rounds 3 --batch-size 32 --local-epochs 1 --upload-every 5 --align-every 10
        --align-until 50 --seed 1 --threads 1 --workers 2 --data.train-images 200 --data.test-images 100 --out"""
    done = command(*options.split(), out)
    assert done.returncode == 0, done.stderr
    assert "best accuracy" in done.stdout
    assert str(out / "accuracy.png") in done.stdout.replace("\n", "")
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3
    assert (out / "model.safetensors").exists()


def test_a_toml_file_gives_defaults_that_options_override(tmp_path):
    preset = tmp_path / "mine.toml"
    preset.write_text(
        'rounds = 1\nclients = 2\nbatch_size = 16\n[data]\nname = "cifar10-mini"\ntrain_images = 60\n'
        'test_images = 50\n[model]\nname = "small-cnn"\n[alignment]\nsteps = 2\n'
    )
    out = tmp_path / "run"
    done = command("run", preset, "--clients", 3, "--out", out)
    assert done.returncode == 0, done.stderr
    config = json.loads((out / "config.json").read_text())["config"]
    assert (config["rounds"], config["clients"], config["model"]["name"]) == (1, 3, "small-cnn")


@pytest.mark.slow
def test_cost_json_at_the_papers_setting():
    done = command("cost", "--preset", "paper", "--json")
    costs = json.loads(done.stdout)
    assert costs["fsl-sage"]["bytes_paper"] == 138_687_040
    assert costs["fsl-sage"]["bytes_paper_aligning"] == 222_881_120
    assert costs["fedavg"]["bytes_total"] == costs["fedavg"]["bytes_paper"] == 895_302_560
    table = command("cost", "--preset", "paper").stdout
    assert "138,687,040" in table


@pytest.mark.slow
def test_kill_and_resume(tmp_path):
    """kill -9 at three moments; the resumed run is the run that was never killed."""
    whole = tmp_path / "whole"
    arguments = [*SMALL, "--rounds", "4", "--align-every", "2"]
    assert command("run", *arguments, "--out", whole).returncode == 0
    for wait_for, moment in enumerate(("config.json", "metrics.jsonl", "checkpoint.safetensors")):
        out = tmp_path / f"killed{wait_for}"
        with Started("run", *arguments, "--out", out) as process:
            while not (out / moment).exists() or not (out / moment).stat().st_size:
                assert process.runs(), "it ended before it could be killed"
                time.sleep(0.002)
            process.kill()
        assert not (out / "result.json").exists()
        assert command("resume", out).returncode == 0
        assert (out / "ledger.csv").read_bytes() == (whole / "ledger.csv").read_bytes()
        first, second = (load_tensors(path / "model.safetensors")[0] for path in (whole, out))
        assert all(torch.equal(first[name], second[name]) for name in first)
        for line, other in zip(*(read_metrics(path) for path in (whole, out)), strict=True):
            assert line == other


def read_metrics(path):
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "elapsed_seconds")} for line in lines]


@pytest.mark.parametrize(("by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_leaves_at_once_and_says_how_to_go_on(tmp_path, by, code):
    out = tmp_path / "run"
    with Started("run", *SMALL, "--rounds", "5000", "--out", out) as process:
        while not (out / "checkpoint.safetensors").exists():
            assert process.runs()
            time.sleep(0.01)
        process.send_signal(by)
        done = process.done(60)
    errors = done.stderr
    assert done.returncode == code
    assert f"fsl-sage resume {out}" in errors.replace("\n", "")
    assert "Traceback" not in errors
    assert (out / "checkpoint.safetensors").exists()


def limited(bytes):
    """For a process that can write no larger file."""
    return partial(resource.setrlimit, resource.RLIMIT_FSIZE, (bytes, bytes))


@pytest.mark.slow
def test_a_limit_to_the_size_of_files_is_said_and_lifted_the_run_goes_on(tmp_path):
    out = tmp_path / "run"
    words = refused("run", *SMALL, "--out", out, code=1, prepare=limited(60_000))
    assert f"checkpoint.safetensors cannot be written: File too large. {KEPT} {out}'" in words.replace("\n", "")
    assert not list(out.glob("*.part"))
    assert command("resume", out).returncode == 0


KEPT = "The last checkpoint is kept: fix that, then continue with 'fsl-sage resume"


@pytest.mark.slow
def test_an_output_that_cannot_be_written_is_no_traceback(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fsl_sage", "cost", "--preset", "paper"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


# Bad input


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--rounds", "-1"], "--rounds -1 is not possible"),
        (["--algorithm", "fsl-saeg"], "did you mean fsl-sage?"),
        (["--model.name", "resnet19"], "resnet18"),
        (["--data.name", "cifar11"], "did you mean cifar10?"),
        (["--data.alpha", "0", "--data.partition", "dirichlet"], "--data.alpha 0 is not possible"),
        (["--clients", "90"], "90 clients"),
        (["--device", "cuda"], "--device cuda is not available"),
        (["--algorithm", "lazy-fsl-sage"], "--align-until"),
        (["--order", "arrival"], "--order arrival"),
        (["--preset", "papr"], "no preset 'papr'"),
        (["--model.cut", "nowhere"], "nowhere"),
    ],
)
def test_impossible_options(tmp_path, args, words):
    assert words in " ".join(refused("run", *SMALL, "--out", tmp_path / "run", *args).split())


def test_an_unknown_option_or_word_is_refused():
    assert "--ronds" in refused("run", "--ronds", "3")
    assert "--rounds" in refused("run", "--rounds", "three")
    assert "not a command" in refused("train")
    assert "--preset paper" in refused("run", "paper")


def test_bad_files(tmp_path):
    broken = tmp_path / "broken.npz"
    broken.write_bytes(b"PK\x03\x04 nothing")
    whole = tmp_path / "whole.npz"
    np.savez(whole, x=np.zeros((40, 8, 8, 3), np.uint8), y=np.arange(40) % 4)
    cut = tmp_path / "cut.npz"
    cut.write_bytes(whole.read_bytes()[:-300])
    for path in (broken, cut, tmp_path / "none.npz"):
        assert path.name in refused("run", "--data.name", f"npz:{path}", "--out", tmp_path / "run").replace("\n", "")
    assert "holds no run" in refused("resume", tmp_path)
    assert "holds no run" in refused("resume", tmp_path / "nowhere")


def test_an_unwritable_directory(tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused("run", *SMALL, "--out", tmp_path / "file" / "run")
    assert (tmp_path / "file").read_text() == ""


def test_an_existing_run_is_kept(tmp_path):
    out = tmp_path / "run"
    assert command("run", *SMALL, "--rounds", "1", "--out", out).returncode == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert "already holds a run" in refused("run", *SMALL, "--out", out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_training_that_fails(tmp_path):
    arguments = [*SMALL, "--optimizer.name", "sgd", "--optimizer.lr", "1e30", "--out", tmp_path / "run"]
    assert "became" in refused("run", *arguments, code=1)


def test_the_module_runs_from_anywhere(tmp_path):
    assert command("cost", "--model.name", "small-cnn", cwd=tmp_path).returncode == 0
    assert not Path(tmp_path / "runs").exists()


def test_a_corrected_command_may_use_the_same_directory(tmp_path):
    out = tmp_path / "run"
    refused("run", *SMALL, "--out", out, "--model.name", "resnet19")
    assert not out.exists()
    assert command("run", *SMALL, "--rounds", "1", "--out", out).returncode == 0


def test_a_preset_may_stand_behind_options(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('clients = 7\nalgorithm = "cse-fsl"\n[compare]\nseeds = [1, 2]')
    for words in ([str(file), "--rounds", "3"], ["--rounds", "3", str(file)]):
        config = parse(RunArguments, "run", words).config
        assert (config.clients, config.algorithm, config.rounds) == (7, "cse-fsl", 3)
        arguments, grid = parse_comparison(words)
        assert (arguments.config.clients, grid.seeds) == (7, (1, 2))
    with pytest.raises(InputError, match="There is no file nope"):
        parse(CostArguments, "cost", ["--clients", "3", "nope.toml"])
    _, grid = parse_comparison(["--algorithms=fedavg", "fsl-sage", "--align-every", "2"])
    assert grid.algorithms == ("fedavg", "fsl-sage")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rounds", "two"], "'two' is not a whole number"),
        (["--optimizer.lr", "0,001"], "'0,001' is not a number such"),
    ],
)
def test_a_word_that_is_no_number_is_refused_in_plain_words(words, told, capsys):
    with pytest.raises(SystemExit):
        parse(RunArguments, "run", words)
    said = capsys.readouterr()
    assert told in said.out + said.err


@pytest.mark.parametrize("name", ["--algorithms", "--seeds", "--alpha"])
def test_a_list_of_a_comparison_has_a_value(name):
    with pytest.raises(InputError, match=f"{name} stands there without a value"):
        parse_comparison([name, "--rounds", "2"])


@pytest.mark.parametrize(("given", "read"), [("1,2", (1, 2)), ("3", (3,))])
def test_commas_may_join_the_lists_of_a_comparison(given, read):
    for words in (["--seeds", given], [f"--seeds={given}"]):
        arguments, grid = parse_comparison(["--algorithms", "fedavg,fsl-sage", *words, "--target", "0.3,0.5"])
        assert (grid.algorithms, grid.seeds) == (("fedavg", "fsl-sage"), read)
        assert arguments.report.target == (0.3, 0.5)
    _, grid = parse_comparison(["--alpha", "iid,0.1", "--vary", "align_every=1,2"])
    assert (grid.alpha, grid.vary) == (("iid", "0.1"), {"align_every": (1, 2)})


def test_a_preset_behind_a_list_is_no_value_of_it(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("clients = 7")
    for words in (["--algorithms", "fedavg", "fsl-sage"], ["--seeds", "1"], ["--seeds=1"]):
        arguments, _ = parse_comparison([*words, str(file)])
        assert (arguments.file, arguments.config.clients) == (file, 7)
    assert parse(RunArguments, "run", ["--align-rounds", "0", "1", str(file)]).config.clients == 7
    with pytest.raises(InputError, match="are several presets"):
        parse_comparison(["other.toml", "--algorithms", "fedavg", str(file)])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--keep-checkpoint=True"], "give --keep-checkpoint or --no-keep-checkpoint"),
        (["--keep-checkpoint", "true"], "give --keep-checkpoint or --no-keep-checkpoint"),
        (["--no-keep-checkpoint", "FALSE"], "give --keep-checkpoint or --no-keep-checkpoint"),
        (["--data.augment=no"], "give --data.augment or --data.no-augment"),
        (["--warm-start=1"], "give --warm-start or --no-warm-start"),
    ],
)
def test_a_flag_takes_no_value(words, told):
    with pytest.raises(InputError, match=f"takes no value: {told}"):
        parse(RunArguments, "run", words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("watch --port abc there", "'abc' is not a whole number"),
        ("resume there --workers x", "'x' is not a whole number"),
        ("report there --target abc", "'abc' is not a number such as 0.5"),
        ("predict there --top x", "'x' is not a whole number"),
    ],
)
def test_every_command_refuses_numbers_in_plain_words(words, told, capsys):
    with pytest.raises(SystemExit):
        cli.main(words.split())
    said = capsys.readouterr()
    assert told in said.out + said.err


def test_a_number_beyond_its_limit_is_told_the_limit():
    with pytest.raises(InputError, match=f"--seed {10**23} is not possible: give a whole number from 0 to {2**62}"):
        parse(RunArguments, "run", ["--seed", str(10**23)])
    with pytest.raises(InputError, match="--seed -1 is not possible: give a whole number from 0 up"):
        parse(RunArguments, "run", ["--seed", "-1"])


def told(words, capsys):
    """What a command that is refused says."""
    with pytest.raises(SystemExit) as left:
        cli.main([*map(str, words)])
    assert left.value.code == 2
    return capsys.readouterr().err


def test_only_what_can_be_fetched_is_offered(capsys):
    said = told(["data", "get", "folder:photos"], capsys)
    assert "cifar10-mini, cifar10, cifar100, fashion-mnist, imdb, smollm2-135m, minilm-l6." in said
    assert "PATH" not in said


@pytest.mark.parametrize(("file", "says"), [("x.txt", "give a PNG file"), ("nodir/x.png", "there is no directory")])
@pytest.mark.parametrize("command", [["cuts"], ["theory", "nowhere"]])
def test_a_figure_that_cannot_be_written_is_refused_before_the_work(command, file, says, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(commands, "cuts_of", lambda _: pytest.fail("the work was done first"))
    assert says in told([*command, "--figure", tmp_path / file], capsys)


def unread():
    """For a process whose output nobody reads."""
    reads, writes = os.pipe()
    os.close(reads)
    os.dup2(writes, 1)


def test_a_training_goes_on_when_nobody_reads(tmp_path):
    out = tmp_path / "run"
    done = command("run", *SMALL, "--out", out, prepare=unread)
    assert (done.returncode, done.stderr) == (0, "")
    assert (out / "result.json").exists()


@pytest.mark.parametrize("words", [["cost", "--model.name", "small-cnn"], [], ["run", "--help"]])
def test_what_is_not_read_any_more_is_no_error(words):
    done = command(*words, prepare=unread)
    assert (done.returncode, done.stderr) == (0, "")


def all_unread():
    """For a process whose output and errors nobody reads."""
    unread()
    os.dup2(1, 2)


def test_an_error_that_is_not_read_keeps_its_exit_code():
    assert command("run", "--rounds", "-1", prepare=all_unread).returncode == 2


@pytest.mark.parametrize("words", [[], ["deploy"]])
@pytest.mark.parametrize("width", [60, 80])
def test_the_list_of_commands_has_a_hanging_indent(words, width, monkeypatch, capsys):
    monkeypatch.setattr(OUT, "_width", width)
    cli.main(words)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    (rows,) = (block.splitlines() for block in shown.split("\n\n") if re.match(r"  \w", block))
    summaries = re.match(r"  \S+( DIR)? +", rows[0]).end()
    assert len(rows) > len(COMMANDS if not words else ("init", "export-side", "demo"))
    assert all(line[:summaries].endswith("  ") for line in rows)


def test_a_command_needs_no_words():
    """`make run` gives none."""
    assert parse(RunArguments, "run", []).config.algorithm == "fsl-sage"
    assert parse(CostArguments, "cost", []).config.algorithm == "fsl-sage"
    assert not parse_comparison([])[1].vary
