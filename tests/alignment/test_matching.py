import copy

import pytest
import torch
from torch import nn

from fsl_sage.alignment.matching import UnusableError, _per_sample, _square, align, direction_loss, matching_loss
from fsl_sage.config import AlignmentConfig
from fsl_sage.split import add_fitted_scale, fitted_scale

from .conftest import head, upload


def stream():
    return torch.Generator().manual_seed(0)


def target_of(server, batch, passes):
    return _per_sample(passes.cut_gradient(server, *batch)[0], batch, passes)


def test_gradient_of_the_loss_against_finite_differences(passes):
    auxiliary, server = head(1).double(), head(2).double()
    batch = upload(5, dtype=torch.float64)
    target = target_of(server, batch, passes)
    parameters = [p for p in auxiliary.parameters() if p.requires_grad]
    loss = matching_loss(auxiliary, batch, target, 1.0, passes)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    checked = 0
    for parameter, gradient in zip(parameters, gradients, strict=True):
        flat = parameter.data.view(-1)
        for index in range(0, len(flat), max(1, len(flat) // 5)):
            original, step, ends = flat[index].item(), 1e-6, []
            for sign in (1, -1):
                flat[index] = original + sign * step
                ends.append(matching_loss(auxiliary, batch, target, 1.0, passes).item())
            flat[index] = original
            slope = (ends[0] - ends[1]) / (2 * step)
            given = 0.0 if gradient is None else gradient.reshape(-1)[index].item()
            assert given == pytest.approx(slope, rel=1e-5, abs=1e-8)
            checked += 1
    assert checked >= 20


def test_the_servers_own_weights_need_no_alignment(passes):
    server = head(1)
    auxiliary = copy.deepcopy(server)
    losses = align(auxiliary, server, [upload(6), upload(5, 1)], passes, AlignmentConfig(steps=3), stream())
    assert losses[0] == 0.0


def test_alignment_lowers_the_loss_and_changes_the_auxiliary_alone(passes):
    server, auxiliary = head(1), head(2)
    before = copy.deepcopy(server.state_dict())
    buffers = copy.deepcopy(dict(auxiliary.named_buffers()))
    modes = [module.training for module in server.modules()]
    random_state = torch.get_rng_state()
    losses = align(
        auxiliary, server, [upload(32), upload(32, 1)], passes, AlignmentConfig(steps=200, lr=1e-2), stream()
    )
    assert losses[-1] < 0.2 * losses[0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in server.state_dict().items())
    assert all(parameter.grad is None for parameter in [*server.parameters(), *auxiliary.parameters()])
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in auxiliary.named_buffers())
    assert [module.training for module in server.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_clipped_gradient_has_no_greater_norm(passes):
    lengths = []
    for clip in (None, 1e-3):
        auxiliary = head(2)
        before = [parameter.detach().clone() for parameter in auxiliary.parameters()]
        config = AlignmentConfig(steps=1, optimizer="sgd", lr=1.0, clip=clip)
        align(auxiliary, head(1), [upload(6)], passes, config, stream())
        moved = [(new - old).square().sum() for new, old in zip(auxiliary.parameters(), before, strict=True)]
        lengths.append(torch.stack(moved).sum().sqrt().item())
    assert lengths[0] > 1e-2
    assert lengths[1] == pytest.approx(1e-3, rel=1e-2)


def test_dropout_is_off(passes):
    server, auxiliary = head(1, dropout=0.9), head(1, dropout=0.9)
    losses = align(auxiliary, server, [upload(6)], passes, AlignmentConfig(steps=1), stream())
    assert losses == [0.0]


def test_neither_batch_size_nor_reduction_changes_the_loss(passes):
    """Without BatchNorm a batch's loss is the mean of its samples' own, and a scaled training loss changes nothing."""
    server, auxiliary = (nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(2))
    whole = upload(8)
    halves = [whole.last(4), type(whole)(tuple(x[:4] for x in whole.z), {"labels": whole.target["labels"][:4]})]
    losses = [matching_loss(auxiliary, b, target_of(server, b, passes), 1.0, passes).item() for b in (whole, *halves)]
    assert losses[0] == pytest.approx((losses[1] + losses[2]) / 2, rel=1e-5)


def test_the_number_of_steps(passes):
    uploads = [upload(4, seed) for seed in range(3)]
    count = lambda **options: len(align(head(1), head(2), uploads, passes, AlignmentConfig(**options), stream()))  # noqa: E731
    assert count(steps=7, batch_size=0) == 7
    assert count(passes=5, batch_size=0) == 15
    assert count(passes=2, batch_size=6) == 4
    # A batch of 4 samples of 4 channels is taken for 16 tokens.
    assert count(passes=5, batch_size=0, max_tokens=100) == 6
    assert count(steps=2, batch_size=0, max_tokens=100) == 2
    with pytest.raises(UnusableError, match=r"--alignment.max-tokens 15 is less than one batch has"):
        count(steps=2, batch_size=0, max_tokens=15)


def test_matching_subtracts_in_single_precision(passes):
    """In bfloat16 the difference itself would be rounded to 8 bits."""
    auxiliary, batch = head(1).bfloat16(), upload(6, dtype=torch.bfloat16)
    estimate, _ = passes.cut_gradient(auxiliary, *batch)
    target = (torch.full_like(estimate[0], 0.01),)
    exact = sum((e.float() * 6 - t.float()).square().sum() for e, t in zip(estimate, target, strict=True))
    rounded = _square(tuple(e * 6 - t for e, t in zip(estimate, target, strict=True)))
    found = matching_loss(auxiliary, batch, target, 1.0, passes).item() * 6
    assert abs(found - float(exact)) < 0.1 * abs(float(rounded) - float(exact))


def test_alignment_by_direction_turns_the_estimates_and_scales_them(passes):
    server, auxiliary = head(1), head(2)
    add_fitted_scale(auxiliary)
    uploads = [upload(32), upload(32, 1)]
    losses = align(
        auxiliary, server, uploads, passes, AlignmentConfig(steps=200, lr=1e-2, batch_size=0, loss="cosine"), stream()
    )
    assert 0 < losses[-1] < 0.5 * losses[0] < 2
    scale = fitted_scale(auxiliary)
    assert scale != 1
    pairs = [(passes.cut_gradient(auxiliary, *b)[0][0], passes.cut_gradient(server, *b)[0][0]) for b in uploads]
    left = sum(((e - t) * e).sum() for e, t in pairs)  # the rest of a least-squares fit is at right angles to it
    assert abs(float(left)) < 1e-3 * float(sum(e.square().sum() for e, _ in pairs))


def test_the_fitted_scale_multiplies_what_clients_get_in_every_mode(passes):
    auxiliary, batch = head(1), upload(6)
    plain = passes.cut_gradient(auxiliary, *batch)[0][0], passes.learn(auxiliary, *batch)[0][0]
    add_fitted_scale(auxiliary)
    fitted_scale(auxiliary).fill_(3.0)
    scaled = passes.cut_gradient(auxiliary, *batch)[0][0], passes.learn(auxiliary, *batch)[0][0]
    for one, three in zip(plain, scaled, strict=True):
        torch.testing.assert_close(three, 3 * one)
    raw = passes.cut_gradient(auxiliary, *batch, create_graph=True)[0][0]
    torch.testing.assert_close(raw, plain[0])


def test_the_direction_alone_counts(passes):
    auxiliary, batch = head(1), upload(6)
    target = target_of(auxiliary, batch, passes)
    assert direction_loss(auxiliary, batch, target, passes).item() == pytest.approx(0, abs=1e-6)
    assert direction_loss(auxiliary, batch, (7 * target[0],), passes).item() == pytest.approx(0, abs=1e-6)
    assert direction_loss(auxiliary, batch, (-target[0],), passes).item() == pytest.approx(2, abs=1e-6)
    nothing = direction_loss(auxiliary, batch, (0 * target[0],), passes)
    nothing.backward()
    assert nothing.item() == 0
