"""Split a model in one call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn

from fsl_sage.split.errors import SplitError
from fsl_sage.split.parts.check import checked
from fsl_sage.split.parts.part import Part, Split
from fsl_sage.split.plan.analysis import Analysis, Tied
from fsl_sage.split.plan.split_plan import SplitPlan
from fsl_sage.split.trace.skeleton import built_on_meta, named_tensors, set_tensor, skeleton


def split_model(
    model: nn.Module,
    cut: str | tuple[str, str],
    example: Tensor | Mapping[str, Any] | tuple[Any, ...],
    *,
    tied: Tied = "refuse",
    private: Collection[str] = (),
) -> Split:
    """Split a model after the module `cut`; two cuts make a U-shape whose head is back at the client.

    Args:
        model: Any module. It is not changed; the parts share its parameters and buffers.
        cut: The qualified name of the last module on the client's side, or two names.
        example: A batch: a tensor, a dict of keyword inputs, or a tuple of positional ones.
        tied: What to do with trainable weights that both sides use under a name of their own: refuse, or untie them.
            Frozen ones are simply held by both.
        private: Inputs that must not cross, besides the main one, which never does.

    Returns:
        The parts: `client` takes the model's inputs and returns a Boundary, `server` takes that and returns the model's
        output; with two cuts `head` does so with the server's Boundary. `merged()` is the whole model again.

    Raises:
        SplitError: The model cannot be cut there. It says why, and which cuts work.
    """
    if not isinstance(model, nn.Module):
        raise SplitError(f"a {type(model).__name__} cannot be split; give a torch.nn.Module")
    analysis = Analysis(model, example, private)
    return split_by_analysis(analysis, cut, tied)


def split_by_analysis(analysis: Analysis, cut: str | tuple[str, str], tied: Tied = "refuse") -> Split:
    """Split a model that has been analysed, so that many cuts of one model need one analysis."""
    cuts = (cut,) if isinstance(cut, str) else cut
    if not isinstance(cuts, tuple | list) or len(cuts) not in (1, 2) or not all(isinstance(name, str) for name in cuts):
        raise SplitError(
            f"the cut {cut!r} is not possible: give a module's name, or two for a U-shape; {analysis.advice()}"
        )
    plan = analysis.plan(tuple(cuts), tied)
    return Split(analysis.model, plan) if analysis.on_meta else checked(analysis, plan)


def build_side(
    model: nn.Module | Callable[[], nn.Module],
    plan: SplitPlan,
    side: str,
    tensors: Mapping[str, Tensor] | None = None,
) -> Part:
    """One part of a split, from its plan, without the rest of the model's weights ever being allocated.

    Args:
        model: A factory, which is called on the meta device, or a model that is on it already.
        plan: The plan of a split of the same model.
        side: "client", "server" or "head".
        tensors: The part's parameters and buffers (`side_tensors`); without them the part stays on the meta device.
    """
    if side not in plan.parts:
        raise SplitError(f"the plan has no part '{side}'; it has {', '.join(plan.parts)}")
    if not isinstance(model, nn.Module):
        model = built_on_meta(model)
    part = Part(skeleton(model), plan, side)
    if tensors is not None:
        _load(part, side, tensors)
    return part


def side_tensors(part: nn.Module) -> dict[str, Tensor]:
    """All that a part needs from elsewhere: its parameters and buffers, also the buffers that are not saved."""
    return {name: tensor.detach() for name, tensor in named_tensors(part).items()}


def _load(part: Part, side: str, tensors: Mapping[str, Tensor]) -> None:
    wanted = named_tensors(part)
    missing, extra = wanted.keys() - tensors.keys(), tensors.keys() - wanted.keys()
    if missing or extra:
        problem = f"'{sorted(missing)[0]}' is missing" if missing else f"'{sorted(extra)[0]}' is not part of it"
        raise SplitError(f"the tensors for the {side} do not fit its plan: {problem}")
    loaded: dict[int, Tensor] = {}
    for name, old in wanted.items():
        if old.shape != tensors[name].shape:
            raise SplitError(
                f"'{name}' has the shape {tuple(old.shape)}; a tensor of {tuple(tensors[name].shape)} came"
            )
        if id(old) not in loaded:  # what is tied stays tied
            new = tensors[name].detach()
            loaded[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
        set_tensor(part, name, loaded[id(old)])
