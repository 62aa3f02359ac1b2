"""The project's messages as Flower's records, and back.

All tensors of a message are packed into one safetensors block. It carries every dtype, and parsing it runs no code.
Flower makes one request for each array, so one block means one request instead of a hundred.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

import safetensors.torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fsl_sage.roles.footprint import Footprint
from fsl_sage.roles.protocols import Parts
from fsl_sage.wire.message import Message, Tensors
from fsl_sage.wire.paths import below, flat, grouped

ABOUT, TENSORS, FOUNDATION = "about", "tensors", "foundation"
HELLO, OFFER, FINISH = "hello", "offer", "finish"
"""What a node is asked besides training: its client's number, which weights it is missing, and to end the run."""
SAFETENSORS = "safetensors"
GROUPS = ("held", "mail", "extra", "changes", "mail_changes")
"""The groups of tensors in an assignment."""


@dataclass(frozen=True)
class Assignment:
    """What a client gets for its round."""

    run: str
    round: int
    client: int
    after: int
    """The round whose state the client starts from; -1: it has not taken part yet."""
    keep: int
    """The round of the server's last checkpoint, to which it may return: the client keeps its state after that too."""
    held: Parts
    """The weights that the client holds and does not have yet, by part."""
    mail: Mapping[str, Tensors]
    """Messages that waited for it, by kind."""
    extra: Mapping[str, Tensors] = field(default_factory=dict)
    """What the F-server sends with the weights, by kind."""
    foundation: bytes | None = None
    """The packed `Foundation`, if the client does not have it yet."""
    changes: Mapping[str, Tensors] = field(default_factory=dict)
    """Coded differences from an earlier version that the client has, by kind; sent instead of the weights."""
    mail_changes: Mapping[str, Tensors] = field(default_factory=dict)
    """Coded differences sent instead of messages, by kind."""
    measured: bool = False
    """Whether the client measures what its first step takes."""
    version: str = field(default_factory=lambda: version("fsl-sage"))
    """The server's version of fsl-sage. A node with another one might compute other numbers, and refuses."""

    def content(self) -> RecordDict:
        """The records that Flower carries: plain values, tensors, and the foundation if there is one."""
        about = {
            name: getattr(self, name) for name in ("run", "round", "client", "after", "keep", "measured", "version")
        }
        tensors = {path: x for group in GROUPS for path, x in flat(getattr(self, group), f"{group}/").items()}
        content = RecordDict({ABOUT: ConfigRecord(about), TENSORS: pack(tensors)})
        if self.foundation is not None:
            content[FOUNDATION] = as_record(self.foundation)
        return content

    @classmethod
    def read(cls, records: RecordDict) -> "Assignment":
        """The assignment that `content` wrote. The records are emptied, so that no tensor is in memory twice."""
        tensors = unpack(records.array_records[TENSORS])
        foundation = records.array_records.get(FOUNDATION)
        block = None if foundation is None else foundation["block"].data
        for record in records.array_records.values():
            record.clear()
        groups = {group: grouped(below(f"{group}/", tensors)) for group in GROUPS}
        about = records.config_records[ABOUT]
        round, client, after, keep = (int(about[name]) for name in ("round", "client", "after", "keep"))  # type: ignore[arg-type]
        release, measured = str(about["version"]), bool(about["measured"])
        more = {**groups, "foundation": block, "measured": measured, "version": release}
        return cls(str(about["run"]), round, client, after, keep, **more)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Report:
    """What a client sends back. Nothing else leaves a site."""

    run: str
    round: int
    client: int
    losses: Mapping[str, float]
    parts: Parts
    """The trained weights that are averaged."""
    uploads: Sequence[Message]
    """The smashed batches with their labels; the value `step` is the number of the local step."""
    extra: Mapping[str, Tensors] = field(default_factory=dict)
    """What the algorithm sends with the weights, by kind."""
    footprint: Footprint | None = None
    """Memory and operations of its first step, if the server asked for them."""

    def content(self) -> RecordDict:
        """The records that Flower carries: plain values and tensors."""
        about: dict[str, Any] = {"run": self.run, "round": self.round, "client": self.client}
        losses = {f"loss/{name}": value for name, value in self.losses.items()}
        step = {} if self.footprint is None else {f"step/{n}": value for n, value in asdict(self.footprint).items()}
        return RecordDict({ABOUT: ConfigRecord({**about, **losses, **step}), TENSORS: pack(self.tensors())})

    def tensors(self) -> Tensors:
        """All tensors as one dict: `weights/PART/NAME`, `extra/KIND/NAME` and `upload/STEP/KIND/NAME`."""
        tensors = flat(self.parts, "weights/") | flat(self.extra, "extra/")
        for upload in self.uploads:
            tensors |= flat(upload.parts, f"upload/{upload.values['step']}/")
        return tensors

    @classmethod
    def of_tensors(
        cls,
        run: str,
        round: int,
        client: int,
        losses: Mapping[str, float],
        tensors: Tensors,
        footprint: Footprint | None = None,
    ) -> "Report":
        """A report from its plain values and from `tensors`, the dict that `Report.tensors` returns."""
        steps = grouped(below("upload/", tensors))
        uploads = [Message(grouped(own), {"step": int(step)}) for step, own in steps.items()]
        parts, extra = (grouped(below(f"{group}/", tensors)) for group in ("weights", "extra"))
        return cls(run, round, client, losses, parts, uploads, extra, footprint)


def pack(tensors: Tensors) -> ArrayRecord:
    """Named tensors as one safetensors block."""
    return as_record(
        safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    )


def as_record(block: bytes) -> ArrayRecord:
    """A safetensors block as a record with one array."""
    return ArrayRecord({"block": Array("uint8", (len(block),), SAFETENSORS, block)})


def unpack(record: ArrayRecord) -> Tensors:
    """The named tensors that `pack` wrote. Raises a ValueError for anything else."""
    block = record.get("block")
    if len(record) != 1 or block is None or block.stype != SAFETENSORS:
        raise ValueError("its tensors are not one safetensors block")
    try:
        return safetensors.torch.load(block.data)
    except Exception as error:  # the parser reports damage by several unrelated types
        raise ValueError(f"its safetensors block is damaged ({type(error).__name__})") from None
