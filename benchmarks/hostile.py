"""Replies that no honest client sends, and what becomes of each: python -m benchmarks.hostile

A real client of a small run trains one round. Its report is spoilt in every way that is listed here, one at a time, and
shown to the inspector that stands before the model. A verdict is `refused`, with the reason, or `cannot be told`: such
a reply is well-formed, and nothing but the data could tell that it is wrong. Anything else is a fault, and exit code 1.
"""

import copy
import json
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import zstandard
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fsl_sage.config import AlignmentConfig, CodecConfig, Config, DataConfig, ModelConfig
from fsl_sage.deploy.app import agree, write_sites
from fsl_sage.deploy.site import Place, Site
from fsl_sage.engines.dry import DryEngine
from fsl_sage.engines.flower.contents import ABOUT, TENSORS, Assignment, pack, unpack
from fsl_sage.engines.flower.foundation import Foundation
from fsl_sage.engines.flower.inspection import Inspector, RejectedError
from fsl_sage.experiment.setup import make_dry_setup, make_setup
from fsl_sage.problems.images.problem import image_shapes

CONFIG = Config(
    algorithm="fsl-sage",
    clients=3,
    rounds=2,
    batch_size=16,
    options={"upload_every": 2, "align_every": 1},
    device="cpu",
    data=DataConfig(name="cifar10-mini", train_images=150, test_images=100),
    model=ModelConfig(name="small-cnn"),
    alignment=AlignmentConfig(samples=48, steps=4),
)
CODED = replace(CONFIG, codec=CodecConfig(activations="cached-int4", labels="smallest", update="topk:0.1+zstd"))
"""What it sends is coded, and the client is asked what its first step took."""
RUN, CLIENT = "a" * 32, 2
REFUSED, UNKNOWABLE = "refused", "cannot be told"

Spoil = Callable[[RecordDict], None]


@dataclass(frozen=True)
class Kind:
    """One way to spoil a reply."""

    name: str
    spoil: Spoil
    expected: str = REFUSED


def honest(directory: Path, config: Config) -> tuple[Inspector, RecordDict]:
    """The inspector of a run, and the reply of one of its clients as it should be."""
    agreement, shares = agree(config, None)
    sites = write_sites(directory / "sites", shares, agreement)
    site = Site(config, agreement, Place(CLIENT, sites[CLIENT], directory / "state"))
    setup = make_setup(config)
    held = {part: setup.initial[part] for part in setup.algorithm.holds}
    foundation = Foundation.of(setup)[0].pack()
    report = site.train(Assignment(RUN, 0, CLIENT, -1, -1, held, {}, foundation=foundation, measured=config is CODED))
    shapes = image_shapes(agreement.sizes(sum(agreement.examples)))
    dry = DryEngine(make_dry_setup(config, shapes, agreement.examples))
    return Inspector(RUN, dry, torch.device("cpu")), report.content()


def verdict(inspector: Inspector, content: RecordDict, *, measured: bool = False) -> tuple[str, str]:
    """What the inspector says of a reply, and why; `measured` if the client was asked what its first step took."""
    try:
        inspector.inspect(content, 0, CLIENT, measured=measured)
    except RejectedError as error:
        return REFUSED, str(error)
    except BaseException as error:
        return f"FAULT: {type(error).__name__}", str(error)
    return UNKNOWABLE, ""


def kinds(content: RecordDict) -> list[Kind]:
    """Those for a run whose honest reply is `content`, and nothing in it is coded."""
    paths = _paths(sorted(unpack(content[TENSORS])))
    return [*_tensors(paths), *_labels(), *_abouts(), *_records(), *_blocks(content), *_lies()]


# Single tensors


def _paths(all: list[str]) -> dict[str, str]:
    """One tensor of each sort."""
    endings = {
        "a weight": "weights/client/",
        "a bias": ".bias",
        "a running mean": ".running_mean",
        "a running variance": ".running_var",
        "a counter": ".num_batches_tracked",
        "activations": "/activations/",
        "labels": "/labels/",
    }
    return {sort: next(path for path in all if ending in path) for sort, ending in endings.items()}


def _tensors(paths: dict[str, str]) -> Iterator[Kind]:
    for sort, path in paths.items():
        for what, change in _CHANGES.items():
            yield Kind(f"{sort}: {what}", _changed(path, change))
        if sort not in ("a counter", "labels"):
            for what, change in _NUMBERS.items():
                yield Kind(f"{sort}: {what}", _changed(path, change))
    yield Kind("a running variance: negative", _changed(paths["a running variance"], lambda x: -x - 1))
    yield Kind("a running variance: one negative", _changed(paths["a running variance"], lambda x: _one(x, -1e-9)))
    yield Kind("a counter: below 0", _changed(paths["a counter"], lambda x: torch.full_like(x, -1)))
    yield Kind("a counter: the largest there is", _changed(paths["a counter"], lambda x: torch.full_like(x, 2**63 - 1)))


def _one(x: Tensor, value: float) -> Tensor:
    """The tensor with another last element."""
    flat = x.flatten().clone()
    flat[-1] = value
    return flat.reshape(x.shape)


_CHANGES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "missing": lambda x: None,
    "empty": lambda x: x.flatten()[:0].clone(),
    "one dimension more": lambda x: x[None].clone(),
    "twice as many": lambda x: torch.cat([x.flatten()] * 2),
    "double": lambda x: x.double(),
    "half": lambda x: x.half(),
    "bytes": lambda x: x.to(torch.uint8),
    "yes or no": lambda x: x.bool(),
}
_NUMBERS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "one not a number": lambda x: _one(x, float("nan")),
    "all not a number": lambda x: torch.full_like(x, float("nan")),
    "one infinite": lambda x: _one(x, float("inf")),
    "one minus infinite": lambda x: _one(x, float("-inf")),
    "one of 1e20": lambda x: _one(x, 1e20),
    "all of -3e38": lambda x: torch.full_like(x, -3e38),
}


def _changed(path: str, change: Callable[[Tensor], Tensor | None]) -> Spoil:
    def spoil(content: RecordDict) -> None:
        tensors = unpack(content.array_records[TENSORS])
        changed = change(tensors.pop(path))
        content[TENSORS] = pack(tensors if changed is None else {**tensors, path: changed})

    return spoil


def _all_changed(where: str, change: Callable[[Tensor], Tensor]) -> Spoil:
    def spoil(content: RecordDict) -> None:
        tensors = unpack(content.array_records[TENSORS])
        content[TENSORS] = pack({path: change(x) if where in path else x for path, x in tensors.items()})

    return spoil


def _more(path: str, tensor: Tensor) -> Spoil:
    def spoil(content: RecordDict) -> None:
        content[TENSORS] = pack({**unpack(content.array_records[TENSORS]), path: tensor})

    return spoil


def _labels() -> Iterator[Kind]:
    for value in (-1, 10, 2**31 - 1, 2**62, -(2**63)):
        yield Kind(f"labels: one of {value}", _all_changed("/labels/", lambda y, v=value: _one(y, v)))
    yield Kind("labels: 32 bits", _all_changed("/labels/", lambda y: y.to(torch.int32)))
    yield Kind("labels: fractions", _all_changed("/labels/", lambda y: y.float()))
    yield Kind("a part that nobody averages", _more("weights/server/x", torch.zeros(2)))
    yield Kind("an upload of another step", _more("upload/1/activations/0", torch.zeros(2)))
    yield Kind("an upload of a step below 0", _more("upload/-1/labels/labels", torch.zeros(2)))
    yield Kind("a path without a group", _more("x", torch.zeros(2)))
    yield Kind("a path that leads upwards", _more("weights/../../etc", torch.zeros(2)))
    yield Kind("a path of a thousand letters", _more("weights/client/" + "x" * 1000, torch.zeros(2)))
    yield Kind("a path with control characters", _more("weights/client/\x1b[31m\n", torch.zeros(2)))
    yield Kind("a megabyte too many", _more("upload/99/activations/0", torch.zeros(2**18)))


# What it says it is about


def _abouts() -> Iterator[Kind]:
    values: dict[str, list[Any]] = {
        "run": ["b" * 32, "", "a" * 31, "../../etc", "x" * 100_000, 7, True, 1.5, b"a" * 32, ["a" * 32]],
        "round": [1, -1, 2**62, "0", False, 0.0, [0], b"0"],
        "client": [0, 3, -1, "2", 2.0, True, [2]],
        "loss/client_loss": [float("nan"), float("inf"), float("-inf"), 1e308, -1e308, "1.0", 1, True, [1.0], b"1"],
        "loss/other": [1.0],
        "something": [1, "x"],
        "": [1],
    }
    for name, wrong in values.items():
        for value in wrong:
            yield Kind(f"about: {name or 'no name'} {str(value)[:20]!r} ({type(value).__name__})", _about(name, value))
    for name in ("run", "round", "client"):
        yield Kind(f"about: no {name}", lambda content, n=name: content[ABOUT].pop(n))
    yield Kind("about: nothing", lambda content: content[ABOUT].clear())
    yield Kind("about: a thousand things", _thousand)


def _about(name: str, value: Any) -> Spoil:
    def spoil(content: RecordDict) -> None:
        content[ABOUT] = ConfigRecord({**content.config_records[ABOUT], name: value})

    return spoil


def _thousand(content: RecordDict) -> None:
    content[ABOUT] = ConfigRecord({**content.config_records[ABOUT], **{f"x{i}": i for i in range(1000)}})


# Records


def _records() -> Iterator[Kind]:
    one = Array("uint8", (1,), "safetensors", b"x")
    strange = {
        "metrics": MetricRecord({"round": 0}),
        "arrays": ArrayRecord({"x": one}),
        "config": ConfigRecord({"x": 1}),
    }
    for name in (ABOUT, TENSORS):
        for type, record in strange.items():
            yield Kind(f"'{name}' is a record of {type}", lambda content, n=name, r=record: _put(content, n, r))
        yield Kind(f"no '{name}'", lambda content, n=name: content.pop(n))
    for type, record in strange.items():
        yield Kind(f"a third record, of {type}", lambda content, r=record: _put(content, "third", r))
    yield Kind("no records", lambda content: content.clear())
    yield Kind("only records of metrics", _only_metrics)


def _put(content: RecordDict, name: str, record: Any) -> None:
    records = {**content, name: record}
    content.clear()
    content.update(records)


def _only_metrics(content: RecordDict) -> None:
    content.clear()
    content.update({ABOUT: MetricRecord({"round": 0}), TENSORS: MetricRecord({"x": 1})})


# The bytes of the tensors


def _blocks(content: RecordDict) -> Iterator[Kind]:
    whole = content.array_records[TENSORS]["block"].data
    length = int.from_bytes(whole[:8], "little")
    header, body = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    raw: dict[str, bytes] = {
        "nothing": b"",
        "seven bytes": b"1234567",
        "noise": bytes(range(256)) * 40,
        "zeros": bytes(10_000),
        "cut in half": whole[: len(whole) // 2],
        "one byte short": whole[:-1],
        "one byte more": whole + b"x",
        "a header of 2^60 bytes": (2**60).to_bytes(8, "little") + b"{}",
        "a header of 2^64 - 1 bytes": b"\xff" * 8 + b"{}",
        "a header that is no JSON": _block(b"not json", body),
        "a header nested ten thousand deep": _block(b'{"a":' * 10_000, body),
        "a header that is a list": _block(b"[]", body),
        "a header with a number of 5000 digits": _block(b'{"a":' + b"9" * 5000 + b"}", body),
        "a header with a shape beyond all memory": _block(_entry([2**40, 2**40], [0, 4]), body),
        "a header with a shape of minus one": _block(_entry([-1], [0, 4]), body),
        "offsets beyond the end": _block(_entry([1], [2**40, 2**40 + 4]), body),
        "offsets that run backwards": _block(_entry([1], [4, 0]), body),
        "a type that nobody knows": _block(_entry([1], [0, 4], "Q7"), body),
        "overlapping tensors": _block(json.dumps(_overlapping(header)).encode(), body),
        "a pickle": pickle.dumps({"x": 1}),
        "a zip": b"PK\x03\x04" + bytes(100),
    }
    for what, data in raw.items():
        yield Kind(f"block: {what}", _with_block("safetensors", data))
    for style in ("cloudpickle", "numpy.ndarray", "", "SAFETENSORS"):
        yield Kind(f"block: of style '{style}'", _with_block(style, whole))
    yield Kind("block: two of them", lambda content: content[TENSORS].update({"other": content[TENSORS]["block"]}))
    yield Kind("block: under another name", lambda content: _rename(content))
    yield Kind("block: none", lambda content: content[TENSORS].clear())


def _block(header: bytes, body: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + body


def _entry(shape: list[int], offsets: list[int], kind: str = "F32") -> bytes:
    return json.dumps({"x": {"dtype": kind, "shape": shape, "data_offsets": offsets}}).encode()


def _overlapping(header: dict[str, Any]) -> dict[str, Any]:
    spoilt = copy.deepcopy(header)
    first, second = [name for name in spoilt if name != "__metadata__"][:2]
    spoilt[second]["data_offsets"] = spoilt[first]["data_offsets"]
    return spoilt


def _with_block(style: str, data: bytes) -> Spoil:
    def spoil(content: RecordDict) -> None:
        content[TENSORS] = ArrayRecord({"block": Array("uint8", (len(data),), style, data)})

    return spoil


def _rename(content: RecordDict) -> None:
    content[TENSORS] = ArrayRecord({"other": content.array_records[TENSORS]["block"]})


# Well-formed lies


def _lies() -> Iterator[Kind]:
    noise = torch.Generator().manual_seed(1)
    lies = {
        "all weights are 0": _all_changed("weights/", torch.zeros_like),
        "weights with the other sign": _all_changed(".weight", torch.neg),
        "weights ten times as large": _all_changed(".weight", lambda x: 10 * x),
        "weights a million times as large": _all_changed(".weight", lambda x: 1e6 * x),
        "random activations of 1e4": _all_changed(
            "/activations/", lambda x: 1e4 * torch.randn(x.shape, generator=noise)
        ),
        "all activations are 0": _all_changed("/activations/", torch.zeros_like),
        "every label is another": _all_changed("/labels/", lambda y: (y + 1) % 10),
        "every label is the same": _all_changed("/labels/", torch.zeros_like),
        "a loss of 0": _about("loss/client_loss", 0.0),
        "a loss of a million": _about("loss/client_loss", 1e6),
        "a counter of a million": _all_changed(".num_batches_tracked", lambda x: torch.full_like(x, 10**6)),
    }
    return (Kind(f"a lie: {what}", spoil, UNKNOWABLE) for what, spoil in lies.items())


# What is coded


def coded_kinds(content: RecordDict) -> list[Kind]:
    """Those for a run whose honest reply is `content`, and what it sends is coded."""
    all = unpack(content.array_records[TENSORS])
    paths = {
        "activations": _first(all, "/activations/", coded=True),
        "places": _first(all, "/places"),
        "coded labels": _first(all, "/labels/"),
        "an update": _first(all, "weights/client/", coded=True),
    }
    return [*_payloads(paths), *_names(paths["activations"], paths["an update"]), *_places(paths["places"]), *_steps()]


def _first(paths: Iterable[str], words: str, *, coded: bool = False) -> str:
    return next(path for path in sorted(paths) if words in path and ("@" in path or not coded))


def _payloads(paths: dict[str, str]) -> Iterator[Kind]:
    for sort, path in paths.items():
        for what, change in {**_CHANGES, **_LENGTHS}.items():
            if sort == "places" or what != "bytes":  # the others are bytes
                yield Kind(f"{sort}: {what}", _changed(path, change))
    levels = {"not a number": float("nan"), "infinite": float("inf"), "of 3e38": 3e38, "of 1e12": 1e12}
    for what, level in levels.items():
        yield Kind(f"activations: a level {what}", _changed(paths["activations"], lambda x, v=level: _start(x, v)))
    yield Kind("coded labels: beyond the classes", _changed(paths["coded labels"], lambda x: _one(x, 255)))
    update = paths["an update"]
    for what, content in {"nothing": b"", "zeros": bytes(10), "of zeros, 16 MiB": bytes(2**24)}.items():
        yield Kind(f"an update: compressed, {what}", _changed(update, lambda x, c=content: _compressed(c)))
    yield Kind("an update: not compressed", _changed(update, lambda x: _flat(bytes(len(x)))))


_LENGTHS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "one less": lambda x: x[:-1].clone(),
    "one more": lambda x: torch.cat([x, x[:1]]),
}


def _start(payload: Tensor, value: float) -> Tensor:
    """The payload with another first number."""
    spoilt = payload.clone()
    spoilt[:4] = torch.tensor([value]).view(torch.uint8)
    return spoilt


def _flat(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _compressed(content: bytes) -> Tensor:
    return _flat(zstandard.ZstdCompressor().compress(content))


def _names(activations: str, update: str) -> Iterator[Kind]:
    """Names that say of an array what it is not."""
    for sort, path in (("activations", activations), ("an update", update)):
        name, _, said = path.rpartition("@")
        shape = said.partition("[")[2]
        names = {
            "not said to be coded": name,
            "double": f"{name}@float64[{shape}",
            "whole numbers": f"{name}@int64[{shape}",
            "of no type": f"{name}@what[{shape}",
            "without a shape": f"{name}@float32[]",
            "of no examples": f"{name}@float32[0]",
            "larger than any array": f"{name}@float32[999999999999999,999999999999999]",
            "of a shape of 60 digits": f"{name}@float32[{'9' * 60}]",
            "coded twice": f"{path}@float32[{shape}",
        }
        for what, label in names.items():
            yield Kind(f"{sort}: by its name {what}", _renamed(path, label))
        yield Kind(f"{sort}: twice, coded and not", _more(name, torch.zeros(2)))


def _renamed(path: str, label: str) -> Spoil:
    def spoil(content: RecordDict) -> None:
        tensors = unpack(content.array_records[TENSORS])
        payload = tensors.pop(path)
        content[TENSORS] = pack({**tensors, label: payload})

    return spoil


def _places(path: str) -> Iterator[Kind]:
    """Activations are differences from what the S-server remembers of the examples at these places."""
    places: dict[str, Callable[[Tensor], Tensor]] = {
        "one beyond the client's examples": lambda x: _one(x, 50),
        "one below 0": lambda x: _one(x, -1),
        "one of 2^31 - 1": lambda x: _one(x, 2**31 - 1),
        "one of -2^31": lambda x: _one(x, -(2**31)),
        "one twice": lambda x: _one(x, int(x[0])),
        "all the same": torch.zeros_like,
        "64 bits": lambda x: x.long(),
        "fractions": lambda x: x.float(),
    }
    for what, change in places.items():
        yield Kind(f"places: {what}", _changed(path, change))
    yield Kind("a lie: places of other examples", _changed(path, lambda x: 49 - x), UNKNOWABLE)


def _steps() -> Iterator[Kind]:
    """What a client says that its first step took."""
    for value in (-1, 10**19, 1.5, True, "x", float("nan"), [1], b"1"):
        wrong = str(value)[:20]
        yield Kind(f"about: a step of {wrong!r} ({type(value).__name__})", _about("step/working_bytes", value))
    yield Kind("about: half of what a step took", lambda content: content[ABOUT].pop("step/step_flops"))


def copied(content: RecordDict) -> RecordDict:
    """A reply that may be spoilt."""
    about, tensors = content.config_records[ABOUT], content.array_records[TENSORS]
    return RecordDict({ABOUT: ConfigRecord({**about}), TENSORS: ArrayRecord({**tensors})})


def judged() -> list[tuple[Kind, str, str]]:
    """Every kind with its verdict and the reason."""
    return [*_judged(CONFIG, kinds), *_judged(CODED, coded_kinds)]


def _judged(config: Config, kinds: Callable[[RecordDict], list[Kind]]) -> Iterator[tuple[Kind, str, str]]:
    with tempfile.TemporaryDirectory() as directory:
        inspector, content = honest(Path(directory), config)
    measured = config is CODED
    if (said := verdict(inspector, copied(content), measured=measured)) != (UNKNOWABLE, ""):
        raise SystemExit(f"An honest reply is {said[0]}: {said[1]}")
    for kind in kinds(content):
        spoilt = copied(content)
        try:
            kind.spoil(spoilt)
        except Exception as error:  # Flower's own types refuse to hold it: it cannot be sent
            yield kind, REFUSED, f"Flower cannot carry it ({type(error).__name__})"
        else:
            yield kind, *verdict(inspector, spoilt, measured=measured)


def main() -> None:
    """Print the table and a summary."""
    found = judged()
    for number, (kind, said, reason) in enumerate(found, 1):
        mark = " " if said == kind.expected else "!"
        print(f"{mark} {number:>3}  {kind.name:<58.58}  {said:<15}  {reason[:110]}")
    counts = {what: sum(said == what for _, said, _ in found) for what in (REFUSED, UNKNOWABLE)}
    wrong = [kind.name for kind, said, _ in found if said != kind.expected]
    print(f"\n{len(found)} kinds: {counts[REFUSED]} refused, {counts[UNKNOWABLE]} cannot be told from right ones")
    print(f"{len(found) - len(wrong)} of {len(found)} as expected" + (f"; not so: {', '.join(wrong)}" if wrong else ""))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
