"""The codecs of a run: which one for what travels in which direction."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fsl_sage.config import CodecConfig, CodecSpec
from fsl_sage.wire.codecs.arrays import ArrayCodec, Noise, decode_all, encode_all, labelled, read_label
from fsl_sage.wire.codecs.cached import Cached
from fsl_sage.wire.codecs.casts import Cast
from fsl_sage.wire.codecs.change import Change
from fsl_sage.wire.codecs.compressed import Compressed, inner, uncompressed
from fsl_sage.wire.codecs.groups import Grouping, OfSmashed, OfWeights
from fsl_sage.wire.codecs.integers import Smallest
from fsl_sage.wire.codecs.quantise import Quantise
from fsl_sage.wire.codecs.sparse import AtPlaces, TopK
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
    Tensors,
)


class Codecs:
    """The codec of each transfer. It has no state: sender and receiver keep what must be remembered."""

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
        if config.spec("gradients").family == "randtopk":
            del smashed[CUT_GRADIENTS]
        self._by_kind: dict[str, ArrayCodec] = {kind: codec for kind, codec in smashed.items() if codec is not None}
        activations = smashed[ACTIVATIONS]
        self.cached = Cached(activations) if activations is not None and config.spec("activations").cached else None
        """The codec of activations on their way up, if differences from the last ones are sent."""
        self._sparse = inner(activations)
        self.reuses_places = config.spec("gradients").family == "randtopk"
        """Whether cut gradients are sent only at the places whose activations were sent."""
        self.update = _change(config.spec("update"), difference=True)
        """The codec of models on their way up."""
        weights, auxiliary = _change(config.spec("weights")), _change(config.spec("auxiliary"))
        models = {CLIENT_MODEL: weights, FULL_MODEL: weights, DECODER: weights, AUXILIARY: auxiliary}
        self.published: dict[str, Change] = {kind: change for kind, change in models.items() if change is not None}
        """The codecs of models on their way down, by kind."""

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

    def codec_of(self, kind: str) -> ArrayCodec | None:
        """How single arrays of smashed data, gradients and labels are coded, if they are."""
        return self._by_kind.get(kind)

    def decode(self, kind: str, sent: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Decode what `encode` returned."""
        return decode_all(self._by_kind[kind], sent) if kind in self._by_kind else sent

    def chosen_places(self, sent: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """Which numbers of the activations of an upload were sent, bool [rows, length] each."""
        assert isinstance(self._sparse, TopK)
        for label, payload in sent.items():
            was = read_label(label)
            if was is None:
                continue
            if payload.is_meta:
                yield torch.empty(self._sparse.rows(was.shape), dtype=torch.bool, device="meta")
            else:
                yield self._sparse.places(uncompressed(self._by_kind[ACTIVATIONS], payload, was), was.shape, was.dtype)

    def encode_at_places(self, gradients: Mapping[str, Tensor], places: Sequence[Tensor]) -> Tensors:
        """Cut gradients as they travel: at these places alone."""
        assert isinstance(self._sparse, TopK)
        sent: Tensors = {}
        for (name, x), chosen in zip(gradients.items(), places, strict=True):
            if x.is_meta:
                size = self._sparse.rows(x.shape)[0] * self._sparse.kept(x.shape) * x.element_size()
                sent[labelled(name, x)] = torch.empty(size, dtype=torch.uint8, device="meta")
            else:
                sent[labelled(name, x)] = AtPlaces().encode(x, chosen)
        return sent

    def decode_at_places(self, sent: Mapping[str, Tensor], places: Sequence[Tensor]) -> Tensors:
        """Cut gradients as the client reads them: 0 at the other places."""
        gradients: Tensors = {}
        for (label, payload), chosen in zip(sent.items(), places, strict=True):
            was = read_label(label)
            assert was is not None
            if payload.is_meta:
                gradients[was.name] = torch.empty(was.shape, dtype=was.dtype, device="meta")
            else:
                gradients[was.name] = AtPlaces().decode(payload, chosen, was.shape, was.dtype)
        return gradients


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
