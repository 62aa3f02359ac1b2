"""The alignment dataset of a client: its newest uploads, bounded."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fsl_sage.wire.message import Message, Tensors


class Upload(NamedTuple):
    """One uploaded batch: smashed data, [B, *cut] each, and target."""

    z: tuple[Tensor, ...]
    target: Tensors

    def __len__(self) -> int:
        return len(self.z[0])

    def last(self, count: int) -> "Upload":
        """The last `count` samples; a copy of them if they are not all, so that the others can be freed."""
        if count >= len(self):
            return self
        return Upload(
            tuple(x[-count:].clone() for x in self.z), {name: x[-count:].clone() for name, x in self.target.items()}
        )


def tokens_in(upload: Upload) -> int:
    """The positions of uploaded texts, padding included."""
    return math.prod(upload.z[0].shape[:2])


Measure = Callable[[Upload], int]
"""How much an upload takes of a room: its tokens, or `len`, its samples. Each sample takes the same."""


class AlignmentData:
    """The newest uploads with their batch boundaries, at most `capacity` samples; older ones are forgotten.

    Uploads are held as they came, without a copy unless some of their samples go: what is dropped is freed.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._uploads: deque[Upload] = deque()
        self._ages: deque[int] = deque()
        """The numbers of the uploads among those of all clients, where these share their room."""

    def __len__(self) -> int:
        return sum(len(upload) for upload in self._uploads)

    def __iter__(self) -> Iterator[Upload]:
        return iter(self._uploads)

    def add(self, smashed: Message) -> None:
        """Keep an upload; the oldest samples make room for it."""
        self._uploads.append(Upload(smashed.smashed, dict(smashed.target)).last(self.capacity))
        excess = len(self) - self.capacity
        while excess > 0:
            oldest = self._uploads.popleft()
            left = len(oldest) - excess
            if left >= 2:  # BatchNorm needs two
                self._uploads.appendleft(oldest.last(left))
            elif self._ages:
                self._ages.popleft()
            excess -= len(oldest)

    def number(self, age: int) -> None:
        """Say which of all clients' uploads the newest one is."""
        self._ages.append(age)

    def size(self, measure: Measure) -> int:
        """Of all uploads that are kept."""
        return sum(map(measure, self._uploads))

    @property
    def is_single(self) -> bool:
        """Whether one upload is all that is kept."""
        return len(self._uploads) == 1

    @property
    def numbers(self) -> Sequence[int]:
        """Of the uploads that are kept, from the oldest to the newest."""
        return self._ages

    def drop_oldest(self, amount: int, measure: Measure) -> None:
        """Free at least this amount, as far as the oldest upload has it, from its front."""
        oldest = self._uploads.popleft()
        left = len(oldest) - -(-amount // measure(oldest.last(1)))
        if left >= 2:  # BatchNorm needs two
            self._uploads.appendleft(oldest.last(left))
        else:
            self._ages.popleft()

    def newest(self) -> Upload:
        """The last upload."""
        return self._uploads[-1]

    def state(self) -> Tensors:
        """A flat dict for a checkpoint."""
        state: Tensors = {}
        for index, upload in enumerate(self._uploads):
            state |= {f"{index}/z/{number}": tensor for number, tensor in enumerate(upload.z)}
            state |= {f"{index}/target/{name}": tensor for name, tensor in upload.target.items()}
        return state | {f"{index}/age/0": torch.tensor(age) for index, age in enumerate(self._ages)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        found: dict[int, tuple[dict[int, Tensor], Tensors]] = {}
        self._ages = deque()
        for path, tensor in sorted(state.items(), key=lambda item: int(item[0].partition("/")[0])):
            index, kind, name = path.split("/", 2)
            if kind == "age":
                self._ages.append(int(tensor))
                continue
            z, target = found.setdefault(int(index), ({}, {}))
            if kind == "z":
                z[int(name)] = tensor
            else:
                target[name] = tensor
        self._uploads = deque(
            Upload(tuple(z[number] for number in sorted(z)), target) for _, (z, target) in sorted(found.items())
        )


class SharedRoom:
    """A room for the datasets of all clients together: the oldest samples make room, whosever they are.

    It knows the sum and the order of all uploads, so an upload takes the same time however many clients there are.
    """

    def __init__(self, datasets: dict[int, AlignmentData], limit: int, measure: Measure = tokens_in) -> None:
        """Make the room.

        Args:
            datasets: By client; from now on nobody else adds to them. A client of whom nothing is left is removed.
            limit: What they may take together: tokens, or samples by `len`.
            measure: How much an upload takes.
        """
        self._datasets = datasets
        self._limit = limit
        self._measure = measure
        self._taken = sum(data.size(measure) for data in datasets.values())
        self._order: deque[tuple[int, int]] = deque()
        """(number, client) of all uploads from the oldest to the newest, and of some that are gone."""
        self._renew_order()

    def add(self, client: int, smashed: Message, number: int) -> None:
        """Keep the upload of a client that has a dataset; it is the one of this number among those of all clients.

        The oldest samples go until the rest fits. Two samples of the newest upload stay in any case.
        """
        data = self._datasets[client]
        self._taken -= data.size(self._measure)
        data.add(smashed)
        data.number(number)
        self._taken += data.size(self._measure)
        self._order.append((number, client))
        while self._taken > self._limit and self._drop():
            pass
        if len(self._order) > self._longest:
            self._renew_order()

    def _drop(self) -> bool:
        """Let samples of the oldest upload go; returns whether more can go."""
        client = self._with_oldest()
        data = self._datasets[client]
        before, excess = data.size(self._measure), self._taken - self._limit
        is_last = len(self._datasets) == 1 and data.is_single
        if is_last:
            excess = min(excess, before - 2 * self._measure(data.newest().last(1)))
        if excess > 0:
            data.drop_oldest(excess, self._measure)
        self._taken += data.size(self._measure) - before
        if not len(data):
            del self._datasets[client]
        return not is_last

    def _with_oldest(self) -> int:
        """The client with the oldest upload that is still there."""
        while True:
            number, client = self._order[0]
            if client in self._datasets and self._datasets[client].numbers[0] == number:
                return client
            self._order.popleft()

    def _renew_order(self) -> None:
        """Forget the numbers of uploads that are gone. It is done when they may be as many as the others."""
        self._order = deque(
            sorted((number, client) for client, data in self._datasets.items() for number in data.numbers)
        )
        self._longest = 2 * len(self._order) + 64


def batches(uploads: Sequence[Upload], size: int) -> list[Upload]:
    """The uploads put together and cut anew into batches of `size` samples; as they came if that is 0."""
    if not size or not uploads:
        return list(uploads)
    whole = together(uploads)
    starts = list(range(0, len(whole), size))
    if len(starts) > 1 and len(whole) - starts[-1] == 1:
        starts.pop()  # a single left-over sample joins the batch before it
    ends = [*starts[1:], len(whole)]
    return [
        Upload(tuple(x[a:b] for x in whole.z), {name: x[a:b] for name, x in whole.target.items()})
        for a, b in zip(starts, ends, strict=True)
    ]


def together(uploads: Sequence[Upload]) -> Upload:
    """One behind the other, as one batch."""
    return Upload(
        tuple(_joined(tensors) for tensors in zip(*(upload.z for upload in uploads), strict=True)),
        {name: _joined([upload.target[name] for upload in uploads]) for name in uploads[0].target},
    )


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """One behind the other; where they differ in a further dimension (shorter texts), with zeros at the end of it."""
    sizes = [max(dimension) for dimension in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    return torch.cat([_padded(tensor, sizes) for tensor in tensors])


def _padded(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    missing = [size - own for size, own in zip(sizes, tensor.shape[1:], strict=True)]
    if not any(missing):
        return tensor
    return pad(tensor, [amount for size in reversed(missing) for amount in (0, size)])
