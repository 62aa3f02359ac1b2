import numpy as np
import torch
import torch.nn.functional as F

from fsl_sage.models import SmallCNN


def test_it_is_small_and_has_named_stages() -> None:
    model = SmallCNN(classes=10, channels=3)
    assert [name for name, _ in model.named_children()] == ["block1", "block2", "block3", "head"]
    assert 10_000 < sum(p.numel() for p in model.parameters()) < 100_000


def test_it_learns_a_task_by_heart() -> None:
    torch.manual_seed(0)
    model = SmallCNN(classes=4)
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(64, 3, 32, 32)), dtype=torch.float32)
    target = torch.arange(64) % 4
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(model(x), target).backward()
        optimizer.step()
    assert (model(x).argmax(1) == target).float().mean() > 0.9
