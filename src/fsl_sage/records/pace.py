"""How long a run will take, at the pace so far."""

from collections.abc import Mapping
from typing import Any

from fsl_sage.wire.ledger import GIB


def time_left(
    metrics: Mapping[str, Any], rounds: int, budget_gib: float | None = None, max_seconds: float | None = None
) -> float:
    """Seconds until the first stop rule that can be foreseen.

    Args:
        metrics: Those of the newest round.
        rounds: The rounds that the run has at most.
        budget_gib: The GiB that it may move, if that is limited.
        max_seconds: The seconds that it may take, if they are limited.
    """
    done, elapsed = metrics["round"] + 1, metrics["elapsed_seconds"]
    ends = [rounds / done]
    if budget_gib is not None and metrics["bytes_paper"]:
        ends.append(budget_gib * GIB / metrics["bytes_paper"])
    left = (min(ends) - 1) * elapsed
    return max(0.0, min(left, max_seconds - elapsed) if max_seconds is not None else left)
