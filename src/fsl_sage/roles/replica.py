"""Weights that take turns in a shared module.

The module that computes is shared by all clients of a worker (a thousand clients must not mean a thousand modules). A
`Replica` is one set of weights for it, with its own optimizer. It goes in by reference: the module's slots are pointed
at the replica's own Parameter objects, so that a graph recorded with one replica stays valid while another one is in.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsl_sage.optimizers import in_layout_of
from fsl_sage.wire.message import Tensors

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Slots:
    """The places of a module where weights that are trained, and buffers, go in. Frozen weights stay where they are."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.installed: Replica | None = None
        self.trainable: set[str] = set()
        self.layouts: Tensors = {}
        """The module's own tensors by name. Every replica keeps their memory layout, which decides the kernels."""
        self.fixed: list[Tensor] = []
        """What no replica brings: frozen weights, and buffers that are not saved."""
        self._places: dict[str, list[tuple[dict[str, Tensor | None], str]]] = {}
        first_name: dict[int, str] = {}  # a tied weight has one name and several places
        for prefix, owner in module.named_modules():
            for key, parameter in owner._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    name = first_name.setdefault(id(parameter), _join(prefix, key))
                    self.trainable.add(name)
                    self._places.setdefault(name, []).append((owner._parameters, key))
                elif parameter is not None:
                    self.fixed.append(parameter)
            for key, buffer in owner._buffers.items():
                if buffer is not None and key not in owner._non_persistent_buffers_set:
                    self._places.setdefault(_join(prefix, key), []).append((owner._buffers, key))
                elif buffer is not None:
                    self.fixed.append(buffer)
        self.layouts = {name: torch.empty_like(tensor, device="meta") for name, tensor in self.tensors().items()}

    def tensors(self) -> Tensors:
        """The module's current tensors by name: those that a replica has. The same ones travel."""
        return {name: places[0][0][places[0][1]].detach() for name, places in self._places.items()}  # type: ignore[union-attr]

    def only(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """Those of these tensors that have a place in the module."""
        return {name: tensor for name, tensor in tensors.items() if name in self._places}

    def frozen(self) -> Tensors:
        """The weights that never change, by name."""
        return {n: p.detach() for n, p in self.module.named_parameters() if not p.requires_grad}

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Point the module's places at these tensors."""
        for name, places in self._places.items():
            tensor = tensors[name]
            for owner, key in places:
                owner[key] = tensor

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[nn.Module]:
        """The module with these tensors in its places; afterwards it has those that it had before."""
        before: dict[str, Any] = {name: places[0][0][places[0][1]] for name, places in self._places.items()}
        self.put(tensors)
        try:
            yield self.module
        finally:
            self.put(before)


def frozen_weights(modules: Iterable[nn.Module]) -> Tensors:
    """The frozen weights that these modules hold; what several of them share is there once."""
    parameters = {id(p): p.detach() for module in modules for p in module.parameters() if not p.requires_grad}
    return {str(number): parameter for number, parameter in enumerate(parameters.values())}


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


class Replica:
    """One set of weights for a shared module, and the optimizer that trains it (none if it is frozen)."""

    def __init__(self, slots: Slots, tensors: Mapping[str, Tensor], make_optimizer: MakeOptimizer | None) -> None:
        self.slots = slots
        self.tensors: Tensors = {}
        for name in (name for name in slots.layouts if name in tensors):  # a file has them in another order
            tensor = tensors[name]
            # Weights from a file or a peer are contiguous; the model's own layout may be another.
            # Trained weights are copied, because the weights that came down are shared with other clients.
            own = in_layout_of(slots.layouts[name], tensor.detach().clone() if make_optimizer else tensor.detach())
            is_parameter = name in slots.trainable
            self.tensors[name] = nn.Parameter(own, requires_grad=make_optimizer is not None) if is_parameter else own
        self.optimizer = make_optimizer(list(self.parameters().values())) if make_optimizer else None

    def parameters(self) -> dict[str, nn.Parameter]:
        """The weights that are trained, by name."""
        return {name: tensor for name, tensor in self.tensors.items() if isinstance(tensor, nn.Parameter)}

    def weights(self) -> Tensors:
        """Weights and buffers as plain tensors, not copied."""
        return {name: tensor.detach() for name, tensor in self.tensors.items()}

    def module(self) -> nn.Module:
        """The shared module with these weights in it."""
        if self.slots.installed is not self:
            self.slots.put(self.tensors)
            self.slots.installed = self
        return self.slots.module

    def set_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Set weights and buffers. The optimizer's state stays."""
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(tensors[name])

    def step(self, lr: float) -> None:
        """Take one optimizer step with the current gradients, then forget them."""
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def adding(self, share: float) -> Iterator[None]:
        """A context: `share` times the gradients computed in it is added to the current ones."""
        parameters = self.parameters().values()
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        yield
        for parameter, sum_before in zip(parameters, before, strict=True):
            if parameter.grad is not None and share != 1:
                parameter.grad.mul_(share)
            if sum_before is not None:
                parameter.grad = sum_before if parameter.grad is None else sum_before.add_(parameter.grad)

    def snapshot(self) -> "Replica":
        """A copy of the weights, without an optimizer. It shares the buffers."""
        copy = Replica(self.slots, {}, None)
        for name, tensor in self.tensors.items():
            is_parameter = isinstance(tensor, nn.Parameter)
            copy.tensors[name] = nn.Parameter(tensor.detach().clone()) if is_parameter else tensor
        return copy

    def seen_by(self, slots: Slots) -> "Replica":
        """The same weights and buffers in another module, as far as it has places for them."""
        view = Replica(slots, {}, None)
        view.tensors = slots.only(self.tensors)
        return view

    def take_gradients(self, other: "Replica") -> None:
        """Take over the gradients of another replica of the same weights."""
        for name, parameter in other.parameters().items():
            self.parameters()[name].grad = parameter.grad

    def held(self) -> list[Tensor]:
        """The tensors themselves of weights, buffers and the optimizer: all that this replica has in memory."""
        return [*self.tensors.values(), *self.optimizer_state().values()]

    def move(self, copied: Callable[[Tensor], Tensor]) -> None:
        """Hold copies of all that `held` has; what was held is let go."""
        for tensor in self.tensors.values():
            tensor.data = copied(tensor.detach())
        # Others in their place: a tensor that was read from a file refers to all of it, whatever its data are.
        self.load_optimizer_state({path: copied(tensor) for path, tensor in self.optimizer_state().items()})

    def optimizer_state(self) -> Tensors:
        """The optimizer's state as a flat dict "weight's name/entry"."""
        if self.optimizer is None:
            return {}
        return {
            f"{name}/{entry}": value
            for name, parameter in self.parameters().items()
            for entry, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `optimizer_state` returned. A tensor with the weight's memory layout is not copied."""
        parameters = self.parameters()
        for path, value in state.items():
            assert self.optimizer is not None
            name, entry = path.rsplit("/", 1)
            self.optimizer.state[parameters[name]][entry] = in_layout_of(parameters[name], value)
