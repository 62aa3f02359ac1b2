"""A ResNet-18 step through the general splitter's parts against the same step through hand-made halves."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.timing import CONSOLE, Goal, compare, note
from fsl_sage.models import ResNet18
from fsl_sage.split import split_model


class HandMadeClient(nn.Sequential):
    """The stem, layer1 and layer2, written down by hand."""

    def __init__(self, model: ResNet18) -> None:
        super().__init__(model.conv1, model.bn1, model.maxpool, model.relu, model.layer1, model.layer2)


class HandMadeServer(nn.Module):
    """layer3, layer4 and the head, written down by hand."""

    def __init__(self, model: ResNet18) -> None:
        super().__init__()
        self.stages = nn.Sequential(model.layer3, model.layer4, model.avgpool)
        self.fc = model.fc

    def forward(self, z: Tensor) -> Tensor:
        """Logits from the cut-layer activation."""
        return self.fc(self.stages(z).flatten(1))


class Step:
    """Client forward, server forward and backward, client backward, both optimizers."""

    def __init__(self, client: nn.Module, server: nn.Module, batch_size: int = 64) -> None:
        generator = torch.Generator().manual_seed(0)
        self.client, self.server = client, server
        self.x = torch.randn(batch_size, 3, 32, 32, generator=generator)
        self.y = torch.randint(10, (batch_size,), generator=generator)
        self.optimizers = [torch.optim.Adam(part.parameters(), fused=True) for part in (client, server)]

    def __call__(self) -> None:
        output = self.client(self.x)
        (z,) = getattr(output, "tensors", (output,))
        leaf = z.detach().requires_grad_()
        F.cross_entropy(self.server(leaf), self.y).backward()
        z.backward(leaf.grad)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def main(repeats: int = 15) -> None:
    """Print the ratio."""
    torch.set_num_threads(1)
    CONSOLE.print("\n[bold]The splitter's parts against hand-made halves[/] (time over time; at most 1.05)")
    split = split_model(ResNet18(), "layer2", torch.zeros(2, 3, 32, 32))
    model = ResNet18()
    ratio = compare(Step(split.client, split.server), Step(HandMadeClient(model), HandMadeServer(model)), repeats)
    CONSOLE.print(f"  resnet18, batch 64: {ratio}")
    note("the splitter's parts over hand-made halves", ratio.median, Goal(1.05))


if __name__ == "__main__":
    main()
