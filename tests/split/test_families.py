"""Every cut that is listed, on many families: outputs, gradients and the merged state are the unsplit model's bits."""

from typing import Any

import pytest
import torch

from fsl_sage.split import Analysis, Split
from tests.split.families import FAMILIES
from tests.split.steps import assert_same_bits, split_step, whole_step

MANY_LAYERS = {"resnet18", "mobilenet_v2", "efficientnet", "regnet", "convnext", "swin"}
WHOLE = [pytest.param(name, marks=[pytest.mark.slow] if name in MANY_LAYERS else []) for name in FAMILIES]


@pytest.mark.parametrize("family", WHOLE)
def test_every_listed_cut_gives_the_unsplit_models_bits(family: str) -> None:
    torch.manual_seed(0)
    model, example = FAMILIES[family]()
    model.train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    analysis = Analysis(model, example)
    expected: dict[tuple[str, ...], Any] = {}
    assert len(analysis.cut_names) >= 2
    for cut in analysis.cut_names:
        model.load_state_dict(state)
        split = Split(model, analysis.plan([cut], tied="untie"))
        if split.plan.untied not in expected:
            expected[split.plan.untied] = whole_step(model, example, split.plan.untied)
        outputs, gradients, merged = expected[split.plan.untied]
        split_outputs, split_gradients, split_merged = split_step(split, example)
        assert_same_bits(dict(enumerate(outputs)), dict(enumerate(split_outputs)))
        assert_same_bits(gradients, split_gradients)
        assert_same_bits(merged, split_merged)
        sides = [dict(part.named_parameters()) for part in split.parts]
        trainable = [{name for name, p in side.items() if p.requires_grad} for side in sides]
        assert not trainable[0] & trainable[1]


def test_there_are_twenty_families() -> None:
    assert len(FAMILIES) >= 20
