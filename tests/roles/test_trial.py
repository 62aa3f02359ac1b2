"""What a model keeps from one pass to the next must be in its state_dict: else it is refused before a run."""

import pytest
import torch
from torch import nn

from fsl_sage.errors import InputError
from fsl_sage.experiment.setup import make_setup
from fsl_sage.models.norm import without_trace
from fsl_sage.roles.trial import hidden_state, moves_generators


class Own(nn.Module):
    """Its buffer follows the mean of what passes."""

    saved = True

    def __init__(self, classes=3, channels=3):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes))
        self.register_buffer("mean", torch.zeros(8, 1, 1), persistent=self.saved)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64), persistent=self.saved)
        self.looks = 0

    def forward(self, x):
        z = self.first(x)
        if self.training:
            self.follow(z.detach().mean((0, 2, 3))[:, None, None])
        return self.last(z - self.mean)

    def follow(self, mean):
        self.mean.mul_(0.9).add_(mean, alpha=0.1)
        self.passes += 1
        self.looks += 1  # nobody reads it


class Unsaved(Own):
    saved = False


class Exchanged(Own):
    def follow(self, mean):
        self.mean = 0.9 * self.mean + 0.1 * mean


class Counting(Own):
    def forward(self, x):
        return super().forward(x) / (1 + self.looks)


class Caching(Own):
    """What it puts anew in each pass is the same each time."""

    saved = False

    def follow(self, mean):
        self.mean = torch.zeros(8, 1, 1)
        self.features = mean
        self.looks += 1


def split(model):
    torch.manual_seed(0)
    module = model()
    return [module]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Own, None),
        (Caching, None),
        (Unsaved, "'mean' of Unsaved is a buffer that is not saved"),
        (Exchanged, "'mean' of Exchanged is exchanged for another tensor"),
        (Counting, "'looks' of Counting is a plain number"),
    ],
)
def test_hidden_state_is_found_and_nothing_is_changed(model, said):
    parts = split(model)
    buffers = dict(parts[0].named_buffers())
    before = {name: x.clone() for name, x in buffers.items()}
    parts[0].eval()
    found = hidden_state(parts, torch.randn(2, 3, 8, 8), torch.device("cpu"))
    assert found is None if said is None else found.startswith(said)
    assert not moves_generators(parts, torch.randn(2, 3, 8, 8), torch.device("cpu"))
    assert not parts[0].training
    for name, x in parts[0].named_buffers():
        assert x is buffers[name]
        assert torch.equal(x, before[name]), name


def test_a_run_with_such_a_model_is_refused(tiny):
    changes = {"name": f"{__name__}:Counting", "cut": "first", "auxiliary": "linear"}
    with pytest.raises(InputError, match=r"test_trial:Counting keeps something .*'looks' of Counting"):
        make_setup(tiny(model=changes))


def test_a_run_begins_with_the_buffers_that_the_model_has(tiny):
    """They once were those after a trial with zeros."""
    setup = make_setup(tiny(model={"name": f"{__name__}:Own", "cut": "first", "auxiliary": "linear"}))
    held = {name: x for part in setup.initial.values() for name, x in part.items()}
    assert held["passes"] == 0
    assert not held["mean"].any()


def test_passes_without_a_trace_see_what_passes_within_them_changed():
    (model,) = split(Own)
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        model(x)
        with without_trace(model):
            model(x)
            assert model.passes == 2
    assert model.passes == 1
