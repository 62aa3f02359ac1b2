"""The official CIFAR batches are pickles. Here one is read without making a single object that it names.

A pickle is a program for a small machine, and its objects can be asked to run code or to read memory: numpy.ndarray
alone, with a type of pointers, is enough. So the program is looked through first, and only the steps that build plain
containers are let pass. What it calls numpy's is a stand-in, which notes the shape, the type and the bytes of an
array; the array is made of them afterwards, and of integers only.
"""

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np

_PLAIN_STEPS = """
    PROTO FRAME STOP MARK POP POP_MARK DUP MEMOIZE PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET
    NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4
    STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8
    UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8
    EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT DICT SETITEM SETITEMS
    GLOBAL STACK_GLOBAL REDUCE BUILD
"""
_STEPS = frozenset(_PLAIN_STEPS.split())
_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
"""The official files were written by Python 2; NumPy 2 renamed the module for newer ones."""


def unpickle_batch(raw: bytes) -> dict[str, Any]:
    """The dict in a batch, with its arrays of integers; a ValueError or pickle.UnpicklingError for all else."""
    _look_through(raw)
    batch = _BatchUnpickler(io.BytesIO(raw), encoding="latin1").load()
    if not isinstance(batch, dict):
        raise ValueError("it is not a dict")
    return {key: value.made() if isinstance(value, _Array) else value for key, value in batch.items()}


def _look_through(raw: bytes) -> None:
    """Refuse what no batch needs, and numbers of memory cells that would make the unpickler ask for gigabytes."""
    for place, (step, argument, _) in enumerate(pickletools.genops(raw)):
        if step.name not in _STEPS:
            raise pickle.UnpicklingError(f"it holds the step {step.name}, which builds no plain data")
        cell = int(argument or 0) if step.name in ("PUT", "BINPUT", "LONG_BINPUT") else 0
        if not 0 <= cell <= place:
            raise pickle.UnpicklingError(f"it asks for {cell:,} memory cells")


class _BatchUnpickler(pickle.Unpickler):
    """Gives stand-ins for what an array of NumPy is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name in the pickle. Raises an UnpicklingError for every other name."""
        if module == "numpy" and name == "ndarray":
            return _StandIn(_refuse)
        if module == "numpy" and name == "dtype":
            return _StandIn(_Kind)
        if module in _MODULES and name == "_reconstruct":
            return _StandIn(lambda *arguments: _Array())
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


class _StandIn:
    """A stand-in for a name of NumPy. It can be called, but not changed."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *arguments: Any) -> Any:
        return self._make(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it changes what is NumPy's")


def _refuse(*arguments: Any) -> Any:
    raise pickle.UnpicklingError("it makes an array of its own instead of a plain one")


class _Kind:
    """The type of an array's numbers: of integers, or refused."""

    __slots__ = ("code", "order")

    def __init__(self, code: Any, *more: Any) -> None:
        code = code.decode("latin1") if isinstance(code, bytes) else code
        if code not in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"):
            raise pickle.UnpicklingError(f"it holds an array of type {str(code)[:20]!r} and not of integers")
        self.code, self.order = code, "="

    def __setstate__(self, state: Any) -> None:
        order = state[1].decode("latin1") if isinstance(state[1], bytes) else state[1]
        if order not in ("|", "<", ">", "="):
            raise pickle.UnpicklingError("the byte order of its numbers is unknown")
        self.order = order

    def made(self) -> np.dtype:
        """The dtype, with the byte order that the pickle says."""
        return np.dtype(self.code).newbyteorder(self.order)


class _Array:
    """What a pickle says of an array."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state: Any = None

    def __setstate__(self, state: Any) -> None:
        self._state = state

    def made(self) -> np.ndarray:
        """The array, if its bytes are as many as its shape says."""
        _, shape, kind, by_columns, raw = self._state
        raw = raw.encode("latin1") if isinstance(raw, str) else raw
        if not isinstance(raw, bytes) or not isinstance(kind, _Kind):
            raise ValueError("its array is not one of plain numbers")
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError("the shape of its array is impossible")
        if math.prod(shape) * kind.made().itemsize != len(raw):
            raise ValueError("its array has not as many bytes as its shape says")
        numbers = np.frombuffer(raw, kind.made()).astype(kind.made().newbyteorder("="))
        return numbers.reshape(shape, order="F" if by_columns else "C")
