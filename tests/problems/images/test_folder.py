"""Folders of pictures: what is read, how it is divided, and what is refused."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from fsl_sage import default_config, run
from fsl_sage.config import from_dict, from_file
from fsl_sage.errors import InputError, RunWarning
from fsl_sage.problems import make_dry_problem, make_problem
from fsl_sage.problems.images.sources import load_images
from fsl_sage.records.run_directory import RunDirectory

CLASSES = ("blue", "green", "red")


def picture(path, label, size=(20, 16), noise=0, **options):
    """A picture of one colour, with some noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(noise).integers(0, 60, (size[1], size[0], 3), dtype=np.uint8)
    pixels[..., 2 - label] += 150
    Image.fromarray(pixels).save(path, **options)
    return path


def fill(folder, each, sizes=((20, 16), (33, 41), (16, 16))):
    """So many pictures of each class, of different sizes, JPEG and PNG."""
    for label, name in enumerate(CLASSES):
        for number in range(each):
            kind = ("jpg", "png", "JPEG")[number % 3]
            picture(folder / name / f"{number}.{kind}", label, sizes[number % len(sizes)], noise=number)
    return folder


def test_train_and_test_are_read_and_brought_to_one_size(tmp_path):
    fill(tmp_path / "train", 4)
    fill(tmp_path / "test", 2)
    data = load_images(f"folder:{tmp_path}", image_size=12)
    assert data.classes == CLASSES
    assert (data.train.x.shape, data.test.x.shape) == ((12, 3, 12, 12), (6, 3, 12, 12))
    assert data.train.y.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    colours = data.train.x.float().mean((2, 3)).argmax(1)  # red is the first channel and the last class
    assert torch.equal(2 - colours, data.train.y)


def test_pictures_of_one_size_stay_as_they_are(tmp_path):
    for label, name in enumerate(CLASSES[:2]):
        for number in range(4):
            picture(tmp_path / name / f"{number}.png", label, noise=number)
    data = load_images(f"folder:{tmp_path}", test_fraction=0.25)
    assert (len(data.train), len(data.test)) == (6, 2)
    assert data.test.y.tolist() == [0, 1]
    original = [np.asarray(Image.open(file)).transpose(2, 0, 1) for file in sorted(tmp_path.glob("*/*.png"))]
    both = torch.cat([data.train.x, data.test.x]).numpy()
    assert sorted(image.tobytes() for image in both) == sorted(image.tobytes() for image in original)


def test_scaling_keeps_the_middle_and_the_proportions(tmp_path):
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 10:20] = 200  # the middle third
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.fromarray(wide).save(tmp_path / name / f"{number}.png")
    data = load_images(f"folder:{tmp_path}", image_size=10, test_fraction=0.4)
    assert (data.train.x == 200).all()


def test_grey_pictures_have_one_channel_and_cameras_are_turned(tmp_path):
    grey = np.arange(6, dtype=np.uint8).reshape(2, 3) * 40
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise
    for name in "ab":
        (tmp_path / name).mkdir()
        Image.fromarray(grey).save(tmp_path / name / "0.png", exif=exif)
        Image.fromarray(np.ascontiguousarray(np.rot90(grey, -1))).save(tmp_path / name / "1.png")
        Image.fromarray(np.ascontiguousarray(np.rot90(grey, -1))).save(tmp_path / name / "2.png")
    data = load_images(f"folder:{tmp_path}", test_fraction=0.34)
    assert data.train.x.shape[1:] == (1, 3, 2)
    assert all(np.array_equal(image[0], np.rot90(grey, -1)) for image in torch.cat([data.train.x, data.test.x]).numpy())


def test_clients_folders_are_the_partition_as_it_is(tmp_path):
    fill(tmp_path / "clients" / "0", 5)
    for number in range(4):
        picture(tmp_path / "clients" / "1" / "red" / f"{number}.png", 2, noise=number)
    fill(tmp_path / "test", 2)
    config = from_dict({"data": {"name": f"folder:{tmp_path}", "image_size": 8}, "model": {"name": "small-cnn"}})
    assert (config.clients, config.data.partition) == (2, "given")
    problem = make_problem(config)
    first, second = problem.divide(config)
    assert problem.labels()[first].tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert problem.labels()[second].tolist() == [2] * 4
    assert [len(share) for share in make_dry_problem(config).divide(config)] == [15, 4]
    some = from_dict({"data": {"train_images": 18}}, config)  # of the 9 red ones 8: client 1 keeps 3 of 4 at least
    shares = make_problem(some).divide(some)
    assert sorted(torch.cat(shares).tolist()) == list(range(18))
    assert (make_problem(some).labels()[shares[1]] == 2).all()
    iid = from_dict({"clients": 3, "data": {"partition": "iid"}}, config)
    assert sorted(len(share) for share in make_problem(iid).divide(iid)) == [6, 6, 7]
    with pytest.raises(InputError, match="has folders of 2 clients: give --clients 2"):
        make_problem(config).divide(from_dict({"clients": 3}, config))


def test_a_part_for_testing_is_taken_from_the_clients_folders(tmp_path):
    fill(tmp_path / "clients" / "0", 5)
    fill(tmp_path / "clients" / "1", 5)
    config = from_dict({"data": {"name": f"folder:{tmp_path}", "image_size": 8, "test_fraction": 0.2}})
    problem = make_problem(config)
    assert (problem.examples, len(problem.data.test)) == (24, 6)
    assert sorted(torch.cat(problem.divide(config)).tolist()) == list(range(24))


def test_a_subset_is_the_same_wherever_the_folder_lies(tmp_path):
    fill(tmp_path / "here" / "train", 6)
    fill(tmp_path / "here" / "test", 4)
    shutil.copytree(tmp_path / "here", tmp_path / "far" / "away")
    sets = [
        load_images(f"folder:{tmp_path / place}", image_size=8, train_images=6, test_images=6, seed=seed)
        for place, seed in (("here", 0), ("far/away", 0), ("here", 1))
    ]
    assert torch.equal(sets[0].train.x, sets[1].train.x)
    assert torch.equal(sets[0].test.x, sets[1].test.x)
    assert not torch.equal(sets[0].train.x, sets[2].train.x)


def spoil(tmp_path, what):
    """A good folder, and one thing wrong with it."""
    fill(tmp_path / "train", 3)
    fill(tmp_path / "test", 1)
    bad = tmp_path / "train" / "red" / "0.jpg"
    if what == "empty":
        (tmp_path / "train" / "yellow").mkdir()
    elif what == "deeper":
        picture(tmp_path / "train" / "yellow" / "batch1" / "0.png", 0)
    elif what == "half deeper":
        picture(tmp_path / "train" / "red" / "batch1" / "0.png", 0)
    elif what == "cut":
        bad.write_bytes(bad.read_bytes()[:200])
    elif what == "text":
        bad.write_text("not a picture")
    elif what == "strange":
        (tmp_path / "train" / "red" / "notes.txt").write_text("x")
    elif what == "gif":
        Image.new("RGB", (8, 8)).save(bad, "GIF")
    elif what == "16 bits":
        Image.fromarray(np.zeros((8, 8), np.uint16)).save(tmp_path / "train" / "red" / "0.png")
    elif what == "new class":
        picture(tmp_path / "test" / "yellow" / "0.png", 0)
    elif what == "one class":
        for name in ("blue", "green"):
            for file in (tmp_path / "train" / name).iterdir():
                file.unlink()
            (tmp_path / "train" / name).rmdir()
    elif what == "numbers":
        fill(tmp_path / "clients" / "1", 1)
    return f"folder:{tmp_path}"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("empty", "train/yellow is empty: put pictures of the class there"),
        ("deeper", "train/yellow has the folder batch1, and folders in a class folder are not read"),
        ("half deeper", "train/red has the folder batch1, and folders in a class folder are not read"),
        ("cut", "train/red/0.jpg is not a readable JPEG or PNG"),
        ("text", "train/red/0.jpg is not a readable JPEG or PNG"),
        ("gif", "train/red/0.jpg is not a readable JPEG or PNG"),
        ("strange", "train/red/notes.txt is not a picture"),
        ("16 bits", "train/red/0.png has pixels of the kind I;16"),
        ("new class", "has the class yellow in .*test/yellow, and no training picture has it"),
        ("one class", "has 1 class folders"),
        ("numbers", "clients has the folders 1: number the clients' folders 0, 1, 2"),
    ],
)
def test_wrong_input_is_refused_with_the_file(tmp_path, what, said):
    with pytest.raises(InputError, match=said) as caught:
        load_images(spoil(tmp_path, what), image_size=8)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("train", ["train", "clients/0"])
def test_folders_that_are_passed_over_are_told(tmp_path, train):
    fill(tmp_path / train, 4)
    fill(tmp_path / "val", 1)
    with pytest.warns(RunWarning, match=f"{train.partition('/')[0]} and test are read, and not val: name the test"):
        load_images(f"folder:{tmp_path}", image_size=8)


def test_other_mistakes_are_refused(tmp_path):
    fill(tmp_path / "some" / "train", 3)
    with pytest.raises(InputError, match=r"0\.jpg has 20x16 pixels and .*1\.png 33x41: give --data\.image-size"):
        load_images(f"folder:{tmp_path / 'some'}")
    with pytest.raises(InputError, match="is not a folder"):
        load_images(f"folder:{tmp_path / 'none'}")
    with pytest.raises(InputError, match=r"--data\.image-size is not for cifar10-mini"):
        load_images("cifar10-mini", image_size=8)
    config = from_dict({"data": {"name": f"folder:{tmp_path / 'some'}", "image_size": 8, "partition": "given"}})
    with pytest.raises(InputError, match="has no folders clients/0"):
        make_problem(config).divide(config)


@pytest.mark.parametrize("algorithm", ["fsl-sage", "cse-fsl", "fedavg"])
def test_a_folder_of_jpegs_is_trained_on(tmp_path, algorithm):
    fill(tmp_path / "train", 12)
    fill(tmp_path / "test", 4)
    name = f"folder:{tmp_path}"
    values = {
        "algorithm": algorithm,
        "clients": 2,
        "rounds": 4,
        "batch_size": 6,
        "upload_every": 1,
        "align_every": 2,
        "alignment": {"samples": 12, "steps": 3, "batch_size": 6},
        "data": {"name": name, "image_size": 16, "partition": "dirichlet", "alpha": 0.5, "class_weights": "balanced"},
        "model": {"name": "small-cnn"},
        "device": "cpu",
        "out": str(tmp_path / "run"),
    }
    result = run(from_file(from_dict(values, default_config(name)), "tests", of_several=True))
    last = result.metrics[-1]
    assert last["test_accuracy"] > 1 / 3
    assert len(last["test_class_accuracy"]) == 3
    lines = RunDirectory(result.directory).by_class_file.read_text().splitlines()
    assert lines[0] == "label,class,test_accuracy,test_f1"
    assert [line.split(",")[1] for line in lines[1:]] == list(CLASSES)
    assert [float(line.split(",")[2]) for line in lines[1:]] == last["test_class_accuracy"]
    assert sum(last["test_class_accuracy"]) / 3 == pytest.approx(last["test_accuracy"])  # as many tests of each class
