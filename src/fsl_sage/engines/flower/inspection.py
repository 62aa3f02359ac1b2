"""What a reply must look like before anything in it touches the model.

The server knows exactly what an honest client sends: the dry engine runs the algorithm's own code on shapes. A reply
that differs in a name, a shape, a dtype or a size is rejected. So are values that are not finite or absurdly large,
negative variances, and labels that do not exist. Well-formed numbers that are wrong still pass: the server cannot
recognise them.
"""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from flwr.app import RecordDict
from torch import Tensor

from fsl_sage.engines.dry import DryEngine
from fsl_sage.engines.flower.contents import ABOUT, TENSORS, Report, unpack
from fsl_sage.engines.flower.courier import printable
from fsl_sage.precision import all_finite
from fsl_sage.roles.footprint import Footprint
from fsl_sage.wire.codecs.arrays import CodecError, Label, decode_one, read_label
from fsl_sage.wire.codecs.cached import check_places
from fsl_sage.wire.ends import PLACES
from fsl_sage.wire.message import ACTIVATIONS, LABELS, Message, Tensors, nbytes

HEADER_BYTES = 512
"""Room for the name, shape and place of one tensor in a block."""


LARGEST = 1e9
"""No activation, weight or loss of an honest client is larger; squares and sums of such numbers stay finite."""
STEP = tuple(f"step/{field.name}" for field in fields(Footprint))
"""How a report says what the client's first step took."""
MOST_OF_A_STEP = 10**18
"""No step of a client takes more bytes or operations."""
MOST_BATCHES = 10**9
"""No layer of BatchNorm has counted more batches."""


class RejectedError(Exception):
    """A reply that must not be used; the text says why."""


class Inspector:
    """Checks the reports of the clients of one run."""

    def __init__(self, run: str, dry: DryEngine, device: torch.device) -> None:
        self.run = run
        self._dry = dry
        self._device = device
        settings = dry.setup.settings
        self._task = settings.task
        shorter = self._task.shorter()
        self._shorter = (
            None if shorter is None else DryEngine(replace(dry.setup, settings=replace(settings, task=shorter)))
        )
        """For texts of varying length: its shapes show which dimensions are the length."""

    def inspect(self, content: RecordDict, t: int, client: int, *, measured: bool = False) -> Report:
        """Check a reply. Raises a RejectedError with the reason if it must not be used.

        Args:
            content: The reply.
            t: The round that it must be about.
            client: The client that it must come from.
            measured: Whether the client was asked for memory and operations of its first step, and may report them.

        Returns:
            The report, decoded.
        """
        try:
            return self._inspect(content, t, client, measured)
        except RejectedError:
            raise
        except Exception as error:  # a reply may be malformed in any way
            raise RejectedError(f"it cannot be read ({type(error).__name__})") from None

    def _inspect(self, content: RecordDict, t: int, client: int, measured: bool) -> Report:
        expected = self._expected(self._dry, t, client)
        if set(content) != {ABOUT, TENSORS}:
            raise RejectedError(f"it has the records {_some(content)} instead of '{ABOUT}' and '{TENSORS}'")
        if set(content.array_records) != {TENSORS} or set(content.config_records) != {ABOUT}:
            raise RejectedError(f"its records '{ABOUT}' and '{TENSORS}' are not of the types that were asked for")
        about = dict(content.config_records[ABOUT])
        told = measured and set(STEP) <= about.keys()
        step = {key: about.pop(key) for key in STEP if told}
        losses = _check_about(about, expected)
        shorter = None if self._shorter is None else self._expected(self._shorter, t, client).tensors()
        tensors = self._check_tensors(content, expected.tensors(), shorter)
        report = Report.of_tensors(self.run, t, client, losses, tensors, _check_step(step))
        for upload in report.uploads:
            self._check_target(upload)
            self._check_places(client, upload)
        return report

    def _expected(self, dry: DryEngine, t: int, client: int) -> Report:
        update = dry.update(t, client)
        return Report(self.run, t, client, {}, update.parts, dry.uploads(t, client), update.extra)

    def _check_target(self, upload: Message) -> None:
        if LABELS not in upload.parts:
            return
        target = self._dry.setup.settings.codecs.decode(LABELS, upload.target)
        if (wrong := self._task.complaint(target)) is not None:
            raise RejectedError(f"of its upload at step {upload.values['step']}: {wrong}")

    def _check_places(self, client: int, upload: Message) -> None:
        """Of activations that are differences: whose they are. The S-server looks up by them what it remembers."""
        places = upload.parts.get(ACTIVATIONS, {}).get(PLACES)
        if self._dry.setup.settings.codecs.cached is None or places is None:
            return
        try:
            check_places(places, len(self._dry.setup.examples[client]))
        except CodecError as error:
            raise RejectedError(f"of its upload at step {upload.values['step']}: {error}".rstrip(".")) from None

    def _check_tensors(self, content: RecordDict, expected: Tensors, shorter: Tensors | None) -> Tensors:
        size, limit = content.array_records[TENSORS].count_bytes(), nbytes(expected) + HEADER_BYTES * len(expected)
        if size > limit:
            raise RejectedError(f"it is too large: {size:,} bytes where at most {limit:,} are expected")
        try:
            tensors = unpack(content.array_records[TENSORS])
        except ValueError as error:
            raise RejectedError(str(error)) from None
        models, given = _arrays(expected), _arrays(tensors)
        if missing := models.keys() - given.keys():
            raise RejectedError(f"it lacks {_some(missing)}")
        if surplus := given.keys() - models.keys():
            raise RejectedError(f"it has {_some(surplus)}, which nobody asked for")
        wanted = {path: tuple(array.model.shape) for path, array in models.items()}
        if shorter is not None:
            lengths = {path: array.model for path, array in _arrays(shorter).items()}
            wanted = _lengths_given(wanted, lengths, {path: array.model for path, array in given.items()})
        for path, array in models.items():
            if given[path].is_coded != array.is_coded:
                raise RejectedError(f"'{path}' is {'' if given[path].is_coded else 'not '}coded")
            _check_shape(path, given[path].model, array.model.dtype, wanted[path])
            self._check_numbers(path, self._decoded(path, given[path], tensors))
        # In the order in which an honest client sends them.
        return {given[path].label: tensors[given[path].label].to(self._device) for path in models}

    def _decoded(self, path: str, array: "_Array", tensors: Tensors) -> Tensor:
        """The values of an array; for activations that travel as differences, the difference."""
        payload = tensors[array.label]
        if not array.is_coded:
            return payload
        codecs = self._dry.setup.settings.codecs
        group, *more = path.split("/")
        codec = codecs.codec_of(more[1]) if group == "upload" else codecs.update.codec if codecs.update else None
        assert codec is not None, "what is expected is coded by what is chosen"
        try:
            return decode_one(codec, payload, Label(path, array.model.dtype, tuple(array.model.shape)))
        except CodecError as error:
            raise RejectedError(f"{error}".rstrip(".")) from None

    def _check_numbers(self, path: str, tensor: Tensor) -> None:
        if not all_finite(tensor):
            raise RejectedError(f"'{path}' has values that are not finite")
        if tensor.is_floating_point() and tensor.numel() and float(tensor.abs().max()) > LARGEST:
            raise RejectedError(f"'{path}' has values beyond {LARGEST:g}")
        if path.endswith(".running_var") and tensor.numel() and float(tensor.min()) < 0:
            raise RejectedError(f"'{path}' has negative variances")
        if path.endswith(".num_batches_tracked") and not 0 <= int(tensor) <= MOST_BATCHES:
            raise RejectedError(f"'{path}' is no number of batches from 0 to {MOST_BATCHES:,}")


class _Array(NamedTuple):
    """One array of a report: the name it travels under, and its tensor before it was coded."""

    label: str
    is_coded: bool
    model: Tensor
    """If it was coded, only its type and shape are used."""


def _arrays(tensors: Tensors) -> dict[str, _Array]:
    """The arrays by name, without what coding adds to a name."""
    found: dict[str, _Array] = {}
    for label, tensor in tensors.items():
        was = read_label(label)
        name = label if was is None else was.name
        if name in found:
            raise RejectedError(f"it has '{printable(name, 60)}' twice")
        model = tensor if was is None else torch.empty(was.shape, dtype=was.dtype, device="meta")
        found[name] = _Array(label, was is not None, model)
    return found


def _check_shape(path: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype:
        raise RejectedError(f"'{path}' is {tensor.dtype} instead of {dtype}")
    if tuple(tensor.shape) != shape:
        raise RejectedError(f"'{path}' has the shape {list(tensor.shape)} instead of {list(shape)}")


def _lengths_given(
    wanted: Mapping[str, tuple[int, ...]], shorter: Tensors, given: Tensors
) -> dict[str, tuple[int, ...]]:
    """The shapes that are right for the lengths that a report's uploads have, one for all tensors of an upload.

    Args:
        wanted: The shapes of texts of the greatest length.
        shorter: The tensors of texts of one token less: where they differ, a dimension is the length.
        given: What the report has.
    """
    lengths: dict[str, int] = {}
    shapes = dict(wanted)
    for path, shape in wanted.items():
        goes_by = [d for d, size in enumerate(shape) if size != shorter[path].shape[d]]
        if goes_by and given[path].dim() == len(shape):
            upload = path.split("/")[1]
            length = lengths.setdefault(upload, given[path].shape[goes_by[0]])
            if not 1 <= length <= shape[goes_by[0]]:
                raise RejectedError(f"'{path}' has a length of {length} instead of 1 to {shape[goes_by[0]]}")
            shapes[path] = tuple(length if d in goes_by else size for d, size in enumerate(shape))
    return shapes


def _check_step(step: Mapping[str, Any]) -> Footprint | None:
    """Check what a report says about the client's first step."""
    for name, value in step.items():
        if type(value) is not int or not 0 <= value <= MOST_OF_A_STEP:
            raise RejectedError(f"its {name} is {printable(str(value), 60)}")
    return Footprint(*step.values()) if step else None


def _check_about(about: Mapping[str, Any], expected: Report) -> dict[str, float]:
    """The losses of a report. Raises a RejectedError if it is about another run, round or client."""
    for name in ("run", "round", "client"):
        said, wanted = about.get(name), getattr(expected, name)
        if said != wanted or type(said) is not type(wanted):
            raise RejectedError(f"its {name} is {printable(str(said), 60)} instead of {wanted}")
    losses = {key.removeprefix("loss/"): value for key, value in about.items() if key.startswith("loss/")}
    if set(losses) - {"client_loss"} or len(about) != 3 + len(losses):
        raise RejectedError(f"it says {_some(about)}, of which not all was asked for")
    return _finite(losses)


def _finite(losses: Mapping[str, Any]) -> dict[str, float]:
    for name, value in losses.items():
        if not isinstance(value, float) or not math.isfinite(value) or abs(value) > LARGEST:
            raise RejectedError(f"its {name} is {printable(str(value), 60)}")
    return dict(losses)


def _some(names: Any) -> str:
    """A few of many names, for a sentence."""
    names = sorted(str(name) for name in names)
    shown = ", ".join(f"'{printable(name, 60)}'" for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "nothing"
