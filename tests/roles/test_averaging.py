import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsl_sage.roles.averaging import PIECE, RULES, RunningMean, average, mean_of_optimizers


@given(st.integers(1, 20), st.integers(0, 2**31))
def test_the_mean_of_equal_tensors_is_that_tensor(count, seed):
    tensor = torch.randn(7, generator=torch.Generator().manual_seed(seed))
    weights = torch.rand(count, generator=torch.Generator().manual_seed(seed + 1)).add(0.01).tolist()
    assert torch.equal(average([{"w": tensor}] * count, weights)["w"], tensor)


def test_weights_need_not_sum_to_one():
    mean = average([{"w": torch.tensor([1.0])}, {"w": torch.tensor([4.0])}], [500.0, 1000.0])
    assert mean["w"].item() == pytest.approx(3.0)


def test_step_counters_are_not_averaged():
    states = [{"num_batches_tracked": torch.tensor(n)} for n in (3, 9, 4)]
    assert average(states, [1, 1, 1])["num_batches_tracked"].equal(torch.tensor(9))


def test_a_name_is_averaged_over_those_who_hold_it():
    states = [{"a": torch.tensor([1.0])}, {"a": torch.tensor([3.0]), "b": torch.tensor([5.0])}]
    mean = average(states, [1, 1])
    assert mean["a"].item() == 2
    assert mean["b"].item() == 5


# Rules that survive poisoned updates


def clients(count, poisoned=0, scale=1.0, seed=0):
    """States around a start of ones; the first `poisoned` are multiplied by `scale`."""
    draw = torch.Generator().manual_seed(seed)
    start = {"w": torch.ones(4, 3), "bn.num_batches_tracked": torch.tensor(0)}
    states = [
        {"w": 1 + 0.1 * torch.randn(4, 3, generator=draw), "bn.num_batches_tracked": torch.tensor(5 + n)}
        for n in range(count)
    ]
    for state in states[:poisoned]:
        state["w"] = state["w"] * scale
    return states, [float(n + 1) for n in range(count)], start


def test_mean_is_the_weighted_mean():
    states, weights, start = clients(5)
    assert RULES["mean"](states, weights, start)["w"].equal(average(states, weights)["w"])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9, 10])
def test_median_is_each_numbers_median(count):
    states, weights, start = clients(count)
    found = RULES["median"](states, weights, start)["w"]
    for place in range(12):
        numbers = sorted(float(state["w"].flatten()[place]) for state in states)
        middle = (numbers[(count - 1) // 2] + numbers[count // 2]) / 2
        assert float(found.flatten()[place]) == pytest.approx(middle, rel=1e-6)


@pytest.mark.parametrize(("count", "left_out"), [(1, 0), (2, 0), (3, 1), (10, 1), (16, 2), (30, 3)])
def test_trimmed_mean_leaves_out_both_ends(count, left_out):
    states, weights, start = clients(count)
    found = RULES["trimmed-mean"](states, weights, start)["w"]
    for place in range(12):
        numbers = sorted(float(state["w"].flatten()[place]) for state in states)
        kept = numbers[left_out : count - left_out]
        assert float(found.flatten()[place]) == pytest.approx(sum(kept) / len(kept), rel=1e-6)


def test_clipping_scales_large_changes_to_the_median_norm():
    states, weights, start = clients(5, poisoned=1, scale=1e6)
    changes = [state["w"].double() - 1 for state in states]
    norms = [float(change.norm()) for change in changes]
    limit = sorted(norms)[2]
    shares = [min(1.0, limit / norm) for norm in norms]
    mean = sum(w * s * c for w, s, c in zip(weights, shares, changes, strict=True)) / sum(weights)
    torch.testing.assert_close(RULES["clipped"](states, weights, start)["w"].double(), 1 + mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", ["clipped", "trimmed-mean", "median"])
@pytest.mark.parametrize("scale", [1e6, -1e6, 10.0])
def test_one_poisoner_of_ten_moves_the_average_no_further_than_an_honest_client_could(rule, scale):
    states, _, start = clients(10, poisoned=1, scale=scale)
    honest = average(states[1:], [1.0] * 9)["w"]
    found = RULES[rule](states, [1.0] * 10, start)["w"]
    assert float((found - honest).abs().max()) < 0.2
    assert float((average(states, [1.0] * 10)["w"] - honest).abs().max()) > 0.5


@pytest.mark.parametrize("rule", ["mean", "clipped", "trimmed-mean", "median"])
@given(st.integers(1, 12))
@settings(deadline=None)
def test_equal_clients_have_their_own_state_as_average(rule, count):
    (state,), _, start = clients(1)
    found = RULES[rule]([state] * count, [1.0] * count, start)
    torch.testing.assert_close(found["w"], state["w"], rtol=1e-6, atol=0)
    assert found["bn.num_batches_tracked"].equal(state["bn.num_batches_tracked"])


def test_an_absurd_counter_does_not_pass_the_median():
    states, weights, start = clients(5)
    states[0]["bn.num_batches_tracked"] = torch.tensor(10**12)
    for rule in ("median", "trimmed-mean"):
        assert int(RULES[rule](states, weights, start)["bn.num_batches_tracked"]) < 20


def test_a_running_mean_is_the_average_to_the_bit():
    generator = torch.Generator().manual_seed(0)
    weights = [3.0, 7.0, 11.0, 0.3]
    states = [
        {"w": torch.randn(50, generator=generator), "n": torch.tensor(number % 3), "half": torch.randn(9).bfloat16()}
        for number in range(4)
    ]
    running = RunningMean(weights)
    for state in states:
        running.add(state)
    expected = average(states, weights)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in running.result().items())
    assert int(expected["n"]) == 2


def test_what_optimizers_remember_of_a_weight_that_is_one_number_is_averaged():
    """Of the counters of steps the largest counts: it is they that are told by their name, not by their shape."""
    states = [{"scale/step": torch.tensor(n), "scale/exp_avg": torch.tensor(m)} for n, m in ((3.0, -1.0), (5.0, 3.0))]
    mean = mean_of_optimizers([1, 1])
    for state in states:
        mean.add(state)
    assert mean.result() == {"scale/step": torch.tensor(5.0), "scale/exp_avg": torch.tensor(1.0)}


def test_a_running_mean_of_a_name_is_that_of_those_who_hold_it():
    running = RunningMean([1.0, 3.0, 1.0])
    for state in ({"a": torch.tensor(1.0)}, {"a": torch.tensor(1.0), "b": torch.tensor(5.0)}, {"b": torch.tensor(1.0)}):
        running.add(state)
    assert running.result() == {"a": torch.tensor(1.0), "b": torch.tensor(4.0)}


@pytest.mark.parametrize("shape", [(PIECE + 3,), (3, PIECE), (5, 7, 97, 97), (1, 2 * PIECE)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_sum_in_pieces_is_the_sum_of_whole_tensors_to_the_bit(shape, layout):
    if layout is torch.channels_last and len(shape) != 4:
        pytest.skip("only images have this layout")
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=draw).contiguous(memory_format=layout) for _ in range(3)]
    whole = torch.zeros(shape, dtype=torch.float64)
    for tensor, weight in zip(tensors, (1.0, 2.0, 4.0), strict=True):
        whole.add_(tensor, alpha=weight / 7)
    mean = average([{"w": tensor} for tensor in tensors], [1.0, 2.0, 4.0])["w"]
    assert torch.equal(mean, whole.float())
    assert mean.stride() == tensors[0].stride()
