"""Models whose client part has a large frozen weight."""

import torch
from torch import Tensor, nn


class Large(nn.Module):
    """A table of 500 MB that is looked at, a small layer that is trained, and a head."""

    rows = 125_000

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.table = nn.Embedding(self.rows, 1000)
        self.table.weight.requires_grad_(False)
        self.layer = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 8), nn.ReLU())
        self.scale = nn.Linear(8, 8)
        self.behind = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, classes)
        with torch.no_grad():  # no two chunks are the same
            self.table.weight.copy_(torch.arange(self.rows, dtype=torch.float32)[:, None] / self.rows)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.full((len(x),), self.rows - 1, device=x.device)
        return self.head(self.behind(self.scale(self.layer(x) + self.table(rows)[:, :8])))


class Middling(Large):
    """The same with a table of 80 MB: three chunks, in two messages."""

    rows = 20_000
