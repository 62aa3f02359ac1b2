"""Problems, augmentations and models that are named by MODULE:NAME, in every command and on Ray."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsl_sage import Config, InputError, Tracker, compare, cost, resume, run
from fsl_sage.cli import main
from fsl_sage.config import brings_modules, from_dict, from_file
from fsl_sage.experiment.cuts import cuts_of
from fsl_sage.own_modules import is_own
from fsl_sage.problems import make_dry_problem, make_problem
from fsl_sage.records.files import load_tensors
from fsl_sage.records.run_directory import RunDirectory

MODULE = """
import torch
from torch import nn
from fsl_sage import Score, TensorProblem

def error(output, y):
    return (output - y).square().mean()

def away(output, y):
    return (output - y).abs().mean(1)

def prices(config):
    x = torch.randn(60 + 20, 4, generator=torch.Generator().manual_seed(config.seed))
    y = x.sum(1, keepdim=True)
    problem = TensorProblem(
        (x[:60], y[:60]), (x[60:], y[60:]), model, error, away, Score("test_error", higher_is_better=False), cut="0"
    )
    problem.model_name = "mlp"
    return problem

def model():
    blocks = [nn.Sequential(nn.Linear(n, 8), nn.Tanh()) for n in (4, 8, 8)]
    return nn.Sequential(*blocks, nn.Linear(8, 1))

def classifier(classes, channels):
    return nn.Sequential(nn.Conv2d(channels, 4, 3), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64, classes))

def flip(images, generator):
    return images.flip(3)

def smaller(images, generator):
    return images[:, :, 1:]

def alone(images):
    return images

def anew(images, generator):
    return torch.randint_like(images, 256)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The name of a module in the current folder."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


def configured(own, **changes):
    values = {
        "clients": 2,
        "rounds": 3,
        "batch_size": 8,
        "upload_every": 1,
        "align_every": 2,
        "alignment": {"samples": 16, "steps": 3, "batch_size": 8},
        "data": {"name": f"{own}:prices"},
        "device": "cpu",
        "out": "run",
    }
    return from_file(from_dict({**values, **changes}, Config()), "tests", of_several=True)


def same_weights(first, second):
    (one, _), (other, _) = load_tensors(first.model_file), load_tensors(second.model_file)
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("algorithm", ["fsl-sage", "cse-fsl", "fedavg"])
def test_a_problem_is_named_and_trained(own, algorithm):
    config = configured(own, algorithm=algorithm)
    result = run(config)
    assert result.score.name == "test_error"
    assert result.best_score < result.metrics[0]["test_error"]
    assert (result.config.data.name, result.config.model.name) == (f"{own}:prices", "mlp")
    said = cost(config, algorithms=[algorithm])[algorithm]["bytes_paper"]
    assert said == result.metrics[1]["bytes_paper"] - result.metrics[0]["bytes_paper"]
    given = run(replace(config, out=None), problem=make_problem(config))
    assert same_weights(result, given)


def test_every_command_takes_it(own, capsys):
    words = ["--data.name", f"{own}:prices", "--clients", "2", "--rounds", "2", "--device", "cpu"]
    main(["run", *words, "--out", "once"])
    assert RunDirectory(Path("once")).finished()
    capsys.readouterr()
    main(["cost", *words, "--json"])
    assert set(json.loads(capsys.readouterr().out)) >= {"fsl-sage", "cse-fsl", "fedavg"}
    main(["cuts", *words, "--json"])
    names = [cut["name"] for cut in json.loads(capsys.readouterr().out)["cuts"]]
    assert {"0", "1", "2"} <= set(names)
    assert names == [cut.point.name for cut in cuts_of(configured(own))]
    main(["report", "."])
    assert Path("report", "report.html").exists()


def test_an_interrupted_run_goes_on_by_its_name(own):
    class Stop(Tracker):
        def round(self, metrics):
            if metrics["round"] == 1:
                raise KeyboardInterrupt

    whole = run(configured(own, out="whole"))
    with pytest.raises(KeyboardInterrupt):
        run(configured(own), callbacks=[Stop()])
    assert same_weights(resume(Path("run")), whole)


@pytest.mark.usefixtures("forked_runs")
def test_it_is_compared(own):
    done = compare(configured(own, rounds=1), algorithms=["fedavg", "cse-fsl"], out="both", jobs=1)
    done.raise_failures()
    assert {result.config.model.name for result in done.results.values()} == {"mlp"}
    assert {result.score.name for result in done.results.values()} == {"test_error"}


def test_a_factory_sees_the_configuration(own):
    first, second = (make_problem(configured(own, seed=seed)) for seed in (1, 2))
    assert not torch.equal(first.train[0], second.train[0])
    assert torch.equal(make_dry_problem(configured(own, seed=2, algorithm="fedavg")).train[0], second.train[0])


def test_names_are_told_from_kinds():
    assert [is_own(name) for name in ("mine:Housing", "my.mine:make", "my.mine:Big.make")] == [True] * 3
    assert not any(
        is_own(name) for name in ("npz:x", "folder:x", "jsonl:x", "datasets:x", "hf:gpt2", "e2e", "a:/b", None)
    )
    assert brings_modules(from_dict({"data": {"augmentation": "mine:flip"}}))
    assert brings_modules(from_dict({"data": {"name": "mine.Housing"}}))
    assert not brings_modules(from_dict({"data": {"name": "npz:my.file"}}))


def test_an_augmentation_of_ones_own_takes_the_place_of_the_usual_one(own, tiny):
    config = tiny(data={"augmentation": f"{own}:flip"})
    plain = tiny(data={"augment": False})
    indices, generator = torch.arange(5), torch.Generator()
    mine, usual = (
        make_problem(each).make_task(each, torch.device("cpu")).training_batch(indices, generator).inputs
        for each in (config, plain)
    )
    assert torch.equal(mine, usual.flip(3))
    with pytest.raises(InputError, match=r"--data\.augmentation has no effect with --data\.no-augment"):
        make_problem(tiny(data={"augmentation": f"{own}:flip", "augment": False}))
    missing = tiny(data={"augmentation": f"{own}:nothing"})
    with pytest.raises(InputError, match=r"--data\.augmentation .*:nothing is not there: "):
        make_problem(missing).make_task(missing, torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "smaller",
            r"smaller made torch.uint8 \[2, 3, 31, 32\] of torch.uint8 \[2, 3, 32, 32\]: both must be the same",
        ),
        ("alone", r"alone fails on images \[2, 3, 32, 32\] and a torch.Generator: TypeError: alone\(\) takes 1 pos"),
        ("anew", r"anew makes other images of the same ones with the same torch.Generator: draw all random numbers"),
    ],
)
def test_an_augmentation_that_does_not_work_is_refused_before_anything_is_trained(own, tiny, name, reason):
    config = tiny(data={"augmentation": f"{own}:{name}"})
    with pytest.raises(InputError, match=reason):
        make_problem(config).make_task(config, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_on_ray_it_has_the_same_bits(own, tiny):
    pytest.importorskip("ray")
    here, there = (run(configured(own, engine=engine, out=engine, workers=2)) for engine in ("local", "ray"))
    assert same_weights(here, there)
    assert [line["test_error"] for line in here.metrics] == [line["test_error"] for line in there.metrics]
    given = run(replace(configured(own, engine="ray", workers=2), out=None), problem=make_problem(configured(own)))
    assert same_weights(here, given)
    images = {
        "data": {"augmentation": f"{own}:flip", "class_weights": "balanced"},
        "model": {"name": f"{own}:classifier", "cut": "0", "auxiliary": "linear"},
    }
    same = [run(tiny(engine=engine, rounds=1, **images)) for engine in ("local", "ray")]
    assert same_weights(*same)
    assert same[0].metrics[0]["test_class_f1"] == same[1].metrics[0]["test_class_f1"]
