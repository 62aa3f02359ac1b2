"""Attention that can be differentiated twice, as alignment needs.

The fused attention kernels have no double backward. Which kernel is used is a switch of the whole process, and several
alignments may run in threads side by side: the first one in sets the switch, the last one out puts it back.
"""

from contextlib import AbstractContextManager
from threading import Lock
from types import TracebackType

from torch.nn.attention import SDPBackend, sdpa_kernel


class _MathAttention(AbstractContextManager[None]):
    def __init__(self) -> None:
        self._lock = Lock()
        self._inside = 0

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._switch = sdpa_kernel(SDPBackend.MATH)
                self._switch.__enter__()
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._switch.__exit__(None, None, None)


_SWITCH = _MathAttention()


def twice_differentiable_attention() -> AbstractContextManager[None]:
    """Attention by the kernel that has a double backward. A switch of the whole process, which threads may share."""
    return _SWITCH
