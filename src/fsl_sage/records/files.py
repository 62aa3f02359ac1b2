"""Writing files so that a reader never sees half of one, whatever happens to the writer; reading them checked."""

import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from fsl_sage.errors import InputError
from fsl_sage.reading import short
from fsl_sage.wire.message import Tensors

_SEAL = "sha256"
_UNSEALED = "0" * 64
"""Stands in a header where the SHA-256 will be, while that is computed: it covers all of the file but itself."""
_LONGEST_HEADER = 100_000_000
"""As safetensors itself has it."""

_DAMAGE = (safetensors.SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What a file that is not as it should be may lead to."""


def write_bytes(path: Path, content: bytes) -> None:
    """Write next to the place, flush to disk, then move into place."""
    _write(path, [content])


def _write(path: Path, pieces: Sequence[bytes | memoryview]) -> None:
    temporary = path.with_name(path.name + ".part")
    try:
        with open(temporary, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        temporary.unlink(missing_ok=True)  # on a full disk, half a file only takes the room that is missing
        error.filename = error.filename or str(path)
        raise
    os.replace(temporary, path)
    sync_directory(path.parent)


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
    first: dict[tuple[int, Any, Any], str] = {}
    same: dict[str, str] = {}
    distinct: Tensors = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and key in first:
            same[name] = first[key]
        else:
            first[key] = name
            distinct[name] = tensor.detach().cpu().contiguous()
            if distinct[name].untyped_storage().nbytes() != distinct[name].numel() * distinct[name].element_size():
                distinct[name] = distinct[name].clone()  # a view of something larger
    metadata = {_SEAL: _UNSEALED, "values": json.dumps(values), "same": json.dumps(same)}
    header, body = _parts(safetensors.torch.save(distinct, metadata))
    header = _in_order(header, metadata)
    _write(path, [header.replace(_UNSEALED.encode(), _sha256(header, body).encode(), 1), body])


def _parts(block: bytes) -> tuple[bytes, memoryview]:
    """The header of a safetensors file, its length in front, and the body."""
    end = 8 + int.from_bytes(block[:8], "little")
    return block[:end], memoryview(block)[end:]


def _in_order(header: bytes, metadata: Mapping[str, str]) -> bytes:
    """The same header with the metadata in the order given: safetensors' own changes from process to process."""
    text = json.dumps({**json.loads(header[8:]), "__metadata__": metadata}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors must begin at multiples of 8
    return len(text).to_bytes(8, "little") + text


def _sha256(*pieces: bytes | memoryview) -> str:
    whole = hashlib.sha256()
    for piece in pieces:
        whole.update(piece)
    return whole.hexdigest()


def load_tensors(path: Path, *, sealed: bool = False) -> tuple[Tensors, Any]:
    """The tensors and values that `save_tensors` wrote.

    A file whose SHA-256 is not that of its content is refused. Files of earlier versions have none: with `sealed`
    they are refused too.
    """
    try:
        _check_seal(path, sealed)
        with safetensors.safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name, original in json.loads(metadata.get("same", "{}")).items():
            tensors[name] = tensors[original]
        return tensors, json.loads(metadata.get("values", "null"))
    except InputError:
        raise
    except _DAMAGE as e:
        raise InputError(f"{path} cannot be read, it is damaged or not a safetensors file: {short(e)}.") from None


def _check_seal(path: Path, needed: bool) -> None:
    with open(path, "rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > _LONGEST_HEADER:
            raise ValueError("it has no header")
        header = start + file.read(length)
        written = dict(json.loads(header[8:]).get("__metadata__", {})).get(_SEAL)
        if written is None:
            if needed:
                raise InputError(
                    f"{path} has no checksum: it is damaged, or an earlier version wrote it. "
                    "Go on with that version, put an undamaged copy back, or start a new run."
                )
            return
        whole = hashlib.sha256(header.replace(str(written).encode(), _UNSEALED.encode(), 1))
        while piece := file.read(1 << 20):
            whole.update(piece)
    if whole.hexdigest() != written:
        raise InputError(
            f"{path} is damaged: its content does not have the SHA-256 that was written with it. "
            "Put an undamaged copy back, or start a new run."
        )


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
