"""A run's progress where there is no terminal."""

from pathlib import Path

from fsl_sage.config import Config, DataConfig, ModelConfig
from fsl_sage.records.plain_lines import PlainLines

CONFIG = Config(algorithm="cse-fsl", rounds=3, data=DataConfig(name="cifar10"), model=ModelConfig(name="small-cnn"))
ROUND = {
    "round": 1,
    "test_accuracy": 0.254,
    "test_loss": 2.1234,
    "bytes_paper": 2**29,
    "fidelity_cosine": 0.5,
    "fidelity_cosine_seen": 0.75,
    "seconds": 1.26,
}


def test_what_runs_and_one_line_a_round():
    lines = []
    tracker = PlainLines(lines.append)
    tracker.start(CONFIG, Path("runs/mine"), [ROUND])
    tracker.round(ROUND)
    tracker.round({**ROUND, "round": 2, "fidelity_cosine": None, "fidelity_cosine_seen": None})
    tracker.finish({})
    assert lines == [
        "cse-fsl · small-cnn on cifar10 (iid) · 5 clients, batch 32 · up to 3 rounds, going on after 1 round",
        "files in runs/mine",
        "round 2/3  accuracy 25.4%  loss 2.123  GiB 0.500  fidelity 0.50 → 0.75  time 1.3 s",
        "round 3/3  accuracy 25.4%  loss 2.123  GiB 0.500  fidelity -  time 1.3 s",
    ]


def test_lines_are_seen_at_once(capsys):
    PlainLines().start(CONFIG, Path("runs/mine"), [])
    assert capsys.readouterr().out.splitlines()[1] == "files in runs/mine"
