import pytest
import torch
from torch import nn

from fsl_sage.models import ResNet18, SmallCNN, batch_statistics, replace_batch_norm, statistics_names


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def modes(model: nn.Module) -> list[tuple[bool, bool | None]]:
    return [(module.training, getattr(module, "track_running_stats", None)) for module in model.modules()]


def mixed() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Sequential(nn.BatchNorm1d(8, affine=False))
    )


def test_replace_batch_norm_leaves_none_and_keeps_the_weights() -> None:
    model = ResNet18()
    weights = dict(model.named_parameters())
    assert replace_batch_norm(model) is model
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in weights.items()}
    assert not list(model.buffers())
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 10)


@pytest.mark.parametrize(("channels", "groups"), [(512, 32), (256, 32), (64, 8), (16, 2), (48, 4), (20, 2), (7, 1)])
def test_replace_batch_norm_chooses_groups_that_divide(channels: int, groups: int) -> None:
    norm = replace_batch_norm(nn.BatchNorm2d(channels, eps=1e-3))
    assert isinstance(norm, nn.GroupNorm)
    assert (norm.num_groups, norm.num_channels, norm.eps) == (groups, channels, 1e-3)


def test_replace_batch_norm_of_vectors_and_without_weights() -> None:
    model = replace_batch_norm(mixed())
    assert [norm.affine for norm in model.modules() if isinstance(norm, nn.GroupNorm)] == [True, False]
    y = model.eval()(torch.randn(2, 8))
    assert not torch.equal(y[0], y[1])


def test_replace_batch_norm_keeps_device_and_mode() -> None:
    model = replace_batch_norm(SmallCNN().to("meta").eval())
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert not any(module.training for module in model.modules())


def test_statistics_names_are_the_buffers_of_a_resnet() -> None:
    model = ResNet18()
    assert statistics_names(model) == {name for name, _ in model.named_buffers()}
    assert len(statistics_names(model)) == 3 * 20


def test_statistics_names_are_only_those_of_batch_norms() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False), nn.GroupNorm(2, 4))
    model.register_buffer("running_mean", torch.zeros(1))
    assert statistics_names(model) == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
    assert statistics_names(nn.BatchNorm1d(4)) == {"running_mean", "running_var", "num_batches_tracked"}


@pytest.mark.parametrize("training", [True, False])
def test_batch_statistics_normalise_like_training_and_leave_no_trace(training: bool) -> None:
    torch.manual_seed(0)
    model = SmallCNN().train(training)
    model.block2.eval()
    before, how = state(model), modes(model)
    x = torch.randn(8, 3, 32, 32)
    with batch_statistics(model):
        found = model(x)
    assert modes(model) == how
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(found, model.train()(x))


def test_batch_statistics_switch_dropout_off() -> None:
    torch.manual_seed(0)
    model = mixed()
    x = torch.randn(16, 8)
    with batch_statistics(model):
        assert torch.equal(model(x), model(x))
        assert (model(x) != 0).all()


def test_batch_statistics_of_a_layer_without_running_ones() -> None:
    model = nn.BatchNorm1d(4, track_running_stats=False).eval()
    with batch_statistics(model):
        pass
    assert not model.track_running_stats
    assert not model.training


def test_batch_statistics_restore_after_an_exception() -> None:
    model = mixed().train()
    model[3].eval()
    before, how = state(model), modes(model)

    def fail() -> None:
        with batch_statistics(model):
            model(torch.randn(16, 8))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert modes(model) == how
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_batch_statistics_can_be_nested() -> None:
    model = mixed().train()
    how = modes(model)
    with batch_statistics(model):
        inside = modes(model)
        with batch_statistics(model):
            pass
        assert modes(model) == inside
    assert modes(model) == how
