"""From a configuration to its problem, with its data and without."""

from dataclasses import replace

import pytest
import torch

from fsl_sage.config import Config, DataConfig, from_dict
from fsl_sage.errors import InputError
from fsl_sage.problems import ACCURACY, make_dry_problem, make_problem
from fsl_sage.problems.images.sources import load_images
from fsl_sage.problems.parts import META, build_model

SMALL = from_dict({"clients": 3, "data": {"train_images": 90, "test_images": 40}, "model": {"name": "small-cnn"}})


def test_images_and_their_shapes_agree():
    real, dry = make_problem(SMALL), make_dry_problem(SMALL)
    assert real.examples == dry.examples == 90
    assert real.score == dry.score == ACCURACY
    assert len(real.classes) == len(dry.classes) == 10
    assert torch.equal(real.labels(), load_images("cifar10-mini", train_images=90, test_images=40).train.y)
    assert [len(share) for share in dry.divide(SMALL)] == [len(share) for share in real.divide(SMALL)] == [30] * 3
    assert all(share.is_meta for share in dry.divide(SMALL))
    assert real.example(2, "cpu").shape == dry.example(2, META).shape == (2, 3, 32, 32)
    model, shapes = build_model(SMALL, real, torch.device("cpu")), build_model(SMALL, dry, META)
    assert [x.shape for x in model.state_dict().values()] == [x.shape for x in shapes.state_dict().values()]
    assert real.usual_cut(SMALL, model) == "block1"


def test_shapes_of_a_batch_are_those_of_the_images():
    real = make_problem(SMALL).make_task(SMALL, torch.device("cpu"))
    dry = make_dry_problem(SMALL).make_task(SMALL, META)
    drawn = [task.training_batch(torch.arange(7), torch.Generator()) for task in (real, dry)]
    assert drawn[0].inputs.shape == drawn[1].inputs.shape
    assert drawn[1].inputs.is_meta
    assert drawn[0].target["labels"].shape == drawn[1].target["labels"].shape


def test_equal_sizes_are_one_problem_on_the_meta_device():
    """So that what is made for its shapes is made once for a whole grid."""
    assert make_dry_problem(SMALL) is make_dry_problem(replace(SMALL, seed=7, algorithm="fedavg"))


def test_texts_that_are_not_here_have_sizes():
    config = from_dict({"data": {"name": "e2e", "dir": "/nowhere"}, "model": {"name": "hf:gpt2"}})
    problem = make_dry_problem(config)
    assert (problem.examples, problem.classes) == (42_061, ())
    assert problem.make_task(config, META).sizes_are_bounds
    assert problem.largest_example(2, META)["input_ids"].shape == (2, 511)
    with pytest.raises(InputError, match="depends on the texts"):
        problem.divide(replace(config, data=replace(config.data, partition="restaurant")))


@pytest.mark.parametrize("make", [make_problem, make_dry_problem])
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (replace(SMALL, target_accuracy=75.0), "--target-accuracy 75 is not possible: give a fraction"),
        (
            Config(data=DataConfig(partition="restaurant")),
            "restaurant is not for cifar10-mini: give iid",
        ),
        (Config(data=DataConfig("nowhere:Housing")), "--data.name nowhere:Housing cannot be imported: No module"),
        (Config(data=DataConfig("math:pi")), "--data.name math:pi is a part of Python: name a module of your own"),
        (Config(data=DataConfig("torch:pi")), "--data.name torch:pi is not a Problem"),
        (Config(data=DataConfig("torch:get_num_threads")), "gave an? int; it must give a fsl_sage.Problem"),
        (Config(data=DataConfig("mine.Housing")), "'mine.Housing' is not a known data set"),
        (Config(data=DataConfig(partition="given")), "given is not for cifar10-mini: give iid"),
        (Config(data=DataConfig("cifar11")), "'cifar11' is not a known data set: did you mean cifar10"),
    ],
)
def test_what_the_kind_of_data_cannot_have_is_refused(make, config, reason):
    with pytest.raises(InputError, match=reason):
        make(config)
