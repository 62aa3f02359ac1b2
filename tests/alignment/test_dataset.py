import torch
from hypothesis import given
from hypothesis import strategies as st

from fsl_sage.alignment.dataset import AlignmentData, batches, make_room
from fsl_sage.wire.message import Smashed
from tests.oracles.alignment import Samples, keep_newest_of_all


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


def texts(start, count, length):
    """Texts with numbers from `start` on, each of as many tokens."""
    numbers = torch.arange(start, start + count)
    return Smashed((numbers.float()[:, None, None].expand(-1, length, 1),), {"labels": numbers})


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(2, 6), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(1, 90),
)
def test_texts_of_all_clients_share_their_room(uploads, tokens):
    """The oldest texts go first, whosever they are; two of the newest upload stay in any case."""
    datasets, sizes, start = {}, {}, 0
    for age, (client, count, length) in enumerate(uploads):
        data = datasets.setdefault(client, AlignmentData(2**62))
        data.add(texts(start, count, length))
        data.number(age)
        sizes |= dict.fromkeys(range(start, start + count), length)
        start += count
        make_room(datasets, tokens)
    kept = sorted(number for data in datasets.values() for number in held(data))
    assert kept == list(range(start - len(kept), start))  # the newest, without a gap
    assert all(len(upload) >= 2 for data in datasets.values() for upload in data)
    assert sum(sizes[number] for number in kept) <= tokens or len(kept) == 2
    more = kept[0] - 1  # one text more would not have fitted, unless it were alone
    if more >= 0 and more - 1 >= 0:
        assert sum(sizes[number] for number in [more - 1, more, *kept]) > tokens


def test_the_order_of_uploads_goes_through_a_checkpoint():
    datasets = {0: AlignmentData(2**62), 1: AlignmentData(2**62)}
    for age in range(24):
        datasets[age % 2].add(texts(3 * age, 3, 2))
        datasets[age % 2].number(age)
    again = {client: AlignmentData(2**62) for client in datasets}
    for client, data in datasets.items():
        again[client].load_state(data.state())
    for each in (datasets, again):
        make_room(each, 50)
    assert [held(data) for data in again.values()] == [held(data) for data in datasets.values()]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(2, 6)), min_size=1, max_size=20),
    st.integers(2, 9),
    st.integers(4, 30),
)
def test_samples_of_all_clients_share_their_room_besides_their_own(uploads, capacity, total):
    """As the naive rule has it: of each client the newest, then of all together the newest in the order they came."""
    datasets, naive, start = {}, [], 0
    for age, (client, count) in enumerate(uploads):
        data = datasets.setdefault(client, AlignmentData(capacity))
        data.add(texts(start, count, 1))
        data.number(age)
        make_room(datasets, total, len)
        arrived = Samples(torch.arange(start, start + count), {})
        naive = keep_newest_of_all([*naive, (client, arrived)], capacity, total)
        start += count
    expected = {client: [] for client, _ in naive}
    for client, own in naive:
        expected[client] += own.z.tolist()
    assert {client: held(data) for client, data in datasets.items()} == expected


def test_what_is_dropped_is_freed():
    data = AlignmentData(24)
    data.add(Smashed((torch.zeros(256, 8),), {"labels": torch.zeros(256)}))
    held = sum(x.untyped_storage().nbytes() for upload in data for x in (*upload.z, *upload.target.values()))
    assert held == 24 * (8 + 1) * 4
    whole = torch.zeros(8, 8)
    data.add(Smashed((whole,), {"labels": torch.zeros(8)}))
    assert data.newest().z[0].data_ptr() == whole.data_ptr()  # what is kept whole is not copied
