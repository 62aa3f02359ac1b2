"""The project's messages as Flower's records, and back.

All tensors of a message are one safetensors block: it carries every dtype, it is parsed without running anything, and
Flower, which moves every array by a request of its own, has one to move instead of a hundred.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import safetensors.torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fsl_sage.roles.work import Parts
from fsl_sage.wire.message import Message, Tensors

ABOUT, TENSORS = "about", "tensors"
SAFETENSORS = "safetensors"


@dataclass(frozen=True)
class Assignment:
    """What a client gets for its round."""

    run: str
    round: int
    client: int
    after: int
    """The round whose state the client starts from; -1: it has not taken part yet."""
    keep: int
    """The oldest round whose state the server may still come back to."""
    held: Parts
    """The weights of the parts that the client holds and has not got yet."""
    mail: Mapping[str, Tensors]
    """Messages that waited for it, by kind."""
    version: str = field(default_factory=lambda: version("fsl-sage"))
    """Of the server: another one at the node might compute other numbers."""

    def records(self) -> RecordDict:
        """As Flower carries it."""
        about = {name: getattr(self, name) for name in ("run", "round", "client", "after", "keep", "version")}
        tensors = _flat("held", self.held) | _flat("mail", self.mail)
        return RecordDict({ABOUT: ConfigRecord(about), TENSORS: pack(tensors)})

    @classmethod
    def read(cls, records: RecordDict) -> "Assignment":
        """What `records` wrote."""
        groups: dict[str, dict[str, Tensors]] = {"held": {}, "mail": {}}
        for path, tensor in unpack(records.array_records[TENSORS]).items():
            group, key, name = path.split("/", 2)
            groups[group].setdefault(key, {})[name] = tensor
        about = records.config_records[ABOUT]
        round, client, after, keep = (int(about[name]) for name in ("round", "client", "after", "keep"))  # type: ignore[arg-type]
        release = str(about["version"])
        return cls(str(about["run"]), round, client, after, keep, groups["held"], groups["mail"], release)


@dataclass(frozen=True)
class Report:
    """What a client sends back: all that leaves a site."""

    run: str
    round: int
    client: int
    losses: Mapping[str, float]
    parts: Parts
    """The trained weights that are averaged."""
    uploads: Sequence[Message]
    """The smashed batches with their labels; the value `step` says of which local step."""

    def records(self) -> RecordDict:
        """As Flower carries it."""
        about: dict[str, Any] = {"run": self.run, "round": self.round, "client": self.client}
        losses = {f"loss/{name}": value for name, value in self.losses.items()}
        return RecordDict({ABOUT: ConfigRecord({**about, **losses}), TENSORS: pack(self.tensors())})

    def tensors(self) -> Tensors:
        """Weights and uploads as one dict: `weights/PART/NAME` and `upload/STEP/KIND/NAME`."""
        tensors = _flat("weights", self.parts)
        for upload in self.uploads:
            tensors |= _flat(f"upload/{upload.values['step']}", upload.parts)
        return tensors


def parts_and_uploads(tensors: Tensors) -> tuple[dict[str, Tensors], list[Message]]:
    """What `Report.tensors` put together."""
    parts: dict[str, Tensors] = {}
    uploads: dict[int, dict[str, Tensors]] = {}
    for path, tensor in tensors.items():
        group, key, rest = path.split("/", 2)
        if group == "weights":
            parts.setdefault(key, {})[rest] = tensor
        else:
            kind, name = rest.split("/", 1)
            uploads.setdefault(int(key), {}).setdefault(kind, {})[name] = tensor
    return parts, [Message(kinds, {"step": step}) for step, kinds in uploads.items()]


def pack(tensors: Tensors) -> ArrayRecord:
    """Named tensors as one array of bytes."""
    block = safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    return ArrayRecord({"block": Array("uint8", (len(block),), SAFETENSORS, block)})


def unpack(record: ArrayRecord) -> Tensors:
    """What `pack` wrote; anything else is a ValueError."""
    block = record.get("block")
    if len(record) != 1 or block is None or block.stype != SAFETENSORS:
        raise ValueError("its tensors are not one safetensors block")
    try:
        return safetensors.torch.load(block.data)
    except Exception as error:  # the parser reports damage by several unrelated types
        raise ValueError(f"its safetensors block is damaged ({type(error).__name__})") from None


def _flat(prefix: str, groups: Mapping[str, Mapping[str, Tensor]]) -> Tensors:
    return {f"{prefix}/{key}/{name}": x for key, named in groups.items() for name, x in named.items()}
