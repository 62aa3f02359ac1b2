"""Learning-rate schedules, by torch's own classes."""

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import nn
from torch.optim import lr_scheduler

from fsl_sage.config import OptimizerConfig


class Schedule:
    """The learning rate at local step k of round t, for the clients and for the S-server."""

    def __init__(self, config: OptimizerConfig, lr: float, rounds: int, steps: int) -> None:
        self.steps = steps
        self._table = None if _is_constant(config) else _table(config, lr, rounds * steps)
        self._lr = lr

    def __call__(self, t: int, k: int) -> float:
        """The learning rate at step k of round t."""
        if self._table is None:
            return self._lr
        return self._table[min(t * self.steps + k, len(self._table) - 1)]


def _is_constant(config: OptimizerConfig) -> bool:
    return config.schedule == "constant" and config.warmup == 0


@lru_cache
def _table(config: OptimizerConfig, lr: float, total: int) -> tuple[float, ...]:
    """The learning rate of every step of the run. So no scheduler has a state to save."""
    warm = round(config.warmup * total)
    rest = max(1, total - warm)
    thirds = [max(1, rest // 3), max(1, 2 * rest // 3)]  # the first step has the learning rate that was given
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=lr)
    schedulers: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
        "constant": partial(lr_scheduler.ConstantLR, factor=1.0),
        "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=rest),
        "linear": partial(lr_scheduler.LinearLR, start_factor=1.0, end_factor=config.decay, total_iters=rest),
        "step": partial(lr_scheduler.MultiStepLR, milestones=thirds, gamma=config.decay),
        "exponential": partial(lr_scheduler.ExponentialLR, gamma=config.decay ** (1 / rest)),
    }
    main = _values(optimizer, schedulers[config.schedule](optimizer), rest)
    if not warm:
        return main
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=lr)
    rise = lr_scheduler.LinearLR(optimizer, start_factor=1 / (warm + 1), total_iters=warm)
    return (*_values(optimizer, rise, warm), *main)


def _values(optimizer: torch.optim.Optimizer, scheduler: lr_scheduler.LRScheduler, count: int) -> tuple[float, ...]:
    values = []
    for _ in range(count):
        values.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return tuple(values)
