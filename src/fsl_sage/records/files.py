"""Writing files so that a reader never sees half of one, whatever happens to the writer; reading them checked."""

import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import safetensors
import torch
from torch import Tensor

from fsl_sage.errors import InputError, TrainingError
from fsl_sage.reading import short
from fsl_sage.wire.message import Tensors

_SEAL = "sha256"
_UNSEALED = "0" * 64
"""Stands in a header where the SHA-256 will be, while that is computed: it covers all of the file but itself."""
ALIGNMENT = 64
"""Torch's own tensors begin at multiples of so many bytes. So do those in a file whose sizes are such multiples."""
PART = ".part"
"""The end of a file's name while it is written."""
_LONGEST_HEADER = 100_000_000
"""As safetensors itself has it: it reads no file whose names, shapes and values take more bytes."""

_DTYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names that safetensors has for types, in the order in which it writes tensors: the widest numbers first, so that
each tensor begins at a multiple of its numbers' size."""

_DAMAGE = (safetensors.SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What a file that is not as it should be may lead to."""


class LongHeaderError(TrainingError):
    """A file that has not been written, because nobody could read it."""


def write_bytes(path: Path, content: bytes) -> None:
    """Write next to the place, flush to disk, then move into place."""
    _write(path, [content])


def _write(path: Path, pieces: Sequence[bytes | memoryview]) -> None:
    with _moved_into_place(path) as file:
        for piece in pieces:
            file.write(piece)


@contextmanager
def _moved_into_place(path: Path) -> Iterator[IO[bytes]]:
    """A file next to the place. When it is written it is flushed to disk and moved there."""
    temporary = path.with_name(path.name + PART)
    with _partial(path, temporary), open(temporary, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


@contextmanager
def _partial(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """While a file is written: an error names it, and on a full disk half of it takes no room."""
    try:
        yield
    except OSError as error:
        (temporary or path).unlink(missing_ok=True)
        error.filename = error.filename or str(path)
        raise


def sync_file(path: Path) -> None:
    """Flush a file's content to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Flush the names in a directory to disk, so that a file that was moved there is there after a power cut."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def as_file_name(text: str) -> str:
    """A text as a part of a file's name: `mine:Anchored` is `mine-Anchored`."""
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", text).strip("-")


def write_json(path: Path, value: Any) -> None:
    """Indented, for people."""
    write_bytes(path, (json.dumps(value, indent=2, default=str) + "\n").encode())


def save_tensors(path: Path, tensors: Mapping[str, Tensor], values: Any = None) -> None:
    """One safetensors file with named tensors, plain values and its SHA-256; the same content gives the same bytes.

    A tensor under several names is written once.
    """
    header, blocks = _pieces(tensors, values)
    with _moved_into_place(path) as file:
        _write_sealed(file, header, blocks)


def save_draft(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A file as `save_tensors` writes it, but without its SHA-256 and not flushed to disk: `seal_draft` does both.

    Args:
        path: Where it is written, in place.
        tensors: What is written. One after the other is made contiguous, so no second copy of all is in memory.
    """
    header, blocks = _pieces(tensors, None)
    with _partial(path), open(path, "wb") as file:
        file.write(header)
        for block in blocks:
            file.write(block)


def seal_draft(draft: Path, place: Callable[[str], Path]) -> Path:
    """Write the SHA-256 of a draft into it, give it the name that says what is in it, and flush it to disk.

    Args:
        draft: What `save_draft` wrote. Who has it mapped into memory keeps it.
        place: From the SHA-256 of the content to the file's path.
    """
    with open(draft, "r+b") as file:
        header, whole = _hashed(file)
        file.seek(header.index(_UNSEALED.encode()))
        file.write(whole.encode())
    path = place(whole)
    os.replace(draft, path)
    sync_file(path)
    return path


def _write_sealed(file: IO[bytes], header: bytes, blocks: Iterable[memoryview]) -> None:
    """Write header and tensors, then the SHA-256 into the header."""
    whole = hashlib.sha256(header)
    file.write(header)
    for block in blocks:
        whole.update(block)
        file.write(block)
    file.seek(header.index(_UNSEALED.encode()))
    file.write(whole.hexdigest().encode())


def _pieces(tensors: Mapping[str, Tensor], values: Any) -> tuple[bytes, Iterator[memoryview]]:
    """The header of a file, still without its SHA-256, and the numbers of its tensors, made one after the other."""
    first: dict[tuple[int, Any, Any], str] = {}
    same: dict[str, str] = {}
    distinct: Tensors = {}
    for name, tensor in tensors.items():
        place = tensor.data_ptr() or id(tensor)  # some kinds of tensors have no address
        key = (place, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and key in first:
            same[name] = first[key]
        else:
            first[key] = name
            distinct[name] = tensor.detach()
    ranks = {dtype: rank for rank, dtype in enumerate(_DTYPES)}
    order = sorted(
        distinct, key=lambda name: (distinct[name].nbytes % ALIGNMENT > 0, ranks[distinct[name].dtype], name)
    )
    header = _header({name: distinct[name] for name in order}, {"values": json.dumps(values), "same": json.dumps(same)})
    return header, (_numbers_of(distinct[name]) for name in order)


def _header(tensors: Tensors, metadata: Mapping[str, str]) -> bytes:
    """The header of a safetensors file, its length in front; the metadata first, as it must be found."""
    entries: dict[str, Any] = {"__metadata__": {_SEAL: _UNSEALED, **metadata}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    if len(text) > _LONGEST_HEADER:
        raise LongHeaderError(
            f"The names and shapes of {len(tensors):,} tensors take {len(text):,} bytes in a file, and safetensors "
            f"reads {_LONGEST_HEADER:,} at most."
        )
    return len(text).to_bytes(8, "little") + text


def _numbers_of(tensor: Tensor) -> memoryview:
    """A tensor's numbers, in the order of its dimensions; [n] bytes. Not copied if they lie so already."""
    numbers: Any = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


def load_tensors(path: Path, *, sealed: bool = False, checked: bool = False) -> tuple[Tensors, Any]:
    """The tensors and values that `save_tensors` wrote, mapped into memory: a change is not one of the file.

    A file whose SHA-256 is not that of its content is refused. Files of earlier versions have none: with `sealed`
    they are refused too. With `checked` this process has written or checked the file already.
    """
    with _undamaged(path):
        if not checked:
            _check_seal(path, sealed)
        with safetensors.safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: _aligned(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        for name, original in json.loads(metadata.get("same", "{}")).items():
            tensors[name] = tensors[original]
        return tensors, json.loads(metadata.get("values", "null"))


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor where torch would have put it: the last bits of a product may depend on how its factors are aligned.

    What `save_tensors` writes is aligned but for small tensors of odd sizes.
    """
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def check_seal(path: Path) -> str:
    """The SHA-256 that a file carries; refused if it has none, or if that is not the one of its content."""
    with _undamaged(path):
        return _check_seal(path, True)


@contextmanager
def _undamaged(path: Path) -> Iterator[None]:
    """Turn what damage to a file of tensors leads to into a sentence that names the file."""
    try:
        yield
    except InputError:
        raise
    except _DAMAGE as e:
        raise InputError(f"{path} cannot be read, it is damaged or not a safetensors file: {short(e)}.") from None


def _check_seal(path: Path, needed: bool) -> str:
    with open(path, "rb") as file:
        written = _metadata(_header_of(file)).get(_SEAL)
        if written is None:
            if needed:
                raise InputError(
                    f"{path} has no checksum: it is damaged, or an earlier version wrote it. "
                    "Go on with that version, put an undamaged copy back, or start a new run."
                )
            return ""
        file.seek(0)
        _, whole = _hashed(file)
    if whole != written:
        raise InputError(
            f"{path} is damaged: its content does not have the SHA-256 that was written with it. "
            "Put an undamaged copy back, or start a new run."
        )
    return str(written)


def _hashed(file: IO[bytes]) -> tuple[bytes, str]:
    """The header of a file without the SHA-256 that stands in it, and the SHA-256 of all of the file but that."""
    header = _header_of(file)
    header = header.replace(str(_metadata(header)[_SEAL]).encode(), _UNSEALED.encode(), 1)
    whole = hashlib.sha256(header)
    while piece := file.read(1 << 20):
        whole.update(piece)
    return header, whole.hexdigest()


def _header_of(file: IO[bytes]) -> bytes:
    """The header of a file, its length in front."""
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > _LONGEST_HEADER:
        raise ValueError("it has no header")
    return start + file.read(length)


def _metadata(header: bytes) -> dict[str, Any]:
    return dict(json.loads(header[8:]).get("__metadata__", {}))


def as_csv(rows: Iterable[Iterable[Any]]) -> str:
    """Rows as the text of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Turn any error in reading a file into a sentence that names the file."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}.") from None
    except (ValueError, TypeError, RecursionError, OverflowError, csv.Error):
        raise InputError(f"{file} is damaged: put it back as it was, or start a new run.") from None
