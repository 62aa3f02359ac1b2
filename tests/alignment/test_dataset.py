import torch
from hypothesis import given
from hypothesis import strategies as st

from fsl_sage.alignment.dataset import AlignmentData, batches
from fsl_sage.wire.message import Smashed


def smashed(start, size):
    numbers = torch.arange(start, start + size)
    return Smashed((numbers.float()[:, None],), {"labels": numbers})


def held(data):
    return [int(label) for upload in data for label in upload.target["labels"]]


@given(st.lists(st.integers(2, 9), min_size=1, max_size=12), st.integers(2, 20))
def test_keeps_the_newest_samples_and_no_more(sizes, capacity):
    data, start = AlignmentData(capacity), 0
    for size in sizes:
        data.add(smashed(start, size))
        start += size
    numbers = held(data)
    assert numbers == list(range(start - len(numbers), start))
    # A single sample of the oldest batch is not kept on its own: BatchNorm needs two.
    assert min(start, capacity) - 1 <= len(data) <= capacity
    assert all(len(upload) >= 2 for upload in data)
    assert all(torch.equal(upload.z[0][:, 0].long(), upload.target["labels"]) for upload in data)


def test_keeps_batch_boundaries():
    data = AlignmentData(10)
    for start in (0, 4, 8):
        data.add(smashed(start, 4))
    assert [len(upload) for upload in data] == [2, 4, 4]
    assert held(data)[-4:] == list(data.newest().target["labels"])


def test_state_goes_through_a_checkpoint():
    data, again = AlignmentData(100), AlignmentData(100)
    for start in range(0, 44, 4):  # more than ten uploads: their order must not be that of their names
        data.add(smashed(start, 4))
    again.load_state(data.state())
    assert held(again) == held(data)


def test_batches_cut_anew():
    data = AlignmentData(100)
    for start in (0, 4, 8):
        data.add(smashed(start, 4))
    assert [len(batch) for batch in batches(list(data), 0)] == [4, 4, 4]
    assert [len(batch) for batch in batches(list(data), 5)] == [5, 5, 2]
    assert [len(batch) for batch in batches(list(data), 11)] == [12]
