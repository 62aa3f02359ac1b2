"""The codecs of a run: which one for what travels in which direction."""

from collections.abc import Mapping

from torch import Tensor

from fsl_sage.config import CodecConfig, CodecSpec
from fsl_sage.wire.codecs.arrays import ArrayCodec, Noise, decode_all, encode_all
from fsl_sage.wire.codecs.casts import Cast
from fsl_sage.wire.codecs.change import Change
from fsl_sage.wire.codecs.compressed import Compressed
from fsl_sage.wire.codecs.groups import Grouping, OfSmashed, OfWeights
from fsl_sage.wire.codecs.integers import Smallest
from fsl_sage.wire.codecs.quantise import Quantise
from fsl_sage.wire.codecs.sparse import TopK
from fsl_sage.wire.codecs.whole import Whole
from fsl_sage.wire.ledger import Direction
from fsl_sage.wire.message import (
    ACTIVATIONS,
    AUXILIARY,
    CLIENT_MODEL,
    CUT_GRADIENTS,
    DECODER,
    FULL_MODEL,
    LABELS,
)


class Codecs:
    """What is chosen for each transfer. It has no state: who sends or receives keeps what is to be remembered."""

    def __init__(self, config: CodecConfig | None = None, seed: int = 0, label_values: int | None = None) -> None:
        """Make the codecs.

        Args:
            config: What is chosen; nothing is coded if not given.
            seed: Of the run, for the noise.
            label_values: The number of values that a label can have, where that is known.
        """
        config = config or CodecConfig()
        self.seed = seed
        smashed = {
            ACTIVATIONS: array_codec(config.spec("activations"), OfSmashed()),
            CUT_GRADIENTS: array_codec(config.spec("gradients"), OfSmashed()),
            LABELS: Smallest(label_values) if config.word("labels") == "smallest" and label_values else None,
        }
        self._by_kind: dict[str, ArrayCodec] = {kind: codec for kind, codec in smashed.items() if codec is not None}
        self.update = _change(config.spec("update"), difference=True)
        """Of models on their way up."""
        weights, auxiliary = _change(config.spec("weights")), _change(config.spec("auxiliary"))
        models = {CLIENT_MODEL: weights, FULL_MODEL: weights, DECODER: weights, AUXILIARY: auxiliary}
        self.published: dict[str, Change] = {kind: change for kind, change in models.items() if change is not None}
        """Of models on their way down, by kind."""

    @property
    def sizes_vary(self) -> bool:
        """Whether what is sent may be shorter than its shape says."""
        changes = [*self.published.values(), *([self.update] if self.update else [])]
        return any(codec.varies for codec in [*self._by_kind.values(), *(change.codec for change in changes)])

    def noise(self, what: str, client: int = -1, t: int = -1, step: int = -1) -> Noise:
        """The random numbers of one transfer."""
        return Noise(self.seed, f"codec/{what}", client, t, step)

    def encode(
        self, direction: Direction, kind: str, arrays: Mapping[str, Tensor], client: int, t: int, step: int
    ) -> Mapping[str, Tensor]:
        """Smashed data, gradients and labels as they travel; what has no codec as it is."""
        if kind not in self._by_kind:
            return arrays
        noise = self.noise(f"{direction}/{kind}", client, t, step)
        return encode_all(self._by_kind[kind], arrays, noise, _is_label if kind == LABELS else _is_number)

    def decode(self, kind: str, sent: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What the receiver makes of them."""
        return decode_all(self._by_kind[kind], sent) if kind in self._by_kind else sent


def _is_number(name: str, x: Tensor) -> bool:
    return x.is_floating_point()


def _is_label(name: str, x: Tensor) -> bool:
    return name == "labels" and not x.is_floating_point()


def array_codec(spec: CodecSpec, grouping: Grouping) -> ArrayCodec | None:
    """The codec of single arrays that a word names; None where they travel as they are."""
    codec: ArrayCodec | None = None
    if spec.family == "cast":
        codec = Cast("bfloat16" if spec.brain else "float16", grouping)
    elif spec.family == "int":
        codec = Quantise(spec.bits, grouping, nearest=spec.nearest)
    elif spec.family in ("topk", "randtopk"):
        codec = TopK(spec.share, by_example=isinstance(grouping, OfSmashed), random=spec.family == "randtopk")
    return Compressed(codec or Whole()) if spec.zstd else codec


def _change(spec: CodecSpec, *, difference: bool = False) -> Change | None:
    codec = array_codec(spec, OfWeights())
    return None if codec is None else Change(codec, absolute=codec.is_absolute and not difference)
