"""What a forward pass does: which modules are called, and which values each operation reads.

A trace is a list of nodes in the order of time, so that "before the cut" is a comparison of two positions. It is taken
on a copy of the model's structure, by watching the functions that the model's own Python code calls; nothing is
compiled, so any control flow works.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fsl_sage.errors import InputError, described
from fsl_sage.split.errors import SplitError
from fsl_sage.split.trace.skeleton import Original, tensor_leaves

_DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "rrelu"}
_DRAWS = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "multinomial"),
    *("bernoulli", "bernoulli_", "uniform_", "normal_", "exponential_", "random_", "poisson", "gumbel_softmax"),
}
# They read a tensor's values into Python, where the model may branch on them.
_READERS = {
    *("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__complex__"),
    *("__contains__", "is_nonzero", "equal", "allclose"),
}
# They look at the shape or the type of an argument, not at its values: of the first one, or of all but the first.
_SHAPE_OF_FIRST = {
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"),
}
_SHAPE_OF_OTHERS = {"expand_as", "view_as", "reshape_as", "type_as", "to"}


@dataclass(frozen=True, slots=True)
class Node:
    """One event: an input, a parameter or buffer, an operation, or a tensor that a module returned."""

    kind: Literal["input", "state", "operation", "leaf"]
    what: str
    """The input's name, a name of the parameter, the function, or the module that returned it."""
    call: int
    """The innermost module call in which it happened, by its position in `Trace.calls`; -1 outside."""
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    """The storages that it changed in place."""
    random: bool = False
    into_python: bool = False
    storage: int = -1


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of what a module took or returned: a tensor's shape, or a plain value."""

    node: int
    """The tensor's node; -1 for a plain value."""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    value: Any = None

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor and no plain value."""
        return self.node >= 0


@dataclass(slots=True)
class Call:
    """One call of a module, and what it returned."""

    name: str
    parent: int
    enter: int
    exit: int = -1
    """Nodes before this position happened before the call returned."""
    structure: pytree.TreeSpec | None = None
    leaves: list[Leaf] = field(default_factory=list)


@dataclass(slots=True)
class Trace:
    """What happened in one run of a model: the tensors that were made, and the calls of its modules."""

    nodes: list[Node] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    inputs: list[Leaf] = field(default_factory=list)
    state_names: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """The names of the parameter or buffer at a node; several where it is tied."""

    def ancestors(self, call: int) -> Iterator[int]:
        """The calls that were running when this one started, from the inside to the outside."""
        while (call := self.calls[call].parent) >= 0:
            yield call


@dataclass(slots=True)
class _Tag:
    """What is known of a tensor object: the node that made it, its version then, and its storage."""

    node: int
    version: int
    storage: int


class _Watch:
    """Stands as `forward` of one module and tells the tracer when it is called and what it returns."""

    def __init__(self, module: nn.Module, name: str, tracer: "_Tracer") -> None:
        self.original = Original(module)
        self.name = name
        self.tracer = tracer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.tracer.calling(self.name) as call:
            return self.tracer.returned(call, self.original(*args, **kwargs))


class _Tracer(TorchFunctionMode):
    """Records every torch function that the model's code calls, with the values that it reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()
        self._running = -1
        self.failed_in = ""
        """The innermost module whose forward raised."""
        self._states: dict[int, _Tag] = {}
        self._storages = 0
        self._written: dict[int, list[tuple[int, int]]] = {}

    # -- what there is before the first operation --------------------------------------------------------------------

    def add_states(self, tensors: dict[str, Tensor]) -> None:
        """Make a node for every parameter and buffer. A tensor with several names has one."""
        names: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            names.setdefault(id(tensor), []).append(name)
        for name, tensor in tensors.items():
            if names[id(tensor)][0] != name:
                continue
            node = self._add(Node("state", name, -1))
            self.trace.state_names[node] = tuple(names[id(tensor)])
            self._states[id(tensor)] = _Tag(node, tensor._version, self._new_storage())

    def add_input(self, name: str, value: Any) -> Any:
        """Note one leaf of the arguments; a tensor comes back as an object of its own, so that it can be tagged."""
        if not isinstance(value, Tensor):
            self.trace.inputs.append(Leaf(-1, value=value))
            return value
        value = value.view_as(value)
        node = self._add(Node("input", name, -1, storage=self._storages))
        self._tag(value, node, self._new_storage())
        self.trace.inputs.append(Leaf(node, tuple(value.shape), value.dtype))
        return value

    # -- calls of modules ----------------------------------------------------------------------------------------------

    @contextmanager
    def calling(self, name: str) -> Iterator[Call]:
        """A context in which the module of this name is the one that runs."""
        call = Call(name, self._running, len(self.trace.nodes))
        self.trace.calls.append(call)
        outer, self._running = self._running, len(self.trace.calls) - 1
        try:
            yield call
        except Exception:
            self.failed_in = self.failed_in or name
            raise
        finally:
            self._running = outer

    def returned(self, call: Call, output: Any) -> Any:
        """Make a node for every tensor that a module returns, and hand it on as an object of its own.

        So the output of a module that returns its input, such as dropout in evaluation, differs from that input.
        """
        leaves, call.structure = pytree.tree_flatten(output)
        call.exit = len(self.trace.nodes)
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                call.leaves.append(Leaf(-1, value=leaf))
                continue
            with torch._C.DisableTorchFunction():
                reads, storage = self._read(leaf), self._storage_of(leaf)
                leaves[position] = leaf = leaf.view_as(leaf)
                node = self._add(Node("leaf", call.name, self._running, reads, storage=storage))
                self._tag(leaf, node, storage)
                call.leaves.append(Leaf(node, tuple(leaf.shape), leaf.dtype))
        return pytree.tree_unflatten(leaves, call.structure)

    # -- operations ----------------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        tensors = tensor_leaves((args, kwargs))
        versions = [tensor._version for tensor in tensors]
        reads = tuple(dict.fromkeys(node for tensor in self._value_arguments(name, args, kwargs) for node in tensor))
        result = func(*args, **kwargs)
        outputs = tensor_leaves(result)
        changed = [tensor for tensor, version in zip(tensors, versions, strict=True) if tensor._version != version]
        if not outputs and not changed and name not in _READERS:
            return result
        if isinstance(result, Tensor) and not changed and any(result is tensor for tensor in tensors):
            result = result.view_as(result)
            outputs = [result]
        self._record(name, reads, tensors, outputs, changed, _is_random(name, args, kwargs))
        return result

    def _value_arguments(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int, ...]]:
        """The nodes of the arguments whose values count."""
        if name in _SHAPE_OF_FIRST:
            args = args[1:]
        elif name in _SHAPE_OF_OTHERS:
            args, kwargs = args[:1], {}
        return [self._read(tensor) for tensor in tensor_leaves((args, kwargs))]

    def _record(
        self,
        name: str,
        reads: tuple[int, ...],
        tensors: list[Tensor],
        outputs: list[Tensor],
        changed: list[Tensor],
        random: bool,
    ) -> None:
        writes = tuple(dict.fromkeys(self._storage_of(tensor) for tensor in changed))
        into_python = name in _READERS and not outputs
        node = self._add(Node("operation", name, self._running, reads, writes, random, into_python))
        for tensor in changed:
            self._written.setdefault(self._storage_of(tensor), []).append((node, tensor._version))
        for output in outputs:
            if not any(output is tensor for tensor in tensors):
                shared = next((tensor for tensor in tensors if _share_memory(tensor, output)), None)
                self._tag(output, node, self._storage_of(shared) if shared is not None else self._new_storage())

    def _read(self, tensor: Tensor) -> tuple[int, ...]:
        """The nodes that made the tensor's present values: its own, and those that wrote into it since."""
        tag = self._tag_of(tensor)
        if tag is None:
            return ()
        if tensor._version == tag.version:
            return (tag.node,)
        since = (node for node, version in self._written.get(tag.storage, ()) if version > tag.version)
        return (tag.node, *since)

    # -- bookkeeping ---------------------------------------------------------------------------------------------------

    def _add(self, node: Node) -> int:
        self.trace.nodes.append(node)
        return len(self.trace.nodes) - 1

    def _new_storage(self) -> int:
        self._storages += 1
        return self._storages - 1

    def _tag(self, tensor: Tensor, node: int, storage: int) -> None:
        if id(tensor) not in self._states:
            tensor._fsl_sage_tag = _Tag(node, tensor._version, storage)  # type: ignore[attr-defined]

    def _tag_of(self, tensor: Tensor) -> _Tag | None:
        return self._states.get(id(tensor)) or getattr(tensor, "_fsl_sage_tag", None)

    def _storage_of(self, tensor: Tensor) -> int:
        tag = self._tag_of(tensor)
        return tag.storage if tag else -1


def _share_memory(one: Tensor, other: Tensor) -> bool:
    try:
        return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # tensors without a storage, inside of vmap for instance
        return False


def _is_random(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name in _DROPOUTS:
        probability = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        training = kwargs.get("training", args[2] if len(args) > 2 else True)
        return bool(training) and probability != 0
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    return name in _DRAWS


def record(
    model: nn.Module, tensors: dict[str, Tensor], names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Trace:
    """Run `model`, which is changed by it and must be a copy, once and without gradients.

    `names` are the names of the arguments' leaves; `tensors` the model's parameters and buffers.
    """
    tracer = _Tracer()
    tracer.add_states(tensors)
    leaves, structure = pytree.tree_flatten((args, kwargs))
    leaves = [tracer.add_input(name, leaf) for name, leaf in zip(names, leaves, strict=True)]
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    # A module object that is registered twice is one module and gets one name.
    for name, module in model.named_modules():
        module.__dict__["forward"] = _Watch(module, name, tracer)
    try:
        with torch.no_grad(), tracer:
            model(*args, **kwargs)
    except InputError:
        raise
    except Exception as error:
        given = ", ".join(str(list(leaf.shape)) for leaf in leaves if isinstance(leaf, Tensor))
        where = f"its module {tracer.failed_in} raises" if tracer.failed_in else "it raises"
        raise SplitError(f"the model fails on a batch of the shape {given}: {where} {described(error)}.") from error
    return tracer.trace
