"""Problems of tensors: a table, several labels at once, a segmentation."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fsl_sage import Config, InputError, Score, TensorProblem, run
from fsl_sage.config import from_dict
from fsl_sage.problems import make_problem
from fsl_sage.problems.parts import META

CPU = torch.device("cpu")
X = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))


def error(output, y):
    return (output - y).abs().mean(1)


def regression(**changes):
    y = X.sum(1, keepdim=True)
    values = {"train": (X[:20], y[:20]), "test": (X[20:], y[20:]), "loss": F.mse_loss, "metric": error, "cut": "0"}
    score = Score("test_error", higher_is_better=False)
    return TensorProblem(**{**values, "score": score, "model": deep(5, 1), **changes})


def deep(inputs, outputs):
    return lambda: nn.Sequential(*(nn.Linear(n, 8) for n in (inputs, 8, 8)), nn.Linear(8, outputs))


def images():
    return nn.Sequential(*(nn.Conv2d(n, 1, 1) for n in (1, 1, 1)))


def small(tmp_path, **changes):
    values = {"algorithm": "cse-fsl", "clients": 2, "rounds": 2, "batch_size": 5, "device": "cpu"}
    return from_dict({**values, "out": str(tmp_path / "run"), **changes}, Config())


def test_the_scores_are_means_over_the_whole_test_set():
    task = regression(test=(X.repeat(20, 1), X.repeat(20, 1).sum(1, keepdim=True))).make_task(Config(), CPU)
    assert task.test_batches() == 3  # of 600 examples
    model = deep(5, 1)()
    batches = [task.test_batch(index) for index in range(3)]
    sums = [task.score(model(batch.inputs), batch.target) for batch in batches]
    found = task.summarise({name: sum(part[name] for part in sums) for name in sums[0]})
    output, y = model(X).detach(), X.sum(1, keepdim=True)
    assert found["test_error"] == pytest.approx(error(output, y).mean().item(), rel=1e-6)
    assert found["test_loss"] == pytest.approx(F.mse_loss(output, y).item(), rel=1e-6)


def test_shapes_are_known_without_data():
    problem, indices = regression(), torch.arange(7)
    real, dry = (problem.make_task(Config(), device).training_batch(indices, None) for device in (CPU, META))
    assert (real.inputs.shape, real.target["y"].shape) == (dry.inputs.shape, dry.target["y"].shape)
    assert dry.inputs.is_meta
    wide = problem.make_task(from_dict({"precision": "float64"}), CPU).training_batch(indices, None)
    assert wide.inputs.dtype == wide.target["y"].dtype == torch.float64


def test_several_labels_at_once(tmp_path):
    y = (X[:, :3] > 0).float()
    problem = TensorProblem(
        (X[:20], y[:20]),
        (X[20:], y[20:]),
        deep(5, 3),
        F.binary_cross_entropy_with_logits,
        lambda output, y: ((output > 0) == (y > 0)).all(1).float(),
        Score("test_exact", percent=True),
        cut="0",
        labels=y[:20, 0].long(),
        classes=("no", "yes"),
    )
    result = run(small(tmp_path, data={"partition": "dirichlet", "alpha": 0.5}), problem=problem)
    assert 0 <= result.best_score <= 1
    assert (result.directory / "classes.csv").read_text().splitlines()[0] == "client,no,yes"


def test_segmentation(tmp_path):
    x = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0.5).long()
    problem = TensorProblem(
        (x[:12], y[:12]),
        (x[12:], y[12:]),
        lambda: nn.Sequential(*(nn.Conv2d(n, 4, 3, padding=1) for n in (1, 4, 4)), nn.Conv2d(4, 2, 1)),
        F.cross_entropy,
        lambda output, y: (output.argmax(1) == y).float().mean((1, 2)),
        Score("test_pixels", percent=True),
        cut="0",
    )
    result = run(small(tmp_path), problem=problem)
    assert result.metrics[-1]["test_pixels"] == result.metrics[-1][result.score.name]


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(InputError, match="There are 20 training inputs and 19 targets"):
        regression(train=(X[:20], X[:19]))
    task = regression(metric=lambda output, y: output - y).make_task(Config(), CPU)
    with pytest.raises(InputError, match=r"The metric gave \[10, 1\] for 10 examples"):
        task.score(torch.zeros(10, 1), {"y": torch.zeros(10, 1)})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metric": lambda output, y: output - y}, r"The metric gave \[2, 1\] for 2 examples"),
        ({"metric": lambda output, y: error(output, y).numpy()}, "The metric gave a ndarray for 2 examples: it must"),
        ({"metric": lambda output, y: 1 / 0}, r"The metric or the loss fails on two test examples: ZeroDivision"),
        ({"loss": lambda output, y: 1.0}, "The loss gave float: it must give the mean over the batch"),
        (
            {"model": images, "train": (X[:20].view(20, 1, 5, 1), X[:20]), "test": (X[20:].view(10, 5, 1, 1), X[20:])},
            r"model fails on test inputs of \[2, 5, 1, 1\], where the training inputs are \[2, 1, 5, 1\]: Runtime",
        ),
    ],
)
def test_the_model_the_loss_and_the_metric_are_tried_before_round_0(tmp_path, changes, words):
    """They failed when the first round was over."""
    with pytest.raises(InputError, match=words):
        run(small(tmp_path), problem=regression(**changes))
    assert not (tmp_path / "run").exists()


def test_a_trial_changes_neither_the_model_nor_random_numbers():
    torch.manual_seed(0)
    plain, drawn = counting(), torch.rand(1)
    torch.manual_seed(0)
    tried = regression(model=counting, test=(X[20:].double(), X[20:, :1].double())).make_model(Config())
    assert torch.equal(torch.rand(1), drawn)
    assert tried.training
    assert all(torch.equal(x, plain.state_dict()[name]) for name, x in tried.state_dict().items())


def counting():
    model = deep(5, 1)().append(nn.Dropout())
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_hook(lambda module, inputs, output: module.calls.add_(1) * 0 + output)
    return model.double()


def test_images_of_other_sizes_are_tested(tmp_path):
    """A convolution takes them, though the training images are smaller."""
    x = torch.rand(20, 1, 8, 8)
    mean = {"loss": lambda o, y: (o.mean((1, 2, 3)) - y[:, 0]).square().mean(), "metric": lambda o, y: o[:, 0, 0, 0]}
    pair = {"train": (x[:, :, :4, :4], X[:20]), "test": (x, X[:20])}
    assert run(small(tmp_path), problem=regression(model=images, **pair, **mean)).metrics


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": deep(5, 1)()}, "is a Sequential: give a function or a class that makes it"),
        ({"score": "test_error"}, r"score of a TensorProblem is test_error: give a fsl_sage\.Score"),
        ({"score": Score("test_loss")}, "is called test_loss, as the mean of its loss over the test set: give its"),
        ({"train": X[:20]}, r"training data of a TensorProblem are a Tensor: give \(inputs, targets\)"),
        ({"train": (X[:20], 3)}, "training targets of a TensorProblem are a int: give a tensor or array"),
        ({"test": (X[20:] / 0, X[20:])}, "test inputs of a TensorProblem have NaN or infinite numbers"),
        ({"train": (X[:20], X[:20].sqrt())}, "training targets of a TensorProblem have NaN"),
        (
            {"test": (X[20:, :4], X[20:])},
            r"test inputs of a TensorProblem are \[10, 4\] and the training inputs \[20, 5",
        ),
        ({"test": (X[20:, None], X[20:])}, r"are \[10, 1, 5\] and the training inputs \[20, 5\]: one model takes both"),
        ({"loss": "mse"}, "The loss of a TensorProblem is mse: give a function of the model's output and the targets"),
        ({"metric": None}, "The metric of a TensorProblem is None: give a function of the model's output"),
        ({"train": (X[:20].to_sparse(), X[:20])}, "training inputs of a TensorProblem are a sparse or nested tensor"),
        (
            {"train": (X[:20], np.array(["a"] * 20))},
            "training targets of a TensorProblem are an array of <U1: give numb",
        ),
        ({"test": (X[20:].numpy().astype(object), X[20:])}, "test inputs of a TensorProblem are an array of object"),
        ({"labels": ["a"] * 20}, "labels of a TensorProblem are a list: give numbers, a tensor or an array"),
    ],
)
def test_what_no_training_can_use_is_refused_at_once(changes, words):
    with pytest.raises(InputError, match=words):
        regression(**changes)


def test_a_loss_that_is_no_mean_is_refused_and_the_directory_is_free_again(tmp_path):
    with pytest.raises(InputError, match=r"The loss gave \[2, 1\]: it must give the mean over the batch"):
        run(small(tmp_path), problem=regression(loss=lambda output, y: (output - y) ** 2))
    run(small(tmp_path), problem=regression())


def test_arrays_are_as_good_as_tensors(tmp_path):
    y = X.sum(1, keepdim=True)
    arrays = regression(train=(X[:20].numpy(), y[:20].numpy()), test=(X[20:].numpy(), y[20:].numpy()))
    assert run(small(tmp_path), problem=arrays).metrics[-1]["test_error"] == pytest.approx(
        run(small(tmp_path, out=str(tmp_path / "tensors")), problem=regression()).metrics[-1]["test_error"], rel=0
    )


def network():
    return deep(5, 1)()


def test_the_run_has_the_name_of_its_own_model(tmp_path):
    assert run(small(tmp_path), problem=regression(model=network)).config.model.name == "network"
    assert regression().model_name == "own model"
    with pytest.raises(InputError, match=r"--model\.name small-cnn has no effect: .* has a model of its own"):
        run(small(tmp_path, model={"name": "small-cnn"}, out=str(tmp_path / "other")), problem=regression())


def test_what_makes_a_problem_is_not_one(tmp_path):
    with pytest.raises(InputError, match=r"problem= is a function: give a fsl_sage\.Problem"):
        run(small(tmp_path), problem=regression)


def test_an_option_that_cannot_reach_its_loss_is_refused(tmp_path):
    config = small(tmp_path, optimizer={"label_smoothing": 0.1})
    words = r"--optimizer\.label-smoothing 0\.1 has no effect: .*TensorProblem has a loss of its own"
    with pytest.raises(InputError, match=words):
        run(config, problem=regression())
    with pytest.raises(InputError, match=words):
        make_problem(replace(config, data=replace(config.data, name=f"{__name__}:regression")))


def test_metrics_come_as_a_frame(tmp_path, monkeypatch):
    result = run(small(tmp_path), problem=regression())
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "pandas", None)
        with pytest.raises(InputError, match="needs pandas: pip install pandas"):
            result.frame()
    pytest.importorskip("pandas")
    frame = result.frame()
    assert list(frame.index) == [0, 1]
    assert frame["test_error"].tolist() == [line["test_error"] for line in result.metrics]


def test_a_site_may_have_whole_numbers_that_the_test_set_has_not():
    counts = torch.arange(20)
    task = regression(train=(X[:20], counts), test=(X[20:28], counts[:8])).make_task(Config(), CPU)
    assert task.complaint({"y": torch.tensor([19])}) is None
    assert "outside 0 to 19" in task.complaint({"y": torch.tensor([20])})


@pytest.mark.parametrize("labels", [torch.arange(10), torch.arange(30), torch.zeros(20, 1).long(), torch.rand(20)])
def test_labels_are_one_integer_for_each_example(labels):
    """Fewer labels were taken for fewer examples, silently."""
    with pytest.raises(InputError, match=r"goes by an integer for each of the 20 training examples"):
        regression(labels=labels).divide(Config(clients=2))


def test_labels_may_be_an_array():
    shares = regression(labels=np.arange(20) % 2).divide(
        from_dict({"clients": 2, "data": {"partition": "shards"}}, Config())
    )
    assert sorted(torch.cat(shares).tolist()) == list(range(20))


def test_arrays_of_double_precision_are_taken(tmp_path):
    """They are NumPy's usual ones."""
    y = X.sum(1, keepdim=True).double().numpy()
    x = X.double().numpy()
    assert run(small(tmp_path), problem=regression(train=(x[:20], y[:20]), test=(x[20:], y[20:]))).metrics


def test_a_target_is_one_of_the_problems_own_score(tmp_path):
    result = run(small(tmp_path, target_accuracy=50.0), problem=regression())
    assert len(result.metrics) == 1
    right = Score("test_right", percent=True)
    with pytest.raises(InputError, match="--target-accuracy"):
        run(small(tmp_path, target_accuracy=50.0, out=str(tmp_path / "other")), problem=regression(score=right))
