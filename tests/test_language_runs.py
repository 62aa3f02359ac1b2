"""Whole runs of tiny language models: what travels, what is saved, what comes back."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsl_sage.cli import main
from fsl_sage.config import Config
from fsl_sage.errors import InputError
from fsl_sage.experiment import cost, resume, run, run_cost
from fsl_sage.experiment.setup import make_dry_setup
from fsl_sage.inference import evaluate, predict
from fsl_sage.problems.texts.e2e import encode_prompts
from fsl_sage.records.files import load_tensors
from fsl_sage.records.trackers import Tracker
from fsl_sage.roles.client import local_order
from fsl_sage.text.trained import load_trained
from tests.conftest import merge
from tests.texts import WORDS, save_all, save_model, save_tokenizer

FOUR = ["fsl-sage", "cse-fsl", "splitfed-ss", "fedavg"]
Tiny = Callable[..., Config]


class Stop(Tracker):
    """Interrupts after the second round."""

    def round(self, metrics: dict[str, Any]) -> None:
        if metrics["round"] == 1:
            raise KeyboardInterrupt


@pytest.fixture
def texts(tiny: Tiny, tmp_path: Path) -> Tiny:
    """Makes tiny configurations for a tiny language model."""
    options = save_all(tmp_path)

    def make(**changes: Any) -> Config:
        return tiny(**merge(options, changes))

    return make


@pytest.mark.parametrize(
    "algorithm",
    [name if name == "fsl-sage" else pytest.param(name, marks=pytest.mark.slow) for name in (*FOUR, "splitfed-ms")],
)
def test_a_run_learns_and_its_cost_was_known(texts: Tiny, algorithm: str) -> None:
    config = texts(algorithm=algorithm, rounds=3, optimizer={"lr": 1e-2})
    foreseen = run_cost(config)
    result = run(config)
    first, last = result.metrics[0], result.metrics[-1]
    assert last["test_loss"] < first["test_loss"]
    assert last["test_perplexity"] == pytest.approx(torch.tensor(last["test_loss"]).double().exp().item())
    for name in ("bytes_total", "bytes_paper", "bytes_whole_models"):
        assert foreseen[name] == last[name]
    assert last["bytes_whole_models"] > last["bytes_paper"]


ESTIMATORS: dict[str, dict[str, Any]] = {
    "ridge": {"model": {"auxiliary": "ridge:9"}, "hold": 0.1, "align_every": 1},
    "tokens": {"alignment": {"tokens": 300, "passes": 2, "max_tokens": 500, "loss": "cosine"}, "align_every": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimators_learn_resume_exactly_and_their_cost_was_known(texts: Tiny, estimator: str) -> None:
    """Interrupted after round 1; the run that goes on has the bits of one that was not."""
    changes = {"rounds": 4, "cohort": 0.67, "optimizer": {"lr": 1e-2}, **ESTIMATORS[estimator]}
    whole = run(texts(**changes))
    foreseen, last = run_cost(texts(**changes)), whole.metrics[-1]
    assert last["test_loss"] < whole.metrics[0]["test_loss"]
    for name in ("bytes_total", "bytes_paper", "bytes_whole_models"):
        assert foreseen[name] == last[name]
    config = texts(**changes)
    with pytest.raises(KeyboardInterrupt):
        run(config, [Stop()])
    again = resume(str(config.out))
    assert again.model_file.read_bytes() == whole.model_file.read_bytes()
    assert [line["fidelity_cosine"] for line in again.metrics] == [line["fidelity_cosine"] for line in whole.metrics]


def test_the_bytes_of_an_upload_are_exact(texts: Tiny) -> None:
    config = texts(algorithm="cse-fsl", rounds=1, clients=2)
    ledger = (run(config).directory / "ledger.csv").read_text().splitlines()
    setup = make_dry_setup(config)
    width, positions = 16, 0
    for client in range(2):
        for indices in local_order(len(setup.examples[client]), config, client, 0):
            lengths = setup.settings.task.data.train.lengths[setup.examples[client][indices]]  # type: ignore[attr-defined]
            positions += len(indices) * (int(lengths.max()) - 1)
    up = [line.split(",") for line in ledger[1:] if ",up," in line]
    sent = {kind: sum(int(row[4]) for row in up if row[3] == kind) for kind in ("activations", "labels")}
    assert sent == {"activations": positions * width * 4, "labels": positions * (4 + 1)}


def test_what_is_frozen_is_sent_once_and_only_then(texts: Tiny) -> None:
    costs = cost(texts(lora={"auxiliary": "adapters"}), algorithms=["fedavg", "fsl-sage"])
    width, words, positions, blocks = 16, len(WORDS.split()), 256, 5
    block = 12 * width**2 + 13 * width
    adapters = 4 * width + 3 * width * 4
    fedavg = costs["fedavg"]
    assert fedavg["by_kind"]["full model"]["up"] == 3 * blocks * adapters * 4
    model = (words + positions) * width + blocks * (block + adapters) + 2 * width
    assert fedavg["bytes_first_download"] == 3 * model * 4
    assert fedavg["bytes_whole_models"] == 2 * 3 * model * 4
    sage = costs["fsl-sage"]
    held = (words + positions) * width + 4 * (block + adapters) + 2 * width  # the decoder is the client's embedding
    assert sage["bytes_first_download"] == 3 * held * 4
    assert sage["by_kind_aligning"]["auxiliary"]["down"] == 3 * 3 * adapters * 4


@pytest.mark.slow
def test_without_the_texts_the_cost_is_an_upper_bound(texts: Tiny, tmp_path: Path) -> None:
    here = texts()
    away = replace(here, data=replace(here.data, dir=tmp_path / "nowhere", train_images=24, sequence_length=40))
    exact, bound = cost(here), cost(away)
    for name, row in exact.items():
        assert not row["is_upper_bound"]
        assert bound[name]["is_upper_bound"]
        assert row["bytes_total"] <= bound[name]["bytes_total"]
    with pytest.raises(InputError, match="restaurant"):
        cost(replace(away, data=replace(away.data, partition="restaurant")))


def test_a_resumed_run_is_the_run_that_never_stopped(texts: Tiny, tmp_path: Path) -> None:
    config = texts(rounds=3, lora={"dropout": 0.2})
    whole = run(config)
    again = tmp_path / "again"
    with pytest.raises(KeyboardInterrupt):
        run(replace(config, out=again), [Stop()])
    resumed = resume(again)
    times = ("seconds", "elapsed_seconds")
    assert [{k: v for k, v in line.items() if k not in times} for line in resumed.metrics] == [
        {k: v for k, v in line.items() if k not in times} for line in whole.metrics
    ]
    a, b = (load_tensors(directory / "model.safetensors")[0] for directory in (whole.directory, again))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_workers_and_partitions_by_restaurant(texts: Tiny) -> None:
    one = run(texts(workers=1, data={"partition": "restaurant"})).metrics
    two = run(texts(workers=2, data={"partition": "restaurant"})).metrics
    assert [line["test_loss"] for line in one] == [line["test_loss"] for line in two]


def test_a_finished_run_gives_its_model_back(texts: Tiny) -> None:
    result = run(texts(algorithm="fedavg", rounds=1))
    trained, before = load_trained(result.directory), load_trained(result.directory, adapter=False)
    saved, _ = load_tensors(result.model_file)
    assert all(".lora_" in name for name in saved)
    state = trained.model.state_dict()
    assert all(torch.equal(state[f"base_model.model.{name}"], tensor) for name, tensor in saved.items())
    assert [len(meaning.references) for meaning in trained.test]
    tokens = torch.tensor(encode_prompts(trained.tokenizer, [trained.test[0].meaning]))
    assert not torch.allclose(trained.model(input_ids=tokens).logits, before.model(input_ids=tokens).logits)
    written = trained.model.generate(input_ids=tokens, max_new_tokens=3, num_beams=2, do_sample=False)
    assert written.shape[1] > tokens.shape[1]


@pytest.mark.slow
def test_the_command_shows_what_a_run_writes(texts: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(texts(algorithm="fedavg", rounds=1))
    directory = result.directory
    few = ["--decoding.beams", "2", "--decoding.max-new-tokens", "4"]
    main(["samples", str(directory), "--count", "2", *few])
    shown = capsys.readouterr().out
    assert shown.count("people wrote") == shown.count("generated") == 2
    assert "before training" not in shown
    assert not (directory / "scores.json").exists()

    main(["samples", str(directory), "--scores", "--count", "3", *few])
    assert "BLEU" in capsys.readouterr().out
    scores = json.loads((directory / "scores.json").read_text())
    assert scores["meanings"] == 3
    assert scores["before"]["test_loss"] != scores["after"]["test_loss"] == result.metrics[-1]["test_loss"]
    assert len((directory / "samples.jsonl").read_text().splitlines()) == 3


def test_only_runs_on_texts_have_a_model_that_writes(tiny: Tiny) -> None:
    result = run(tiny(rounds=1, algorithm="fedavg"))
    with pytest.raises(InputError, match="only one on e2e"):
        load_trained(result.directory)


def test_a_model_that_is_not_here_yet_is_to_be_fetched(
    texts: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSL_SAGE_DATA", str(tmp_path))
    with pytest.raises(InputError, match="get it by 'fsl-sage data get smollm2-135m'"):
        run(texts(model={"name": "hf:smollm2-135m"}))


def test_a_tokenizer_with_too_many_words_is_refused(texts: Tiny, tmp_path: Path) -> None:
    small = save_model(tmp_path / "small", "gpt2", 20)
    config = texts(model={"name": f"hf:{small}"}, data={"tokenizer": str(save_tokenizer(tmp_path / "words"))})
    with pytest.raises(InputError, match=r"tokens and hf:.*small 20"):
        run(config)
    with pytest.raises(InputError, match="brings no tokenizer"):
        run(replace(config, data=replace(config.data, tokenizer=None)))
    with pytest.raises(InputError, match="has nothing to train"):
        run(texts(model={"cut": "transformer.wte"}))


def test_a_trained_model_is_evaluated_as_the_run_did(texts: Tiny) -> None:
    config = texts(rounds=1)
    result = run(config)
    metrics = evaluate(config.out)
    assert metrics == {name: result.metrics[-1][name] for name in metrics}
    with pytest.raises(InputError, match="not on images"):
        predict(config.out, ["x.png"])
