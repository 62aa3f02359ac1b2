"""The parts of a run's model: client, server and auxiliary."""

import copy

from torch import Tensor, nn

from fsl_sage.config import ModelConfig


class _Stages(nn.Sequential):
    def forward(self, *z: Tensor) -> Tensor:
        (x,) = z
        for stage in self:
            x = stage(x) if not isinstance(stage, nn.Linear) else stage(x.flatten(1))
        return x


def make_parts(model: nn.Module, config: ModelConfig, example: Tensor) -> dict[str, nn.Module]:
    names = [name for name, _ in model.named_children()]
    cut = names.index(config.cut or "layer2")

    def part(keep):
        from collections import OrderedDict

        return _Stages(OrderedDict((n, copy.deepcopy(m)) for n, m in model.named_children() if n in keep))

    client = part(names[: cut + 1])
    server = part(names[cut + 1 :])
    aux = part(["layer3", "avgpool"])
    aux.add_module("fc", nn.Linear(256, model.fc.out_features, device=example.device))
    return {"client": client, "server": server, "auxiliary": aux}
