"""The ledger: every byte that crosses, by round, client, direction and kind."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from fsl_sage.wire.message import FIRST_DOWNLOAD, LABELS

Direction = Literal["up", "down"]
GIB = 2**30

# The paper counts activations, cut gradients and model transfers (buffers included), but neither labels nor the first
# broadcast.
NOT_IN_PAPER = frozenset({LABELS, FIRST_DOWNLOAD})

BEFORE = -1
"""The "round" of the first download, which precedes round 0."""


class Entry(NamedTuple):
    """One line of the ledger."""

    round: int
    client: int
    direction: Direction
    kind: str
    bytes: int


class Ledger:
    """Adds up what is billed; one entry for each (round, client, direction, kind)."""

    def __init__(self, frozen: Mapping[str, int] | None = None) -> None:
        self._rounds: dict[int, Counter[tuple[int, Direction, str]]] = {}
        self._frozen = frozen or {}
        """By kind, the bytes of frozen weights that do not travel with a model of that kind."""
        self.total = 0
        self.paper = 0
        self.whole_models = 0
        """As `paper`, but counts every model that travels as if it were sent with its frozen weights."""

    def bill(self, round: int, client: int, direction: Direction, kind: str, amount: int) -> None:
        """Book `amount` bytes that were sent."""
        if amount:
            self._rounds.setdefault(round, Counter())[client, direction, kind] += amount
            self.total += amount
            self.paper += amount * (kind not in NOT_IN_PAPER)
            self.whole_models += (amount + self._frozen.get(kind, 0)) * (kind not in NOT_IN_PAPER)

    def load(self, entries: Iterable[Entry]) -> None:
        """Book entries that were read from a file."""
        for entry in entries:
            self.bill(*entry)

    def restore(self, entries: Iterable[Entry], whole_models: int) -> None:
        """Restore a run's entries, and the sum that does not follow from them."""
        self.load(entries)
        self.whole_models = whole_models

    def entries(self, round: int) -> list[Entry]:
        """A round's entries, in order of client, direction and kind."""
        return [Entry(round, *key, amount) for key, amount in sorted(self._rounds.get(round, Counter()).items())]

    def written_in(self, round: int) -> list[Entry]:
        """The entries that a round adds. Those of the first download belong to round 0."""
        return (self.entries(BEFORE) if round == 0 else []) + self.entries(round)

    def by_kind(self, round: int) -> dict[str, dict[str, int]]:
        """A round's bytes by kind and direction."""
        table: dict[str, dict[str, int]] = {}
        for entry in self.entries(round):
            table.setdefault(entry.kind, {"up": 0, "down": 0})[entry.direction] += entry.bytes
        return table


def totals(by_kind: dict[str, dict[str, int]]) -> tuple[int, int]:
    """(everything, the paper's convention) of a table by kind."""
    sums = {kind: sum(directions.values()) for kind, directions in by_kind.items()}
    return sum(sums.values()), sum(amount for kind, amount in sums.items() if kind not in NOT_IN_PAPER)
