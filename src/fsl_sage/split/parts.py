"""The parts of a run's model: client, server and auxiliary."""

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from fsl_sage.split.splitting import split_model


class _Stages(nn.Sequential):
    def forward(self, *z: Tensor) -> Tensor:
        (x,) = z
        for stage in self:
            x = stage(x) if not isinstance(stage, nn.Linear) else stage(x.flatten(1))
        return x


def make_parts(model: nn.Module, cut: str, auxiliary: str, example: Any) -> dict[str, nn.Module]:
    """Cut the model and derive its auxiliary."""
    split = split_model(model, cut, example)
    names = [name for name, _ in model.named_children()]
    block = names[names.index(cut) + 1]
    stages = OrderedDict({block: copy.deepcopy(model.get_submodule(block))})
    stages["avgpool"] = nn.AdaptiveAvgPool2d(1)
    classes = [m for m in model.modules() if isinstance(m, nn.Linear)][-1].out_features
    channels = [m for m in stages[block].modules() if isinstance(m, nn.Conv2d)][-1].out_channels
    stages["fc"] = nn.Linear(channels, classes, device=example.device)
    return {"client": split.client, "server": split.server, "auxiliary": _Stages(stages)}
