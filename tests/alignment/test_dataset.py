import torch
from hypothesis import given
from hypothesis import strategies as st

from fsl_sage.alignment.dataset import AlignmentData, SharedRoom, batches, tokens_in
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
    room = SharedRoom(datasets, tokens)
    for age, (client, count, length) in enumerate(uploads):
        datasets.setdefault(client, AlignmentData(2**62))
        room.add(client, texts(start, count, length), age)
        sizes |= dict.fromkeys(range(start, start + count), length)
        start += count
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
        SharedRoom(each, 50).add(0, texts(72, 3, 2), 24)
    assert [held(data) for data in again.values()] == [held(data) for data in datasets.values()]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(2, 6)), min_size=1, max_size=20),
    st.integers(2, 9),
    st.integers(4, 30),
)
def test_samples_of_all_clients_share_their_room_besides_their_own(uploads, capacity, total):
    """As the naive rule has it: of each client the newest, then of all together the newest in the order they came."""
    datasets, naive, start = {}, [], 0
    room = SharedRoom(datasets, total, len)
    for age, (client, count) in enumerate(uploads):
        datasets.setdefault(client, AlignmentData(capacity))
        room.add(client, texts(start, count, 1), age)
        arrived = Samples(torch.arange(start, start + count), {})
        naive = keep_newest_of_all([*naive, (client, arrived)], capacity, total)
        start += count
    expected = {client: [] for client, _ in naive}
    for client, own in naive:
        expected[client] += own.z.tolist()
    assert {client: held(data) for client, data in datasets.items()} == expected


def make_room(datasets, limit, measure):
    """The rule as a loop that adds up and searches everything for each sample that goes: the oracle."""
    excess = sum(data.size(measure) for data in datasets.values()) - limit
    while excess > 0:
        client = min(datasets, key=lambda client: datasets[client].numbers[0])
        data = datasets[client]
        before = data.size(measure)
        if len(datasets) == 1 and data.is_single:
            spare = before - 2 * measure(data.newest().last(1))
            if spare > 0:
                data.drop_oldest(min(excess, spare), measure)
            return
        data.drop_oldest(excess, measure)
        excess -= before - data.size(measure)
        if not len(data):
            del datasets[client]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(2, 6), st.integers(1, 4)), min_size=1, max_size=60),
    st.integers(2, 12),
    st.integers(1, 60),
    st.sampled_from([len, tokens_in]),
    st.integers(0, 60),
)
def test_the_shared_room_keeps_what_the_naive_loop_keeps(uploads, capacity, limit, measure, resumed):
    """After each upload, also when everything went through a checkpoint once."""
    mine, naive = {}, {}
    room = SharedRoom(mine, limit, measure)
    for number, (client, count, length) in enumerate(uploads):
        if number == resumed:
            states = {id: data.state() for id, data in mine.items()}
            mine = {id: AlignmentData(capacity) for id in states}
            for id, state in states.items():
                mine[id].load_state(state)
            room = SharedRoom(mine, limit, measure)
        mine.setdefault(client, AlignmentData(capacity))
        room.add(client, texts(number * 10, count, length), number)
        data = naive.setdefault(client, AlignmentData(capacity))
        data.add(texts(number * 10, count, length))
        data.number(number)
        make_room(naive, limit, measure)
        assert {id: held(data) for id, data in mine.items()} == {id: held(data) for id, data in naive.items()}
        assert {id: list(data.numbers) for id, data in mine.items()} == {
            id: list(data.numbers) for id, data in naive.items()
        }


def test_an_upload_takes_the_same_however_many_clients_there_are(monkeypatch):
    """Each is measured once when it comes and once when it goes, whoever else has uploads."""
    counts, size = [], AlignmentData.size
    monkeypatch.setattr(AlignmentData, "size", lambda data, measure: counts.append(1) or size(data, measure))
    for clients in (10, 200):
        datasets, counts[:] = {}, []
        room = SharedRoom(datasets, 4 * clients, len)
        for number in range(3 * clients):
            datasets.setdefault(number % clients, AlignmentData(8))
            room.add(number % clients, smashed(number, 4), number)
        assert sum(map(len, datasets.values())) == 4 * clients
        assert len(counts) <= 4 * 3 * clients


def test_numbers_of_uploads_that_are_gone_do_not_pile_up():
    datasets = {0: AlignmentData(8), 1: AlignmentData(8)}
    room = SharedRoom(datasets, 1000, len)
    room.add(0, smashed(0, 4), 0)  # it stays, and is the oldest
    for number in range(1, 2000):
        room.add(1, smashed(number, 4), number)
    assert len(room._order) < 100


def test_what_is_dropped_is_freed():
    data = AlignmentData(24)
    data.add(Smashed((torch.zeros(256, 8),), {"labels": torch.zeros(256)}))
    held = sum(x.untyped_storage().nbytes() for upload in data for x in (*upload.z, *upload.target.values()))
    assert held == 24 * (8 + 1) * 4
    whole = torch.zeros(8, 8)
    data.add(Smashed((whole,), {"labels": torch.zeros(8)}))
    assert data.newest().z[0].data_ptr() == whole.data_ptr()  # what is kept whole is not copied
