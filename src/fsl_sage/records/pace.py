"""How long a run will take, at the pace so far."""

from collections.abc import Mapping
from typing import Any

from fsl_sage.wire.ledger import GIB

_START = {"round": -1, "elapsed_seconds": 0.0, "bytes_paper": 0}


def time_left(
    metrics: Mapping[str, Any],
    rounds: int,
    budget_gib: float | None = None,
    max_seconds: float | None = None,
    first: Mapping[str, Any] | None = None,
) -> float:
    """Seconds until the first stop rule that can be foreseen.

    Args:
        metrics: Those of the newest round.
        rounds: The rounds that the run has at most.
        budget_gib: The GiB that it may move, if that is limited.
        max_seconds: The seconds that it may take, if they are limited.
        first: The metrics of the first round. It is slower than the others, so the pace is that of the rounds after it,
            as soon as there are any.
    """
    before = first if first is not None and first["round"] < metrics["round"] else _START
    done, took, moved = (metrics[name] - before[name] for name in ("round", "elapsed_seconds", "bytes_paper"))
    ends = [(rounds - 1 - metrics["round"]) / done]
    if budget_gib is not None and moved:
        ends.append((budget_gib * GIB - metrics["bytes_paper"]) / moved)
    left = min(ends) * took
    return max(0.0, min(left, max_seconds - metrics["elapsed_seconds"]) if max_seconds is not None else left)
