"""Where uploads wait for their turn at the S-server: the order, repeats, and what waits on disk."""

import threading

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsl_sage.engines.intake import Intake
from fsl_sage.wire.message import Message, Smashed


def upload(client, step, size=4):
    z = torch.full((2, size), client + step / 100)
    return Message(Smashed((z,), {"labels": torch.tensor([client, step])}).parts, {"step": step})


def keys(groups):
    """[(client, step)] of each group, read from the uploads themselves."""
    return [[tuple(up.target["labels"].tolist()) for up in group.values()] for group in groups]


def expected(order, steps):
    if order == "blocked":
        return [[(client, step)] for client in sorted(steps) for step in steps[client]]
    every = sorted({step for mine in steps.values() for step in mine})
    return [[(client, step) for client in sorted(steps) if step in steps[client]] for step in every]


@st.composite
def rounds(draw):
    """Each client's steps, and an order of arrival that keeps the order of each client's own."""
    steps = draw(st.dictionaries(st.integers(0, 4), st.lists(st.integers(0, 9), unique=True).map(sorted), min_size=1))
    events = [client for client, mine in steps.items() for _ in range(len(mine) + 1)]  # one more: it closes
    return steps, draw(st.permutations(events))


@given(rounds(), st.sampled_from(["interleaved", "blocked"]), st.sampled_from([0, 100, 10**6]))
@settings(max_examples=60, deadline=None)
def test_the_order_does_not_depend_on_arrival(made, order, limit):
    steps, arrivals = made
    intake = Intake(order, sorted(steps), limit)
    taken = []
    thread = threading.Thread(target=lambda: taken.extend(intake))
    thread.start()
    left = {client: list(mine) for client, mine in steps.items()}
    for client in arrivals:
        if left[client]:
            intake.put(client, upload(client, left[client].pop(0)))
        else:
            intake.close(client)
    thread.join(timeout=20)
    assert not thread.is_alive()
    assert keys(taken) == expected(order, steps)


@given(rounds(), st.sampled_from(["interleaved", "blocked"]))
@settings(max_examples=60, deadline=None)
def test_what_is_ready_is_taken_at_any_time_in_the_same_order(made, order):
    steps, arrivals = made
    intake = Intake(order, sorted(steps))
    taken = []
    left = {client: list(mine) for client, mine in steps.items()}
    for client in arrivals:
        if left[client]:
            intake.put(client, upload(client, left[client].pop(0)))
        else:
            intake.close(client)
        taken += intake.ready()
    assert keys(taken) == expected(order, steps)


def test_an_upload_is_held_until_nothing_can_come_before_it():
    intake = Intake("interleaved", [0, 1], 10**6)
    taken = iter(intake)
    intake.put(0, upload(0, 0))
    intake.put(0, upload(0, 5))
    assert intake._turn() is None  # client 1 may still send its step 0
    intake.put(1, upload(1, 3))
    assert keys([next(taken)]) == [[(0, 0)]]
    assert keys([next(taken)]) == [[(1, 3)]]
    assert intake._turn() is None  # client 1 may still send steps 4 and 5
    intake.close(1)
    assert keys([next(taken)]) == [[(0, 5)]]
    assert intake._turn() is None
    intake.close(0)
    assert next(taken, "over") == "over"


def test_as_they_come():
    intake = Intake("arrival", [0, 1], 10**6)
    for client, step in ((1, 0), (1, 5), (0, 0), (1, 9), (0, 5)):
        intake.put(client, upload(client, step))
    intake.close(0), intake.close(1)
    assert keys(intake) == [[(1, 0)], [(1, 5)], [(0, 0)], [(1, 9)], [(0, 5)]]


def test_repeats_are_dropped_even_after_they_were_taken():
    intake = Intake("interleaved", [0, 1], 10**6)
    taken = iter(intake)
    for _ in range(2):  # client 0 is run again after it has sent two uploads
        intake.put(0, upload(0, 0))
        intake.put(0, upload(0, 5))
    intake.put(1, upload(1, 0))
    assert keys([next(taken)]) == [[(0, 0), (1, 0)]]
    intake.put(0, upload(0, 0))  # and once more
    intake.put(7, upload(7, 0))  # of nobody's round
    intake.close(0), intake.close(0), intake.close(7), intake.close(1)
    assert keys(taken) == [[(0, 5)]]
    assert intake.dropped == 4


def test_what_is_above_the_limit_waits_on_disk_and_comes_back_the_same():
    z = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).to(torch.bfloat16)
    first = Message(Smashed((z, torch.arange(3)), {"labels": torch.ones(2, dtype=torch.bool)}).parts, {"step": 0})
    size = sum(first.sizes().values())
    for limit, on_disk in ((size, False), (size - 1, True)):
        intake = Intake("interleaved", [0], limit)
        intake.put(0, first)
        assert isinstance(intake._held[0, 0], int) == on_disk
        intake.close(0)
        ((back,),) = (group.values() for group in intake)
        assert (back is first) == (not on_disk)
        assert back.values == {"step": 0}
        for kind, tensors in first.parts.items():
            for name, tensor in tensors.items():
                other = back.parts[kind][name]
                assert torch.equal(other, tensor)
                assert other.dtype == tensor.dtype
                assert other.stride() == tensor.stride()
        assert intake._spill._file is None
        assert intake._in_memory == 0
