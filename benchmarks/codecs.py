"""What coding costs: seconds of encoding and decoding over a round's other seconds, at the paper's setting.

    python -m benchmarks.codecs

The paper's ResNet-18, cut and batch of 256, an upload at every fifth step; one client with ten steps instead of
ten with twenty, which is the same ratio. One worker and one thread; processor time. What is sent is counted too.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.timing import CONSOLE, Goal, note
from fsl_sage.config import CodecConfig, Config, DataConfig, GivenOptions, ModelConfig
from fsl_sage.engines.local import LocalEngine
from fsl_sage.experiment import Federation
from fsl_sage.experiment.setup import make_setup
from fsl_sage.wire.codecs import cached, change, chosen

WORDS = {
    "none": CodecConfig(),
    "fp16": CodecConfig(**dict.fromkeys(("activations", "update", "weights", "auxiliary"), "fp16")),
    "int8": CodecConfig(**dict.fromkeys(("activations", "update", "weights", "auxiliary"), "int8")),
    "int4": CodecConfig(**dict.fromkeys(("activations", "update", "weights", "auxiliary"), "int4")),
    "int4+zstd": CodecConfig(**dict.fromkeys(("activations", "update", "weights", "auxiliary"), "int4+zstd")),
    "topk:0.1": CodecConfig(**dict.fromkeys(("activations", "update", "weights", "auxiliary"), "topk:0.1")),
    "cached-int4": CodecConfig(activations="cached-int4", update="int4", weights="int4", auxiliary="int4"),
    "balanced": CodecConfig(preset="balanced"),
    "small": CodecConfig(preset="small"),
}


def config_for(codec: CodecConfig) -> Config:
    """No alignment in the round that is timed: with one, coding is a smaller part of it."""
    return Config(
        clients=1,
        rounds=3,
        batch_size=256,
        options=GivenOptions({"upload_every": 5, "align_every": 1000}),
        workers=1,
        device="cpu",
        data=DataConfig(train_images=10 * 256, test_images=100),
        model=ModelConfig(name="resnet18"),
        codec=codec,
    )


@contextmanager
def timed() -> Iterator[list[float]]:
    """The processor seconds of every call that encodes or decodes arrays."""
    seconds: list[float] = []

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*arguments: Any) -> Any:
            start = time.process_time()
            try:
                return call(*arguments)
            finally:
                seconds.append(time.process_time() - start)

        return timed_call

    places = [(chosen, "encode_all"), (chosen, "decode_all"), (change.Change, "encode"), (change.Change, "decode")]
    places += [(cached.Cached, "decode"), (cached, "encode_one")]
    before = [(place, name, getattr(place, name)) for place, name in places]
    for place, name, call in before:
        setattr(place, name, watched(call))
    try:
        yield seconds
    finally:
        for place, name, call in before:
            setattr(place, name, call)


def measure(codec: CodecConfig) -> tuple[float, float, int]:
    """(seconds of coding, seconds of everything else, bytes) of the second of two rounds."""
    setup = make_setup(config_for(codec))
    engine = LocalEngine(setup)
    try:
        federation = Federation(setup, engine)
        federation.play_round(1, [0])
        before = federation.ledger.total
        with timed() as seconds:
            start = time.process_time()
            federation.play_round(2, [0])
            whole = time.process_time() - start
        return sum(seconds), whole - sum(seconds), federation.ledger.total - before
    finally:
        engine.close()


def main() -> None:
    """A line for each choice."""
    CONSOLE.print("Encoding and decoding, ResNet-18, batch 256, an upload at every fifth step:")
    for name, codec in WORDS.items():
        coding, rest, sent = measure(codec)
        CONSOLE.print(f"  {name:12} {coding / rest:6.1%} of a round's other {rest:.1f} s, {sent / 1e6:8.2f} MB sent")
        note(f"coding by {name} over the rest of a round", coding / rest, Goal(0.05))


if __name__ == "__main__":
    main()
