"""A problem that a user wrote: a small tabular regression with its own loss and its own score."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from fsl_sage import Batch, Config, InputError, Problem, Score, Task, cost, resume, run
from fsl_sage.config import from_dict, from_file
from fsl_sage.errors import RunWarning
from fsl_sage.records.files import load_tensors
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.report.write import ReportOptions, write_report

COLUMNS = 6


class Regression(Task):
    """A row and the number to predict from it."""

    def __init__(self, train, test, device):
        self.device = device
        self._train, self._test = train, test

    def training_batch(self, indices, generator):
        return self._batch(self._train[indices])

    def test_batches(self):
        return 2

    def test_batch(self, index):
        return self._batch(self._test.chunk(2)[index])

    def loss(self, output, target):
        return nn.functional.huber_loss(output[:, 0], target["price"])

    def terms(self, target):
        return len(target["price"])

    def score(self, output, target):
        error = (output[:, 0] - target["price"]).abs()
        return {"error": error.sum().item(), "count": float(len(error))}

    def summarise(self, sums):
        return {"test_error": sums["error"] / sums["count"]}

    def _batch(self, rows):
        rows = rows.to(self.device)
        return Batch(rows[:, :COLUMNS], {"price": rows[:, COLUMNS]})


class Housing(Problem):
    """Prices that are a line of the columns, which a small network finds."""

    score = Score("test_error", higher_is_better=False)
    model_name = "mlp"

    def __init__(self, rows=120):
        x = torch.randn(rows + 40, COLUMNS, generator=torch.Generator().manual_seed(1))
        table = torch.cat([x, x @ torch.arange(1.0, COLUMNS + 1)[:, None] + 1], 1)
        self.train, self.test = table[:rows], table[rows:]

    @property
    def examples(self):
        return len(self.train)

    def make_model(self, config):
        blocks = [nn.Sequential(nn.Linear(inputs, 16), nn.ReLU()) for inputs in (COLUMNS, 16, 16)]
        return nn.Sequential(*blocks, nn.Linear(16, 1))

    def usual_cut(self, config, model):
        return "0"

    def example(self, batch, device):
        return torch.zeros(batch, COLUMNS, device=device)

    def make_task(self, config, device):
        return Regression(self.train, self.test, device)


def configured(tmp_path, **changes):
    values = {"clients": 3, "rounds": 8, "batch_size": 8, "upload_every": 2, "align_every": 2, "device": "cpu"}
    more = {"optimizer": {"lr": 0.01}, "alignment": {"samples": 32, "steps": 5, "batch_size": 16}}
    made = from_dict({**values, **more, "out": str(tmp_path / "run"), **changes}, Config())
    return from_file(made, "tests", of_several=True)


@pytest.mark.drawn
@pytest.mark.parametrize("algorithm", ["fsl-sage", "cse-fsl", "fedavg"])
def test_it_trains_and_is_judged_by_its_own_score(tmp_path, algorithm):
    result = run(configured(tmp_path, algorithm=algorithm), problem=Housing())
    errors = [line["test_error"] for line in result.metrics]
    assert result.best_score == min(errors) < 0.7 * errors[0]
    assert "test_accuracy" not in result.metrics[-1]
    ended = RunDirectory(result.directory).result()
    assert (ended["score"], ended["best_score"], ended["final_score"]) == ("test_error", min(errors), errors[-1])
    assert ended["final_loss"] is None
    assert (result.directory / "error.png").read_bytes().startswith(b"\x89PNG")
    assert not (result.directory / "classes.csv").exists()


def test_it_is_resumed_exactly_given_the_same_problem(tmp_path):
    whole = run(configured(tmp_path, out=str(tmp_path / "whole")), problem=Housing())

    class StopError(Exception):
        pass

    class Interrupted(Housing):
        name = Housing().name

        def make_task(self, config, device):
            task = super().make_task(config, device)
            task.test_batches = lambda: 2 if len(RunDirectory(config.out).metrics()) < 3 else throw()
            return task

    def throw():
        raise StopError

    with pytest.raises(StopError):
        run(configured(tmp_path), problem=Interrupted())
    with pytest.raises(InputError, match=r"Housing' is not a known data set.*was given in Python as problem="):
        resume(tmp_path / "run")
    with pytest.raises(InputError, match=r"is a run on .*Housing, not on .*Other"):
        resume(tmp_path / "run", problem=type("Other", (Housing,), {})())
    resumed = resume(tmp_path / "run", problem=Housing())
    assert [line["test_error"] for line in resumed.metrics] == [line["test_error"] for line in whole.metrics]
    (first, _), (second, _) = load_tensors(resumed.model_file), load_tensors(whole.model_file)
    assert all(torch.equal(first[name], second[name]) for name in second)


def test_a_target_is_reached_from_above(tmp_path):
    result = run(configured(tmp_path, target_accuracy=5.0, rounds=30), problem=Housing())
    assert result.stopped == "target error 5 reached"
    assert result.metrics[-1]["test_error"] <= 5 < result.metrics[-2]["test_error"]


def test_its_cost_is_what_a_run_moves(tmp_path):
    config = configured(tmp_path, algorithm="cse-fsl", rounds=1)
    moved = run(config, problem=Housing()).metrics[-1]["bytes_paper"]
    assert cost(config, Housing(), algorithms=["cse-fsl"])["cse-fsl"]["bytes_paper"] == moved


def test_a_report_goes_by_the_score_that_is_written_down(tmp_path):
    for algorithm in ("cse-fsl", "fedavg"):
        run(configured(tmp_path, algorithm=algorithm, rounds=2, out=str(tmp_path / algorithm)), problem=Housing())
    written = json.loads((tmp_path / "fedavg" / "config.json").read_text())
    assert written["score"] == {"name": "test_error", "higher_is_better": False, "percent": False}
    assert written["config"]["data"]["name"].endswith(".Housing")
    assert written["config"]["model"]["name"] == "mlp"
    report = write_report(tmp_path, tmp_path / "report", ReportOptions(target=(6.0,)))
    tables = {table.name: table for table in report.tables}
    assert {"best-error", "final-error", "equal-error", "to-target"} <= set(tables)
    best = {line["algorithm"]: line["test_error"] for line in tables["best-error"].data}
    ranks = {row[0].text: row[1].rank for row in tables["best-error"].rows}
    assert ranks[min(ranks, key=lambda name: ranks[name])] == 1
    assert best["fedavg"] != best["cse-fsl"]
    assert (tmp_path / "report" / "figures" / "error-gib.png").exists()


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"shards goes by labels, and .*Housing has none: give iid"):
        run(configured(tmp_path, data={"partition": "shards"}), problem=Housing())
    assert not (tmp_path / "run").exists()

    class Unscored(Housing):
        score = Score("test_r2")

    with pytest.raises(InputError, match="gives no test_r2, the headline score, but test_error"):
        run(configured(tmp_path), problem=Unscored())
    run(replace(configured(tmp_path), rounds=1), problem=Housing())


def test_without_a_usual_cut_it_is_cut_after_the_first_block(tmp_path):
    uncut = type("Uncut", (Housing,), {"usual_cut": Problem.usual_cut})()
    with pytest.warns(RunWarning, match="mlp is cut after its first block, 0;"):
        run(replace(configured(tmp_path), rounds=1), problem=uncut)
