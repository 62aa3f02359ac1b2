"""What every process that trains sets once."""

import ctypes
import mmap
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT = 512 * 2**20
_LARGEST_FROM_THE_HEAP = 32 * 2**20
_SMALL = 2**16
CPU = torch.device("cpu")


def prepare_process(threads: int, device: torch.device = CPU) -> None:
    """Give torch so many threads, keep freed memory for the next step, and take large tensors from huge pages.

    On a GPU, have it compute the same bits each time.
    """
    torch.set_num_threads(threads)
    keep_freed_memory()
    prefer_huge_pages()
    prepare_device(device)


def prepare_device(device: torch.device) -> torch.device:
    """Returns the device, set up to compute the same bits each time if it is a GPU. It must come before its first use.

    A second time nothing happens, and on a CPU nothing at all.
    """
    if device.type == "cuda":
        compute_exactly()
    return device


def compute_exactly() -> None:
    """Let a GPU compute in full float32, by kernels that give the same bits each time.

    torch warns of an operation that has no such kernel, and goes on. cuBLAS reads the variable when it starts.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False  # it would choose kernels by their time
    torch.backends.cudnn.allow_tf32 = False  # 10 bits of a product's 23
    torch.backends.cuda.matmul.allow_tf32 = False


def prepare_small_process(threads: int) -> None:
    """Give torch so many threads, and give freed memory back at once.

    For a client at its site. Its memory is what the site has least of, so it takes no more than its tensors do, at the
    price of about a tenth of a step.
    """
    torch.set_num_threads(threads)
    _set_malloc(_SMALL, _SMALL)


def peak_memory() -> int:
    """The most bytes that this process has had in memory at once."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def check_room(count: int) -> None:
    """Raise a MemoryError if the kernel does not let this process have so many bytes more. None are taken."""
    if count and hasattr(mmap, "MAP_ANONYMOUS"):
        try:
            mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        except OSError as error:
            raise MemoryError(error.strerror) from None


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Give torch so many threads within the context. The number of threads can change the bits of a result."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def import_path() -> str:
    """Where this process finds modules besides the installed ones, for PYTHONPATH of a process that it starts."""
    places = (os.path.abspath(place) for place in sys.path)  # an empty one is the current directory
    return os.pathsep.join(dict.fromkeys(place for place in places if not is_installed(place)))


def is_installed(place: str) -> bool:
    """Whether a file or folder belongs to Python or to the packages installed in it."""
    return place.startswith(tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))


def prefer_huge_pages() -> None:
    """Let torch ask for pages of 2 MiB for large tensors, where the kernel gives them on demand.

    glibc gives tensors above 32 MiB back whatever it is told, such as a language model's logits, and the kernel zeroes
    pages of 4 KiB one by one. torch reads the variable when it allocates its first tensor on the CPU: later than that
    this changes nothing.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def keep_freed_memory() -> None:
    """Let glibc keep what a training step frees, which the next one needs again.

    By default it gives most of it back, and the kernel zeroes every page anew: about a tenth of a ResNet-18 step. Other
    allocators are left alone.
    """
    _set_malloc(_LARGEST_FROM_THE_HEAP, _KEPT)


def _set_malloc(largest_from_the_heap: int, kept: int) -> None:
    """Tell glibc, if it is there, which sizes it takes from the kernel directly, and how much free memory it keeps."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, largest_from_the_heap)
        mallopt(_M_TRIM_THRESHOLD, kept)
