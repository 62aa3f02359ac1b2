"""Runs of somebody else in a report: each is shown, or left out in a sentence."""

import json

import pytest

from fsl_sage import InputError, report
from fsl_sage.report.load import load_runs
from fsl_sage.report.study import make_study
from fsl_sage.report.tables import make_tables

from .made_up import made_up_config, write_run

STRANGE = ["x", [], {}, True, -1, 10**400, float("nan"), None]
NUMBERS = ["round", "test_accuracy", "test_loss", "bytes_paper", "bytes_total", "seconds", "elapsed_seconds"]
METRICS = {
    f"{name} is {value!r:.20}": (name, value) for name in [*NUMBERS, "fidelity_cosine", "aligned"] for value in STRANGE
}
OPTIONS = ["algorithm", "seed", "rounds", "align_every", "data", "model", "optimizer", "nobody_knows"]
ABOUT = ["versions", "machine", "score", "digest", "started", "config"]
FILES = {
    "config.json": ["", "[]", "[" * 100_000, '{"config":' * 50_000, '{"config": {}}', "\x00"],
    "metrics.jsonl": ["[" * 100_000 + "\n", '{"round": 0}\n', "{}\n", "\x00\n", '{"round": 9e999}\n'],
    "ledger.csv": [
        f"round,client,direction,kind,bytes\n{line}\n"
        for line in ("-1000000000,0,up,labels,8", f"0,0,up,auxiliary,{'9' * 400}", "0,0", "a,b,c,d,e", "9e9,0,up,x,-5")
    ],
    "result.json": ["[]", "{}", "null", '{"stopped": []}', "[" * 100_000],
    "classes.csv": ["", "client\n", "client,a\n0,x\n", f"client,a\n0,{'9' * 400}\n", "client,a\n0,1\n1\n", "\x00"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run as it should be, and one that each test spoils."""
    folder = tmp_path_factory.mktemp("runs")
    for name, seed in (("good", 1), ("bad", 2)):
        write_run(folder / name, made_up_config("fsl-sage", seed, rounds=3, clients=2))
    return folder


@pytest.fixture
def told(folder):
    """Reads both runs, with another text in a file of the second, and makes the tables; returns what is said."""

    def tell(name, text):
        file = folder / "bad" / name
        whole = file.read_text()
        file.write_text(text)
        try:
            runs, notes = load_runs(folder)
        finally:
            file.write_text(whole)
        assert make_tables(make_study(runs), ())
        assert all(note.startswith("bad is left out: ") for note in notes), notes
        assert len(runs) == 2 - len(notes)
        return notes

    return tell


def test_any_file(folder, told):
    assert told("result.json", (folder / "bad" / "result.json").read_text()) == []
    for name, texts in FILES.items():
        for text in texts:
            told(name, text)
    assert told("config.json", "[" * 100_000) == ["bad is left out: config.json is damaged."]


@pytest.mark.slow
def test_any_metric(folder, told):
    lines = [json.loads(line) for line in (folder / "bad" / "metrics.jsonl").read_text().splitlines()]
    for name, value in METRICS.values():
        text = "".join(json.dumps({**line, name: value}) + "\n" for line in lines)
        told("metrics.jsonl", text)
    assert told("metrics.jsonl", json.dumps({**lines[0], "seconds": "x"}) + "\n") == [
        "bad is left out: its seconds is not a number in every round."
    ]


@pytest.mark.slow
def test_any_option(folder, told):
    written = json.loads((folder / "bad" / "config.json").read_text())
    for value in STRANGE:
        for name in OPTIONS:
            told("config.json", json.dumps({**written, "config": {**written["config"], name: value}}))
        for name in ABOUT:
            told("config.json", json.dumps({**written, name: value}))
        group = {**written["config"]["data"], "alpha": value, "partition": "dirichlet"}
        told("config.json", json.dumps({**written, "config": {**written["config"], "data": group}}))


def test_a_folder_of_nothing_else(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match="There is no run to report"):
        report(tmp_path, tmp_path / "report")
