import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from fsl_sage.errors import InputError
from fsl_sage.problems.images.augment import normalise
from fsl_sage.problems.images.npz import channel_moments
from fsl_sage.problems.images.sources import load_images

RNG = np.random.default_rng(0)
X = RNG.integers(0, 256, (60, 8, 6, 3), dtype=np.uint8)
Y = np.arange(60) % 3


def save(path: Path, **arrays: np.ndarray) -> str:
    np.savez(path, **arrays)
    return f"npz:{path}"


@pytest.fixture
def archive(tmp_path) -> Path:
    return tmp_path / "own.npz"


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64, np.uint64])
def test_own_test_set(archive, dtype):
    data = load_images(save(archive, x=X, y=Y.astype(dtype), x_test=X[:9], y_test=Y[:9].astype(dtype)))
    assert np.array_equal(data.train.x.numpy(), X.transpose(0, 3, 1, 2))
    assert np.array_equal(data.train.y.numpy(), Y)
    assert np.array_equal(data.test.y.numpy(), Y[:9])
    assert data.classes == ("0", "1", "2")
    assert data.sizes.image == (3, 8, 6)


def test_layouts(archive, tmp_path):
    first = load_images(save(archive, x=np.ascontiguousarray(X.transpose(0, 3, 1, 2)), y=Y))
    last = load_images(save(tmp_path / "last.npz", x=X, y=Y))
    grey = load_images(save(tmp_path / "grey.npz", x=X[..., 0], y=Y))
    assert torch.equal(first.train.x, last.train.x)
    assert torch.equal(grey.train.x, last.train.x[:, :1])


def test_the_split_is_stratified_whole_and_the_same_for_every_seed(archive):
    name = save(archive, x=X, y=Y)
    data, other = load_images(name, test_fraction=0.25), load_images(name, test_fraction=0.25, seed=7)
    assert np.bincount(data.test.y).tolist() == [5, 5, 5]
    assert np.bincount(data.train.y).tolist() == [15, 15, 15]
    together = torch.cat([data.train.x, data.test.x]).flatten(1).numpy()
    assert {x.tobytes() for x in together} == {x.tobytes() for x in X.transpose(0, 3, 1, 2)}
    assert torch.equal(data.test.x, other.test.x)


def test_moments_are_those_of_the_training_images(archive):
    data = load_images(save(archive, x=X, y=Y))
    scaled = data.train.x.double() / 255
    assert data.mean == pytest.approx(scaled.mean((0, 2, 3)).tolist(), abs=1e-12)
    assert data.std == pytest.approx(scaled.std((0, 2, 3), correction=0).tolist(), abs=1e-12)


@pytest.mark.parametrize("value", [7, 251])  # the mean of many 251s is off in its last bit
def test_a_constant_channel_keeps_a_usable_deviation(archive, value):
    many = np.full((100, *X.shape[1:]), value, dtype=X.dtype)
    data = load_images(save(archive, x=many, y=np.arange(100) % 2))
    assert channel_moments(data.train) == ((pytest.approx(value / 255),) * 3, (1.0,) * 3)


@pytest.mark.parametrize("key", ["classes", "fine_names"])
def test_class_names_may_be_given_and_may_be_more_than_the_labels(archive, key):
    data = load_images(save(archive, x=X, y=Y * 2, **{key: np.array(["a", "b", "c", "d", "e"])}))
    assert data.classes == ("a", "b", "c", "d", "e")


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": X}, "no 'y'"),
        ({"images": X, "labels": Y}, "images, labels"),
        ({"x": X, "y": Y, "x_test": X}, "no 'y_test'"),
        ({"x": X.astype(np.int32), "y": Y}, "must be uint8"),
        ({"x": X.astype(complex), "y": Y}, "must be uint8"),
        ({"x": np.where(X == 7, np.nan, X), "y": Y}, "'x' .* has numbers that are infinite or NaN"),
        ({"x": X, "y": Y, "x_test": X / 255, "y_test": Y}, "has the type uint8 and 'x_test' float64"),
        ({"x": X[Y < 2], "y": Y[Y < 2], "x_test": X, "y_test": Y}, "has the label 2, and no training example"),
        ({"x": X.reshape(60, -1), "y": Y}, "must be uint8"),
        ({"x": X[:, :0], "y": Y}, "must be uint8"),
        ({"x": X[:, :3], "y": Y}, "channels"),
        ({"x": np.zeros((60, 8, 8, 8), np.uint8), "y": Y}, "channels"),
        ({"x": X, "y": Y[:50]}, "60 images in 'x' and 50 labels"),
        ({"x": X[:0], "y": Y[:0]}, "0 images"),
        ({"x": X, "y": Y / 2}, "integers"),
        ({"x": X, "y": Y[:, None]}, "integers"),
        ({"x": X, "y": Y - 1}, "from 0"),
        ({"x": X, "y": Y.astype(np.uint64) + 2**60}, "from 0"),
        ({"x": X, "y": Y + 1}, "0 does not occur"),
        ({"x": X, "y": np.where(Y == 2, 1_000_000, Y)}, "2 does not occur"),
        ({"x": X, "y": Y, "classes": np.array(["a", "b"])}, "names 2 classes"),
        ({"x": X, "y": Y, "classes": np.arange(3)}, "list of names"),
        ({"x": X, "y": Y, "classes": np.array([b"a", b"b", b"\xe9"])}, "not UTF-8"),
        ({"x": X, "y": Y, "classes": np.array(["a", "b", None], dtype=object)}, "never unpickled"),
        ({"x": X, "y": Y, "x_test": X[:, :5], "y_test": Y}, "test images"),
    ],
)
def test_unusable_arrays_are_refused_with_the_file_and_the_reason(archive, arrays, said):
    with pytest.raises(InputError, match=said) as caught:
        load_images(save(archive, **arrays))
    assert str(archive) in str(caught.value)


@pytest.mark.parametrize("dtype", [np.uint16, np.int16, np.float16, np.float32, np.float64])
def test_images_of_other_types_are_taken_as_they_are(archive, dtype):
    x = X.astype(dtype) * 3
    data = load_images(save(archive, x=x, y=Y, x_test=x[:9], y_test=Y[:9]))
    assert data.train.x.dtype == torch.float32
    assert np.array_equal(data.train.x.numpy(), x.astype(np.float32).transpose(0, 3, 1, 2))
    batch = normalise(data.train.x, data.mean, data.std).double()
    assert torch.allclose(batch.mean((0, 2, 3)), torch.zeros(3, dtype=torch.float64), atol=1e-5)
    assert torch.allclose(batch.std((0, 2, 3), correction=0), torch.ones(3, dtype=torch.float64), atol=1e-5)
    assert float(data.train.x.max()) == float(x.max())  # the images themselves stay


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5, 0.001, 0.999, float("nan")])
def test_impossible_test_fractions_are_refused(archive, fraction):
    with pytest.raises(InputError, match="fraction"):
        load_images(save(archive, x=X, y=Y), test_fraction=fraction)


def broken_files(whole: bytes) -> dict[str, bytes]:
    middle = len(whole) // 2
    return {
        "empty": b"",
        "truncated": whole[:middle],
        "one bit flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "text": b"not an archive\n" * 50,
        "a pickle": b"\x80\x04]\x94.",
    }


@pytest.mark.parametrize("kind", ["empty", "truncated", "one bit flipped", "text", "a pickle"])
def test_damaged_files_are_refused(archive, kind):
    save(archive, x=X, y=Y)
    archive.write_bytes(broken_files(archive.read_bytes())[kind])
    with pytest.raises(InputError, match=r"own\.npz is not a readable"):
        load_images(f"npz:{archive}")


def peak_of(action) -> int:
    """The bytes that Python and NumPy had taken at most."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("names", [{}, {"classes": np.array(["a", "b", "c"])}])
@pytest.mark.parametrize("label", [2**31 - 1, 10**8])
def test_a_huge_label_takes_no_memory(archive, label, names):
    """Counting labels takes as many counters as the largest says: 16 GiB."""
    labels = Y.copy()
    labels[7] = label
    name = save(archive, x=X, y=labels, **names)

    def refuse():
        with pytest.raises(InputError, match=rf"labels .*go up to {label}"):
            load_images(name)

    assert peak_of(refuse) < 2**24


def write_member(archive: Path, header: bytes, data: bytes) -> str:
    """An archive whose x has a header of its own."""
    np.savez(archive, y=Y)
    with zipfile.ZipFile(archive, "a", zipfile.ZIP_DEFLATED) as file:
        text = header + b" " * (-(len(header) + 11) % 64) + b"\n"
        file.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data)
    return f"npz:{archive}"


def test_an_archive_that_would_unpack_to_gigabytes_is_not_unpacked(archive):
    pixels = np.zeros((300_000, 32, 32, 1), np.uint8)
    np.savez_compressed(archive, x=pixels, y=np.zeros(300_000, np.int64))
    assert archive.stat().st_size < 2**21

    def refuse():
        with pytest.raises(InputError, match=r"would unpack to 30\d,\d+,\d+, .* np\.savez, uncompressed"):
            load_images(f"npz:{archive}")

    assert peak_of(refuse) < 2**24


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '|u1', 'fortran_order': False, 'shape': (4000000000, 32, 32, 3)}",
        b"{'descr': '|u1', 'fortran_order': False, 'shape': (2, 2)}",
        b"{'descr': '|V0', 'fortran_order': False, 'shape': (4000000000,)}",
        b"{'descr': '|u1', 'fortran_order': False, 'shape': (-5, -2)}",
        b"{'descr': '|u1', 'fortran_order': False, 'shape': 10}",
        b"{'descr': 'O', 'fortran_order': False, 'shape': (10,)}",
        b"{" * 5000,
        b"[" * 9000 + b"]" * 9000,
        b"9" * 9000,
    ],
)
def test_a_header_that_lies_about_its_data_takes_no_memory(archive, header):
    name = write_member(archive, header, bytes(10))

    def refuse():
        with pytest.raises(InputError, match=r"own\.npz"):
            load_images(name)

    assert peak_of(refuse) < 2**24


def test_other_files_are_refused(tmp_path):
    np.save(tmp_path / "x.npy", X)
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as file:
        file.writestr("readme.txt", "hello")
    for name in ("x.npy", "x.zip", "absent.npz", ""):
        with pytest.raises(InputError, match=str(tmp_path / name)):
            load_images(f"npz:{tmp_path / name}")
