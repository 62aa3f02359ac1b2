"""What a peer sends: payloads of codecs, replies of clients, and what a client's parts stand on.

Whatever its bytes and names, it is read or refused by the error that is meant for it.
"""

import contextlib
import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsl_sage.config import CodecConfig
from fsl_sage.errors import InputError
from fsl_sage.wire.codecs import CodecError, Noise
from fsl_sage.wire.codecs.arrays import decode_all, encode_all, read_label
from fsl_sage.wire.codecs.chosen import array_codec
from fsl_sage.wire.codecs.groups import OfSmashed

from .test_parsers import EXAMPLES, spoilt

NOISE = Noise(0, "fuzz")
FAMILIES = ["fp16", "bf16", "int8", "int2:nearest", "topk:0.1", "topk:0.01", "randtopk:0.3"]
WORDS = [*FAMILIES, *(f"{word}+zstd" for word in (*FAMILIES, "none"))]
BOUNDED = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)


def payload_of(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


@pytest.mark.parametrize("word", WORDS)
@BOUNDED
@given(data=st.data())
def test_a_payload_is_read_or_refused(word: str, data: st.DataObject) -> None:
    codec = array_codec(CodecConfig(activations=word).spec("activations"), OfSmashed())
    x = torch.linspace(-1, 1, 8 * 3 * 5 * 5).view(8, 3, 5, 5)
    ((label, payload),) = encode_all(codec, {"x": x}, NOISE, lambda name, x: True).items()
    given_label = data.draw(st.one_of(st.just(label), st.sampled_from(LABELS)))
    content = data.draw(spoilt([payload.numpy().tobytes()]))
    # Most of what is spoilt has another length, and is refused for that: half of it is brought to the right one.
    content = content[: len(payload)].ljust(len(payload), b"\xff") if data.draw(st.booleans()) else content
    with contextlib.suppress(CodecError):
        read = decode_all(codec, {given_label: payload_of(content)})
        assert all(array.numel() <= 1000 * max(len(content), 1) for array in read.values())


LABELS = [
    *(
        "x@float32[]",
        "x@float64[8,3,5,5]",
        "x@int64[8,3,5,5]",
        "x@float32[0,3,5,5]",
        "x@float32[600]",
        "x@float32[1,600]",
    ),
    *("x@float32[8,3,5,5", "x@what[8]", "@float32[8,3,5,5]", "x@float32[999999999999,999999999999]", "x@float32[,]"),
]


@BOUNDED
@given(st.one_of(st.text(max_size=40), st.from_regex(r"[a-z@]{0,5}@(float32|int64)\[[0-9,]{0,60}\]?")))
def test_a_name_is_read_or_refused(label: str) -> None:
    with contextlib.suppress(CodecError):
        was = read_label(label)
        assert was is None or math.prod(was.shape) <= 2**40


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """An inspector, the reply of a client that codes what it sends, and what the client's parts stand on."""
    pytest.importorskip("flwr")
    from benchmarks.hostile import CODED, honest

    from fsl_sage.engines.flower.foundation import Foundation
    from fsl_sage.experiment.setup import make_setup

    inspector, reply = honest(Path(tmp_path_factory.mktemp("honest")), CODED)
    return inspector, reply, Foundation.of(make_setup(CODED))[0].pack()


@BOUNDED
@given(data=st.data())
def test_a_reply_is_taken_or_refused(honest, data: st.DataObject) -> None:
    from benchmarks.hostile import REFUSED, UNKNOWABLE, copied, verdict

    from fsl_sage.engines.flower.contents import TENSORS, as_record

    inspector, reply, _ = honest
    spoilt_reply = copied(reply)
    spoilt_reply[TENSORS] = as_record(data.draw(spoilt([reply.array_records[TENSORS]["block"].data])))
    assert verdict(inspector, spoilt_reply, measured=True)[0] in (REFUSED, UNKNOWABLE)


@BOUNDED
@given(data=st.data())
def test_a_foundation_is_read_or_refused(honest, data: st.DataObject) -> None:
    from fsl_sage.engines.flower.foundation import Foundation

    with contextlib.suppress(InputError):
        Foundation.unpack(data.draw(spoilt([honest[2]])))
