"""No attribute of a part, or of an auxiliary, stands in the way of a submodule of the user's model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fsl_sage import Config, DataConfig, ModelConfig, cost, run
from fsl_sage.experiment.cuts import cuts_of
from fsl_sage.split import auxiliary, build_side, side_tensors, split_model
from fsl_sage.split.parts.part import Passage, passage

ONCE_IN_THE_WAY = ("drop", "plan", "name", "entry", "exit", "_live", "_absent", "_model", "_adopt", "_module", "fit")


def names_of_parts() -> list[str]:
    """Every name that a part or its passage has beyond those of every module."""
    part = split_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "0", torch.zeros(2, 2)).client
    own = {*dir(part), *dir(passage(part)), *ONCE_IN_THE_WAY, *dir(Passage)} - set(dir(nn.Module()))
    return sorted(name for name in own if "." not in name and not name.startswith("__"))


NAMES = names_of_parts()


class Stage(nn.Module):
    """A block whose submodules have all these names, and which changes the width."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        for name in NAMES:
            self.add_module(name, nn.Conv2d(width, out if name == NAMES[0] else width, 1))
        self.last = nn.Conv2d(out, out, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = NAMES
        for name in rest:
            x = self.get_submodule(name)(x)
        return torch.relu(self.last(self.get_submodule(first)(x)))


class Named(nn.Module):
    """The same names at the top, where the parts share the registry of modules."""

    def __init__(self, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, 4, 8, 8)
        for name in NAMES:
            self.add_module(name, nn.Conv2d(4, 4, 1))
        self.stages = nn.Sequential(Stage(4, 6), Stage(6, 8))
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for name in NAMES:
            x = torch.tanh(self.get_submodule(name)(x))
        return self.head(self.stages(x).mean((2, 3)))


IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_a_part_has_no_attributes_beyond_those_of_every_module() -> None:
    part = split_model(Named(), "drop", IMAGES).client
    assert {name for name in {*dir(part)} - {*dir(nn.Module())} if "." not in name} <= set(part._modules)


@pytest.mark.parametrize("cut", ["plan", "drop", "stages.0"])
def test_a_model_with_all_these_names_is_cut(cut: str) -> None:
    model = Named()
    split = split_model(model, cut, IMAGES)
    assert torch.equal(split(IMAGES), model(IMAGES))
    for name in split.plan.parts["client"]:
        assert torch.equal(split.client.get_parameter(name), model.get_parameter(name))
    assert split.merged().state_dict().keys() == model.state_dict().keys()
    rebuilt = build_side(Named, split.plan, "server", side_tensors(split.server))
    assert torch.equal(rebuilt(split.client(IMAGES)), model(IMAGES))


@pytest.mark.parametrize("spec", ["linear", "blocks:1", "full"])
def test_its_auxiliary_runs_and_converts(spec: str) -> None:
    split = split_model(Named(), "name", IMAGES)
    made = auxiliary(split, spec).to(torch.float64)
    boundary = split.client.to(torch.float64)(IMAGES.double())
    assert made(boundary).shape == (3, 10)
    assert {tensor.dtype for tensor in made.state_dict().values()} == {torch.float64}


def test_an_auxiliary_of_ones_own_may_use_any_name() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._module = nn.Linear(4, 10)

        def forward(self, z: Tensor) -> Tensor:
            return self._module(z.mean((2, 3)))

    split = split_model(Named(), "name", IMAGES)
    made = auxiliary(split, Own())
    assert made.get_submodule("_module") is made._modules["_module"]
    assert made(split.client(IMAGES)).shape == (3, 10)


@pytest.mark.slow
def test_it_trains_and_its_costs_are_known(tmp_path: Path) -> None:
    config = Config(
        clients=2,
        rounds=1,
        batch_size=8,
        out=tmp_path / "run",
        data=DataConfig(train_images=20, test_images=10),
        model=ModelConfig(name=f"{__name__}:Named", cut="drop"),
    )
    assert len(run(config).metrics) == 1
    assert set(cost(config)) >= {"fsl-sage", "splitfed-ms", "fedavg"}
    assert "plan" in {each.point.name for each in cuts_of(config)}
    u_shape = replace(config, algorithm="splitfed-ms", out=tmp_path / "u", model=replace(config.model, cut="drop,name"))
    assert len(run(u_shape).metrics) == 1
