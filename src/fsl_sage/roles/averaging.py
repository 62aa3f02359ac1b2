"""The one place that averages weights: the weighted mean, and rules that survive poisoned updates.

`mean` is the paper's. The others bound what one client can do to the average. They are not free: where clients' data
differ, an honest client that is unlike the others is bounded too.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fsl_sage.precision import wide
from fsl_sage.wire.message import Tensors

TRIMMED = 0.1
"""The share of the clients that `trimmed-mean` leaves out at each end, at least one."""

PIECE = 2**18
"""Numbers that are added at a time: 2 MiB in float64."""

Rule = Callable[[Sequence[Tensors], Sequence[float], Tensors], Tensors]
"""(the clients' states, how much each counts, the state that they started from) to the new state."""


def average(states: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
    """The weighted mean of each tensor over the states that hold it, summed in the order given.

    BatchNorm statistics are averaged like weights, in float; integer step counters are not averaged, the largest is
    kept. Sums run in float64, so that the mean of equal tensors is that tensor.
    """
    return {name: _average_one(*_holders(name, states, weights)) for name in _names(states)}


def mean(states: Sequence[Tensors], weights: Sequence[float], start: Tensors) -> Tensors:
    """The weighted mean. One client with weights of 1e6 times the others' decides it."""
    return average(states, weights)


def clipped(states: Sequence[Tensors], weights: Sequence[float], start: Tensors) -> Tensors:
    """The weighted mean of the changes, each scaled down to the median of their norms where it is larger."""
    norms = [_distance(state, start) for state in states]
    limit = float(torch.tensor(norms, dtype=torch.float64).quantile(0.5))
    near = [
        _towards(state, start, limit / norm if norm > limit else 1.0) for state, norm in zip(states, norms, strict=True)
    ]
    return average(near, weights)


def median(states: Sequence[Tensors], weights: Sequence[float], start: Tensors) -> Tensors:
    """The median of each number over the clients, which all count the same."""
    return _by_rank(states, lambda count: (count - 1) // 2)


def trimmed_mean(states: Sequence[Tensors], weights: Sequence[float], start: Tensors) -> Tensors:
    """The mean of each number without its largest and its smallest tenth; the clients all count the same."""
    return _by_rank(states, lambda count: min(max(1, round(TRIMMED * count)), (count - 1) // 2))


RULES: dict[str, Rule] = {"mean": mean, "clipped": clipped, "trimmed-mean": trimmed_mean, "median": median}


def _by_rank(states: Sequence[Tensors], left_out: Callable[[int], int]) -> Tensors:
    """The mean of each number over the clients; `left_out` says how many of the smallest and largest do not count."""
    result = {}
    for name in _names(states):
        tensors, _ = _holders(name, states, [1.0] * len(states))
        ranked = torch.stack([wide(tensor) for tensor in tensors]).sort(0).values
        cut = left_out(len(tensors))
        middle = ranked[cut : len(tensors) - cut].mean(0)
        result[name] = (middle if tensors[0].is_floating_point() else middle.round()).to(tensors[0].dtype)
    return result


def _names(states: Sequence[Tensors]) -> list[str]:
    return list(dict.fromkeys(name for state in states for name in state))


def _holders(name: str, states: Sequence[Tensors], weights: Sequence[float]) -> tuple[list[Tensor], list[float]]:
    """The tensors of this name, and the weights of the states that have it."""
    pairs = [(state[name], weight) for state, weight in zip(states, weights, strict=True) if name in state]
    return [tensor for tensor, _ in pairs], [weight for _, weight in pairs]


def _average_one(tensors: list[Tensor], weights: list[float]) -> Tensor:
    whole = sum(weights)
    total = _Total(tensors[0])
    for tensor, weight in zip(tensors, weights, strict=True):
        total.add(tensor, weight / whole)
    return total.mean(len(tensors))


class RunningMean:
    """`average` of states that come one after the other, of which none is kept.

    Where all have the same names it is that to the bit. A name that some of them lack is averaged over the others.
    """

    def __init__(self, weights: Sequence[float], is_counter: Callable[[str], bool] = lambda name: False) -> None:
        """Start.

        Args:
            weights: How much each of the states that will come counts, in their order.
            is_counter: Of which names the largest is kept, as of integers.
        """
        whole = sum(weights)
        self._all = len(weights)
        self._shares = iter([weight / whole for weight in weights])
        self._is_counter = is_counter
        self._totals: dict[str, _Total] = {}

    def add(self, state: Tensors) -> None:
        """One state more."""
        share = next(self._shares, None)
        if share is None:
            raise ValueError("more states have come than weights were given for")
        for name, tensor in state.items():
            if name not in self._totals:
                self._totals[name] = _Total(tensor, of_largest=self._is_counter(name))
            self._totals[name].add(tensor, share)

    def result(self) -> Tensors:
        """The mean, when all have come."""
        return {name: total.mean(self._all) for name, total in self._totals.items()}


def mean_of_optimizers(weights: Sequence[float]) -> RunningMean:
    """Of what optimizers remember: the mean of moments and momentum; of step counters the largest."""
    return RunningMean(weights, lambda path: path.endswith("/step"))


class RunningSum:
    """The sum of states that come one after the other, of which none is kept."""

    def __init__(self) -> None:
        self._totals: dict[str, _Total] = {}

    def add(self, state: Tensors) -> None:
        """One state more."""
        for name, tensor in state.items():
            if name not in self._totals:
                self._totals[name] = _Total(tensor)
            self._totals[name].add(tensor, 1.0)

    def result(self) -> Iterator[tuple[str, Tensor, torch.dtype]]:
        """By name the sum, in float64, and the type of what was added."""
        return ((name, total.sum, total.dtype) for name, total in self._totals.items())


class _Total:
    """The weighted sum of tensors like the first: in float64. Of integers, and of counters, the largest."""

    def __init__(self, first: Tensor, *, of_largest: bool = False) -> None:
        self.dtype = first.dtype
        self._adds = first.is_floating_point() and not of_largest
        # In a dry run the mean has this shape, and torch would take long to compute it.
        self.sum = torch.zeros_like(wide(first)) if self._adds else first.clone()
        self._count, self._share = 0, 0.0

    def add(self, tensor: Tensor, share: float) -> None:
        self._count, self._share = self._count + 1, self._share + share
        if self.sum.is_meta:
            return
        if self._adds:
            for total, piece in zip(_pieces(self.sum), _pieces(tensor), strict=True):
                total.add_(piece, alpha=share)
        else:
            self.sum = torch.maximum(self.sum, tensor)

    def mean(self, count: int) -> Tensor:
        """The sum, if it is one of so many shares of the whole; else over the sum of those that came."""
        complete = self._count == count or not self._adds
        return (self.sum if complete else self.sum / self._share).to(self.dtype)


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Views of a tensor, along its first dimension, that are small enough for a processor's cache.

    torch widens what it adds in a copy of its own, which for a whole layer would go through memory.
    """
    if tensor.numel() <= PIECE or tensor.device.type != "cpu":
        return (tensor,)
    return torch.split(tensor, max(1, PIECE * len(tensor) // tensor.numel()))


def _distance(state: Tensors, start: Tensors) -> float:
    """The norm of the change of all floating tensors together; 0 where there are only shapes."""
    if any(tensor.is_meta for tensor in state.values()):
        return 0.0
    squares = [
        float((wide(x) - wide(start[name])).square().sum()) for name, x in state.items() if x.is_floating_point()
    ]
    return math.sqrt(math.fsum(squares))


def _towards(state: Tensors, start: Tensors, share: float) -> Tensors:
    """The state after this share of the way from `start` to `state`."""
    if share == 1:
        return state
    return {
        name: (wide(start[name]) + share * (wide(x) - wide(start[name]))).to(x.dtype) if x.is_floating_point() else x
        for name, x in state.items()
    }
