"""A model of your own, cut where you say: python examples/own_model.py"""

from torch import nn

from fsl_sage import Config, DataConfig, ModelConfig, load_model, run


class Net(nn.Module):
    """Any module will do. It is given the number of classes and of channels, if it asks for them."""

    def __init__(self, classes, channels):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU())
        self.third = nn.Sequential(nn.Conv2d(32, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU())
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        return self.head(self.third(self.second(self.first(x))).mean((2, 3)))


if __name__ == "__main__":
    config = Config(
        model=ModelConfig(name="own_model:Net", cut="first"),  # `first` is at the client, the rest at the server
        data=DataConfig(train_images=600, test_images=200),
        clients=3,
        rounds=3,
        batch_size=32,
    )
    result = run(config)
    print(f"best accuracy {result.best_score:.1%}, {result.metrics[-1]['bytes_paper']:,} bytes")
    model = load_model(result.directory)  # a Net, whole again
    print(f"{type(model).__name__} with {sum(p.numel() for p in model.parameters()):,} parameters")
