"""Codecs as they are chosen: by a word for each thing that travels, such as `int4:nearest+zstd`."""

import re
from dataclasses import dataclass
from typing import Literal

from fsl_sage.config.values import settle
from fsl_sage.errors import InputError

ZSTD = "+zstd"
TRANSFERS = ("activations", "gradients", "update", "weights", "auxiliary")
"""What has a codec of its own."""
ACCEPTED = "none, fp16, bf16, int8, int4, int2 (or int4:nearest), topk:0.1"
"""What every transfer takes; each also with +zstd behind it."""


@dataclass(frozen=True)
class CodecSpec:
    """One codec, by what its word says."""

    family: Literal["none", "cast", "int", "topk", "randtopk"]
    bits: int = 32
    """Of a number that is sent, where the family says so."""
    nearest: bool = False
    """Whether numbers go to the nearest code, and not at random to one of the two nearest ones."""
    share: float = 1.0
    """Of the numbers that are sent, where only some are."""
    brain: bool = False
    """Of the two casts, bfloat16."""
    cached: bool = False
    """Whether the difference from the last activation of the same example is coded."""
    zstd: bool = False
    """Whether what was coded is compressed."""


def parse_codec(word: str, name: str, *, cached: bool = False, random: bool = False) -> CodecSpec:
    """The codec that a word names.

    Args:
        word: Such as `int4:nearest+zstd`.
        name: Of the option, for an error: `activations`.
        cached: Whether the option takes `cached-int4` and its like.
        random: Whether it takes `randtopk:0.1`.
    """
    zstd, plain = word.endswith(ZSTD), word.removesuffix(ZSTD)
    if plain == "none":
        return CodecSpec("none", zstd=zstd)
    if plain in ("fp16", "bf16"):
        return CodecSpec("cast", bits=16, brain=plain == "bf16", zstd=zstd)
    if found := re.fullmatch(r"(cached-)?int([248])(?::(nearest|stochastic))?", plain):
        if not found[1] or cached:
            return CodecSpec("int", int(found[2]), found[3] == "nearest", cached=bool(found[1]), zstd=zstd)
    elif found := re.fullmatch(r"(rand)?topk:(\d*\.?\d+)", plain):
        share = float(found[2])
        if 0 < share <= 1 and (random or not found[1]):
            return CodecSpec("randtopk" if found[1] else "topk", share=share, zstd=zstd)
    more = (", randtopk:0.1" if random else "") + (", cached-int4" if cached else "")
    raise InputError(f"--codec.{name} {word} is not possible: give {ACCEPTED}{more}; each also with {ZSTD} behind it.")


PRESETS: dict[str, dict[str, str]] = {
    "balanced": {
        "activations": "int8",
        "gradients": "int8",
        "update": "int8",
        "weights": "int8",
        "auxiliary": "int8",
        "labels": "smallest",
    },
    "small": {
        "activations": "int4+zstd",
        "gradients": "int8",
        "update": "int4",
        "weights": "int4",
        "auxiliary": "int4",
        "labels": "smallest",
    },
}
"""What `--codec.preset` chooses; docs/codecs.md says by which trials they were chosen."""


@dataclass(frozen=True)
class CodecConfig:
    """How arrays are written for the way, so that fewer bytes travel: none, fp16, bf16, int8, int4, int2, topk:SHARE,
    each also with +zstd (extra `codec`). int4:nearest rounds to the nearest code, int4 at random without a bias.
    """

    preset: Literal["balanced", "small"] | None = None
    """A choice for all that is not given: balanced is int8 everywhere, small int4 and zstd."""
    activations: str | None = None
    """Smashed data. Also randtopk:0.1, and cached-int4: the difference from the last activation of the same example."""
    gradients: str | None = None
    """Cut gradients. Also randtopk: at the places that the activations' randtopk has chosen."""
    update: str | None = None
    """What clients send to the F-server: the difference from what they got, with error feedback."""
    weights: str | None = None
    """Averaged weights on their way down: the difference from what the clients have, with error feedback."""
    auxiliary: str | None = None
    """Auxiliaries on their way down: the difference from the one that the client has."""
    labels: Literal["none", "smallest"] | None = None
    """smallest: labels travel in the smallest integer type that holds all classes."""

    def __post_init__(self) -> None:
        settle(self, CodecConfig, "codec.")
        for name in TRANSFERS:
            self.spec(name)
        activations, gradients = self.spec("activations"), self.spec("gradients")
        if gradients.family == "randtopk" and (
            activations.family not in ("topk", "randtopk") or activations.share != gradients.share or gradients.zstd
        ):
            raise InputError(
                f"--codec.gradients {self.word('gradients')} sends gradients at the places of which activations were "
                f"sent: give --codec.activations randtopk:{gradients.share:g} too, and no {ZSTD} here."
            )

    @property
    def compresses(self) -> bool:
        """Whether zstd is among what is chosen, so that lengths depend on numbers."""
        return any(self.spec(name).zstd for name in TRANSFERS)

    def word(self, name: str) -> str:
        """What is chosen for a transfer: as given, else by the preset, else `none`."""
        given = getattr(self, name)
        return str(given if given is not None else PRESETS[self.preset][name] if self.preset else "none")

    def spec(self, name: str) -> CodecSpec:
        """The codec of a transfer."""
        smashed = name == "activations"
        return parse_codec(self.word(name), name, cached=smashed, random=smashed or name == "gradients")
