"""The F-server: averages what the clients send."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fsl_sage.config import AveragingConfig
from fsl_sage.precision import wide
from fsl_sage.roles import fed_opt
from fsl_sage.roles.averaging import RULES, RunningMean, RunningSum, mean_of_optimizers
from fsl_sage.roles.extra import kept
from fsl_sage.roles.protocols import FServerRole, Parts, Update
from fsl_sage.wire.message import CONTROL, OPTIMIZER_STATE, Tensors
from fsl_sage.wire.paths import below, flat, grouped

OPTIMIZER = "optimizer/"
"""The prefix of what FedOpt keeps in `FServer.extra`."""


class FServer(FServerRole):
    """Holds the averaged weights by part."""

    def __init__(
        self,
        initial: Parts,
        averaged: Sequence[str],
        trained: Mapping[str, frozenset[str]],
        client_weights: Sequence[float],
        options: AveragingConfig,
    ) -> None:
        """Start from the initial weights.

        Args:
            initial: What travels of each part, before round 0.
            averaged: The parts that are averaged in every round.
            trained: By part the names of the weights that are trained; the others are buffers.
            client_weights: How much each client counts in an average.
            options: How to average.
        """
        self.weights: dict[str, Tensors] = {part: initial[part] for part in averaged}
        self.client_weights = client_weights
        self.extra: Tensors = {}
        self.sends: dict[str, Tensors] = {}
        self._initial = initial
        self._trained = {f"{part}/{name}" for part in averaged for name in trained[part]}
        self._options = options
        self._running: RunningMean | None = None
        self._along: _Along | None = None
        """The sums of what has come with updates, where `fold` took them."""

    def expect(self, clients: Sequence[int]) -> None:
        """From now on `fold` takes the updates of all of these clients, in their order, for the next `mean`."""
        weights = [self.client_weights[client] for client in clients]
        self._running, self._along = RunningMean(weights), _Along(weights)

    def fold(self, update: Update) -> Update:
        """Add an update to the mean, and what came with it to its sums; returns it with the shapes of all alone."""
        assert self._running is not None
        assert self._along is not None
        self._running.add(flat(update.parts))
        self._along.add(update)
        return replace(update, parts=_shapes(update.parts), extra=_shapes(update.extra))

    def mean(self, updates: Sequence[Update]) -> dict[str, Tensors]:
        """x_c^{t+1}, the weighted mean (Algorithm 2, line 7), or another average, in the order of the clients."""
        if self._running is not None:
            running, self._running = self._running, None
            return grouped(running.result())
        updates = sorted(updates, key=lambda update: update.client)
        states = [flat(update.parts) for update in updates]
        weights = [self.client_weights[update.client] for update in updates]
        return grouped(RULES[self._options.rule](states, weights, flat({**self._initial, **self.weights})))

    def take(self, averaged: Parts, updates: Sequence[Update]) -> None:
        """Renew the weights: by a step towards an average of these updates. Renew the control variates too."""
        for part, tensors in grouped(self._step(flat(averaged))).items():
            self.weights[part] = tensors
        along, self._along = self._along or self._came_with(updates), None
        if self._options.control_variates:
            self._renew_control(along.controls)
        if optimizers := along.optimizers.result():
            self.sends[OPTIMIZER_STATE] = optimizers

    def _came_with(self, updates: Sequence[Update]) -> "_Along":
        updates = sorted(updates, key=lambda update: update.client)
        along = _Along([self.client_weights[update.client] for update in updates])
        for update in updates:
            along.add(update)
        return along

    def _step(self, average: Tensors) -> Tensors:
        if self._options.takes_the_average:
            return average
        x = flat(self.weights)
        trained = {path: tensor for path, tensor in average.items() if path in self._trained}
        state = below(OPTIMIZER, self.extra)
        stepped = fed_opt.step(self._options, x, trained, state)
        self.extra |= {f"{OPTIMIZER}{path}": tensor for path, tensor in state.items()}
        return {**average, **stepped}

    def _renew_control(self, changes: RunningSum) -> None:
        """SCAFFOLD: c moves by the changes of the c_i over the number of all clients, and so stays their mean."""
        for path, total, dtype in changes.result():
            moved = total / len(self.client_weights)
            c = self.extra.get(f"{CONTROL}/{path}", torch.zeros_like(moved))
            self.extra[f"{CONTROL}/{path}"] = (wide(c) + moved).to(dtype)
        self.sends[CONTROL] = below(f"{CONTROL}/", self.extra)

    def state(self) -> Tensors:
        """A flat dict for a checkpoint."""
        return (
            flat(self.weights, "weights/") | flat({"extra": kept(self.extra, "f_server")}) | flat(self.sends, "sends/")
        )

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self.weights = grouped(below("weights/", state))
        self.extra = below("extra/", state)
        self.sends = grouped(below("sends/", state))


class _Along:
    """What comes with the updates of a round, summed in the order of the clients: optimizers and control variates."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.optimizers = mean_of_optimizers(weights)
        self.controls = RunningSum()

    def add(self, update: Update) -> None:
        self.optimizers.add(update.extra.get(OPTIMIZER_STATE, {}))
        self.controls.add(update.extra.get(CONTROL, {}))


def _shapes(groups: Parts) -> dict[str, Tensors]:
    return {key: {name: x.to("meta") for name, x in own.items()} for key, own in groups.items()}


def client_weights(weighting: str, examples: Sequence[int]) -> list[float]:
    """How much each client counts in an average."""
    return [float(count) if weighting == "examples" else 1.0 for count in examples]
