"""Choosing some of the examples, class by class."""

import numpy as np

from fsl_sage.errors import InputError
from fsl_sage.seeding import numpy_generator


def subset(labels: np.ndarray, count: int, least: int, what: str, name: str | None, seed: int) -> np.ndarray:
    """`count` sorted indices of a set's examples, balanced over their labels and chosen by `seed`.

    The draw does not depend on where the set lies: of `folder:PATH` only `folder` counts.

    Args:
        labels: The class of each example, int [N].
        count: How many are wanted, `least` to N.
        least: Fewer are refused.
        what: What the examples are called, such as "training images".
        name: The set, as --data.name; None for one that is drawn by `what` alone.
        seed: The seed of the run.
    """
    if not least <= count <= len(labels):
        of = f" of {name}" if name else ""
        raise InputError(f"{count} {what}{of} were asked for: there can be {least} to {len(labels)}")
    kind = f" of {name.partition(':')[0]}" if name else ""
    return balanced_indices(labels, count, numpy_generator(seed, f"subset of the {what}{kind}"))


def balanced_indices(labels: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` sorted indices, from each class equally many (up to one) as far as the class has them."""
    supply = np.bincount(labels)
    take, left = np.zeros_like(supply), count
    # Smallest class first: what it cannot give is shared by those that follow.
    for position, label in enumerate(np.argsort(supply, kind="stable")):
        take[label] = min(supply[label], left // (len(supply) - position))
        left -= take[label]
    return _draw(labels, take, rng)


def stratified_indices(labels: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` sorted indices, from each class in proportion to its size (by largest remainders)."""
    take, remainder = np.divmod(np.bincount(labels) * count, len(labels))
    take[np.argsort(-remainder, kind="stable")[: count - take.sum()]] += 1
    return _draw(labels, take, rng)


def _draw(labels: np.ndarray, take: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    chosen = [
        rng.choice(np.flatnonzero(labels == label), size, replace=False) for label, size in enumerate(take) if size
    ]
    return np.sort(np.concatenate(chosen))
