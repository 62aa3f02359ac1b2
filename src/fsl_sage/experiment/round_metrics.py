"""What the metrics of a round, and the result of a run, say."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from fsl_sage.alignment.fidelity import Fidelity
from fsl_sage.config import Config
from fsl_sage.engines.base import REMEDY
from fsl_sage.errors import InputError, TrainingError, listed
from fsl_sage.problems.score import RECORDED, Score
from fsl_sage.roles.footprint import Footprint
from fsl_sage.roles.protocols import Update
from fsl_sage.wire.ledger import GIB

BEYOND = 1000.0
"""A training with such a test loss has failed: guessing among 50,000 words gives 11."""


def training_losses(updates: Sequence[Update], server_loss: float | None, t: int) -> dict[str, float | None]:
    """Training losses of the round: of the true model (S-server's, or FedAvg's clients'), and of the auxiliaries."""
    if server_loss is not None and not np.isfinite(server_loss):
        raise TrainingError(f"The loss of the S-server became {server_loss} in round {t}. {REMEDY}")
    clients = [update.losses["client_loss"] for update in updates if "client_loss" in update.losses]
    client_loss = sum(clients) / len(clients) if clients else None
    if server_loss is None:
        return {"train_loss": client_loss, "auxiliary_loss": None}
    return {"train_loss": server_loss, "auxiliary_loss": client_loss}


def fidelities(held_out: Fidelity | None, seen: Fidelity | None) -> dict[str, float | None]:
    """The fidelity of the auxiliaries on uploads that no alignment has seen, and on those that one has."""
    return {
        "fidelity_cosine": held_out.cosine if held_out else None,
        "fidelity_nmse": held_out.nmse if held_out else None,
        "fidelity_cosine_seen": seen.cosine if seen else None,
        "fidelity_nmse_seen": seen.nmse if seen else None,
    }


def mean_over_clients(values: Sequence[Any]) -> Any:
    """The mean of a metric over clients. For a list the mean of each entry, without unknown ones (None)."""
    if isinstance(values[0], list):
        return [mean_over_clients(entries) for entries in zip(*values, strict=True)]
    return None if None in values else sum(values) / len(values)


def finite(scores: dict[str, Any], t: int) -> dict[str, Any]:
    """Refuse metrics that are not finite: such a model must not reach a checkpoint."""
    for name, value in scores.items():
        if not isinstance(value, list) and not np.isfinite(value):
            raise TrainingError(f"The {name.replace('_', ' ')} became {value} in round {t}. {REMEDY}")
    return scores


def row_of(t: int, scores: Mapping[str, Any], recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of round t: the task's, and what every run records. No name may stand for two numbers."""
    clash = sorted(name for name in scores if name in {"round", *RECORDED, *recorded})
    if clash:
        raise InputError(
            f"The task gives a metric called {listed(clash)}, and every run records another one under this name: let "
            "`summarise` give it another name."
        )
    return {"round": t, **scores, **recorded}


def footprint_figures(footprints: Mapping[str, Footprint]) -> dict[str, int]:
    """Memory and operations of the roles' first steps, by their names in the metrics."""
    return {f"{role}_{name}": value for role, each in footprints.items() for name, value in asdict(each).items()}


def footprints_in(metrics: Iterable[Mapping[str, Any]]) -> dict[str, Footprint]:
    """The footprints by role that were measured in these rounds."""
    names = [field.name for field in fields(Footprint)]
    return {
        role: Footprint(*(line[f"{role}_{name}"] for name in names))
        for line in metrics
        for role in ("client", "server")
        if f"{role}_{names[0]}" in line
    }


def stop_reason(config: Config, score: Score, metrics: Sequence[dict[str, Any]]) -> str | None:
    """Which stop rule the rounds so far have met, if any."""
    if not metrics:
        return None
    last = metrics[-1]
    if config.target_accuracy is not None and score.reaches(last[score.name], config.target_accuracy):
        return f"target {score.short} {score.text(config.target_accuracy)} reached"
    if config.budget_gib is not None and last["bytes_paper"] >= config.budget_gib * GIB:
        return f"communication budget of {config.budget_gib:g} GiB used"
    if config.max_seconds is not None and last["elapsed_seconds"] >= config.max_seconds:
        return f"time limit of {config.max_seconds:g} s reached"
    if len(metrics) >= config.rounds:
        return "its one round played" if config.rounds == 1 else f"all {config.rounds} rounds played"
    return None


def summary(metrics: Sequence[dict[str, Any]], score: Score, stopped: str) -> dict[str, Any]:
    """What result.json has, from the metrics of all rounds and the reason why the run ended."""
    best = score.best_of(metrics)
    last = metrics[-1]
    return {
        **_diverged(score, last.get("test_loss")),
        "stopped": stopped,
        "rounds": len(metrics),
        "score": score.name,
        "best_score": best[score.name],
        "best_round": best["round"],
        "final_score": last[score.name],
        "final_loss": last.get("test_loss"),
        "bytes_total": last["bytes_total"],
        "bytes_paper": last["bytes_paper"],
        "bytes_whole_models": last["bytes_whole_models"],
        "elapsed_seconds": last["elapsed_seconds"],
        **footprint_figures(footprints_in(metrics)),
    }


def _diverged(score: Score, loss: float | None) -> dict[str, str]:
    """A remark on a loss that no working training has; only if the score says that the loss is an entropy."""
    if not score.percent or loss is None or loss <= BEYOND:
        return {}
    remark = (
        f"The training diverged: its last test loss is {loss:.3g}, where a model that knows nothing has about the "
        "logarithm of the number of classes. A lower --optimizer.lr usually helps."
    )
    return {"remark": remark}
