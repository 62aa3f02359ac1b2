"""Choosing some of the images, class by class."""

import numpy as np


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
