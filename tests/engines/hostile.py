"""Reports as no honest client would send them: by kind, what spoils one, and why it is then rejected."""

import torch
from flwr.app import Array, ArrayRecord, MetricRecord

from fsl_sage.engines.flower.contents import ABOUT, TENSORS, pack, unpack


def tensors(**changes):
    """Spoils the first tensor whose path holds the given words."""
    ((words, change),) = changes.items()

    def spoil(content):
        all = unpack(content[TENSORS])
        path = next(path for path in sorted(all) if words.replace("_", "/") in path)
        changed = change(all.pop(path))
        content[TENSORS] = pack(all if changed is None else {**all, path: changed})

    return spoil


def more(path, tensor):
    def spoil(content):
        content[TENSORS] = pack({**unpack(content[TENSORS]), path: tensor})

    return spoil


def ending(word, change):
    """Spoils the first tensor whose path ends so."""

    def spoil(content):
        all = unpack(content[TENSORS])
        path = next(path for path in sorted(all) if path.endswith(f".{word}"))
        content[TENSORS] = pack({**all, path: change(all[path])})

    return spoil


def another_type(name):
    """Swaps the type of a record, and keeps its name."""

    def spoil(content):
        spoilt = {"about": content[ABOUT], "tensors": content[TENSORS]}
        spoilt[name] = MetricRecord({"round": 0})
        content.clear()
        content.update(spoilt)

    return spoil


def about(**changes):
    return lambda content: content[ABOUT].update(changes)


def block(style, data):
    def spoil(content):
        content[TENSORS] = ArrayRecord({"block": Array("uint8", (len(data),), style, data)})

    return spoil


HOSTILE = {
    "shape": (tensors(weights_client=lambda x: x[..., :1].clone()), "has the shape"),
    "upload's shape": (tensors(activations=lambda x: x[:-1].clone()), "has the shape"),
    "dtype": (tensors(weights_client=lambda x: x.double()), "is torch.float64 instead of torch.float32"),
    "nan": (tensors(weights_client=lambda x: x * float("nan")), "not finite"),
    "infinite": (tensors(activations=lambda x: x.fill_(float("inf"))), "not finite"),
    "label too high": (tensors(labels=lambda y: y + 10), "labels outside 0 to 9"),
    "label below 0": (tensors(labels=lambda y: y - 100), "labels outside 0 to 9"),
    "a weight is missing": (tensors(weights_client=lambda x: None), "it lacks 'weights/client/"),
    "labels are missing": (tensors(labels=lambda y: None), "it lacks 'upload/0/labels/labels'"),
    "something more": (more("weights/server/x", torch.zeros(1)), "it has 'weights/server/x', which nobody asked for"),
    "oversized": (more("upload/99/activations/0", torch.zeros(100_000)), "it is too large"),
    "another round": (about(round=7), "its round is 7 instead of 0"),
    "another run": (about(run="b" * 32), "its run is bbbb"),
    "another client": (about(client=0), "its client is 0 instead of 2"),
    "no round": (lambda content: content[ABOUT].pop("round"), "its round is None instead of 0"),
    "loss": (about(**{"loss/client_loss": float("nan")}), "its client_loss is nan"),
    "loss that is no number": (about(**{"loss/client_loss": "x" * 999}), "its client_loss is xxx"),
    "loss of a kind": (about(**{"loss/x": 1.0}), "not all was asked for"),
    "garbage": (block("safetensors", b"not a tensor"), "damaged"),
    "lying header": (block("safetensors", (2**60).to_bytes(8, "little") + b"{}"), "damaged"),
    "pickle": (block("cloudpickle", b"\x80\x04N."), "not one safetensors block"),
    "huge activations": (tensors(activations=lambda x: x.fill_(1e20)), "values beyond 1e+09"),
    "huge weights": (tensors(weights_client=lambda x: x.fill_(-3e38)), "values beyond 1e+09"),
    "a negative variance": (ending("running_var", lambda x: -x - 1), "has negative variances"),
    "a counter below 0": (ending("num_batches_tracked", lambda x: x * 0 - 1), "no number of batches"),
    "an absurd counter": (ending("num_batches_tracked", lambda x: x * 0 + 2**62), "no number of batches"),
    "a huge loss": (about(**{"loss/client_loss": 1e308}), "its client_loss is 1e+308"),
    "a round that is true": (about(round=False), "its round is False instead of 0"),
    "a round that is a fraction": (about(round=0.0), "its round is 0.0 instead of 0"),
    "about of another type": (another_type(ABOUT), "are not of the types"),
    "tensors of another type": (another_type(TENSORS), "are not of the types"),
    "no tensors": (lambda content: content.pop(TENSORS), "it has the records 'about'"),
    "nothing": (lambda content: content.clear(), "it has the records nothing"),
}
