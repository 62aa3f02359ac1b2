"""A model without a usual cut is cut after its first block, and that is said."""

from pathlib import Path

import pytest
import torch
from torch import nn

from fsl_sage.config import Config, ModelConfig
from fsl_sage.errors import InputError, RunWarning
from fsl_sage.problems.make import make_dry_problem
from fsl_sage.problems.parts import META, _say_once, build_parts, end_of_first_block


@pytest.mark.parametrize(
    ("family", "changes", "cut"),
    [
        ("vit", {"num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 8}, ".0"),
        ("convnext", {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "patch_size": 2}, "stages.0"),
    ],
)
def test_a_model_of_transformers(tmp_path: Path, family: str, changes: dict, cut: str) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(family, hidden_size=16, intermediate_size=32, **changes).save_pretrained(tmp_path)
    config = Config(model=ModelConfig(name=f"hf:{tmp_path}"))
    _say_once.cache_clear()
    with pytest.warns(RunWarning, match=rf"is cut after its first block, \S*{cut}; --model.cut"):
        parts = build_parts(config, make_dry_problem(config), META)
    blocks = {name.split(f"{cut}.")[0] for name in parts["client"].state_dict() if f"{cut}." in name}
    assert len(blocks) == 1


def flat(classes: int = 10) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.ReLU(), nn.Flatten(), nn.Linear(64, classes))


def test_where_there_are_no_blocks_some_cuts_are_named() -> None:
    config = Config(model=ModelConfig(name=f"{__name__}:flat"))
    with pytest.raises(InputError, match=r"no usual cut: give --model.cut, such as 0, .*'fsl-sage cuts' shows all"):
        build_parts(config, make_dry_problem(config), torch.device("cpu"))


def test_the_end_of_the_first_block() -> None:
    one, two = (nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2))
    assert end_of_first_block(nn.Sequential(nn.Linear(2, 2), nn.Sequential(one, two)), ["0", "1.0", "1.1"]) == "1.0"
    assert end_of_first_block(nn.Sequential(nn.Sequential(one), nn.Linear(2, 2)), ["0.0"]) is None
