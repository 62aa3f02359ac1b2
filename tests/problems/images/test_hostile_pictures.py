"""Pictures that are damaged, or made to harm: read, or refused by name, and before they take memory."""

import io
import os
import struct
import zlib

import pytest
from PIL import Image

from fsl_sage.errors import InputError
from fsl_sage.inference.pictures import picture_files, read_picture
from fsl_sage.problems.images.folder import read_folder
from fsl_sage.problems.images.images import ImageTerms

TERMS = ImageTerms((3, 8, 8), ("a", "b"), (0.5,) * 3, (0.5,) * 3)


def picture(kind="PNG", mode="RGB", size=(8, 8), **options) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size).save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def claiming(width: int, height: int, rows: int = 0) -> bytes:
    """A PNG of a few bytes that says it has so many pixels, of which it has so many black rows."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(rows * (1 + 3 * width)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def orientation(kind: int, value: bytes) -> bytes:
    """EXIF data whose orientation has a type and a value of the attacker's choice."""
    count = len(value) if kind == 2 else 1
    entry = struct.pack("<HHI", 0x0112, kind, count) + value.ljust(4, b"\0")
    return b"Exif\0\0II*\0\x08\0\0\0\x01\0" + entry + b"\0\0\0\0"


def folder(path, strange: bytes | None, name="x.png"):
    """A good folder, and one strange picture among the others."""
    for label in "ab":
        (path / label).mkdir(parents=True)
        for number in range(6):
            (path / label / f"{number}.png").write_bytes(picture())
    if strange is not None:
        (path / "a" / name).write_bytes(strange)
    return path


@pytest.mark.parametrize(
    ("kind", "value"), [(2, b"abc"), (7, b"\x06"), (3, b"\x06\0"), (3, b"\x09\0"), (3, b"\0\0")], ids=str
)
def test_an_orientation_of_any_type_and_value(tmp_path, kind, value):
    """8x8 pictures look the same either way: all of these are read."""
    strange = picture("JPEG", exif=orientation(kind, value))
    assert len(read_folder(folder(tmp_path / "f", strange, "x.jpg"), 0.3, None).train) == 9
    (tmp_path / "x.jpg").write_bytes(strange)
    assert read_picture(tmp_path / "x.jpg", TERMS).shape == (3, 8, 8)


def test_an_orientation_that_there_is_not_turns_nothing(tmp_path):
    """It was taken for a picture on its side, which then did not fit among the others: a traceback."""
    for label in "ab":
        (tmp_path / label).mkdir()
        for number in range(5):
            strange = {"exif": orientation(3, b"\x09\0")} if number == 0 else {}
            (tmp_path / label / f"{number}.jpg").write_bytes(picture("JPEG", size=(16, 8), **strange))
    assert read_folder(tmp_path, 0.3, None).sizes.image == (3, 8, 16)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (claiming(2**31 - 1, 2**31 - 1), "exceeds limit"),
        (claiming(9000, 9000), "9000x9000 pixels: make it smaller"),
        (claiming(16, 16), "truncated"),
        (picture(mode="I;16"), "I;16"),
        (b"", "x.png"),
        (picture()[:-30], "x.png"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n", "x.png"),
    ],
    ids=["billions", "too many", "no data", "16 bits", "empty", "cut off", "a program in PostScript"],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, content, said):
    with pytest.raises(InputError, match=said):
        read_folder(folder(tmp_path / "f", content), 0.3, 8)
    (tmp_path / "x.png").write_bytes(content)
    with pytest.raises(InputError, match=said):
        read_picture(tmp_path / "x.png", TERMS)


def test_small_files_that_would_be_gigabytes_together(tmp_path, monkeypatch):
    monkeypatch.setattr("fsl_sage.problems.images.npz._ALWAYS_ALLOWED", 2**20)
    for label in "ab":
        (tmp_path / label).mkdir()
        for number in range(3):
            (tmp_path / label / f"{number}.png").write_bytes(claiming(500, 500, rows=500))
    with pytest.raises(InputError, match="would take 4,500,000 of memory, more than 1,048,576: give"):
        read_folder(tmp_path, 0.3, None)
    assert read_folder(tmp_path, 0.3, 8).sizes.image == (3, 8, 8)


def test_pipes_loops_and_folders_called_like_pictures(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    os.symlink(tmp_path, tmp_path / "again")
    os.symlink(tmp_path / "loop.png", tmp_path / "loop.png")
    (tmp_path / "folder.png").mkdir()
    found = picture_files([tmp_path])
    assert {file.name for file in found} == {"pipe.png", "loop.png"}
    for file in found:
        with pytest.raises(InputError, match=file.name):
            read_picture(file, TERMS)
