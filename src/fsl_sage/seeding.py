"""Every random number of a run, derived from (seed, purpose, client, round, step).

There is no stream whose position would have to be saved: a resumed run, another engine or another number of workers
asks for the same key and gets the same numbers. Draws happen on the CPU whatever the device, for the same reason.
"""

import hashlib

import numpy as np
import torch


def derive(seed: int, purpose: str, client: int = -1, round: int = -1, step: int = -1) -> int:
    """A 63-bit seed for one purpose ("order", "augment", "cohort", …); -1 stands for "not by client" and so on."""
    key = f"{seed}/{purpose}/{client}/{round}/{step}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, client: int = -1, round: int = -1, step: int = -1) -> torch.Generator:
    """A fresh torch generator (CPU) for the key."""
    return torch.Generator().manual_seed(derive(seed, purpose, client, round, step))


def numpy_generator(seed: int, purpose: str, client: int = -1, round: int = -1, step: int = -1) -> np.random.Generator:
    """A fresh NumPy generator for the key."""
    return np.random.default_rng(derive(seed, purpose, client, round, step))
