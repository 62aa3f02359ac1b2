"""What a step of a role will take, for every cut of a model, before anything runs.

What roles do in a step is written down by `role_plan`. What each of these things costs at a cut is read off training
steps of the whole model on tensors without data; for an auxiliary, of the model without the blocks that it leaves out.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from fsl_sage.algorithms import make_algorithm
from fsl_sage.config import Config
from fsl_sage.experiment.role_plan import Event, Plan
from fsl_sage.models import is_language_model, is_trained_in_auxiliary, usual_auxiliary
from fsl_sage.optimizers import state_shapes
from fsl_sage.problems.base import Problem, Task, example_shapes
from fsl_sage.problems.parts import META, make_ridge
from fsl_sage.roles.corrections import copies_kept
from fsl_sage.roles.footprint import Footprint
from fsl_sage.split import Analysis, AuxiliaryStates, SplitError, Step, random_features, training_step
from fsl_sage.split.auxiliaries.recipe import Recipe
from fsl_sage.split.errors import without_tensor
from fsl_sage.split.trace.skeleton import set_tensor, tensor_leaves
from fsl_sage.wire.message import nbytes


class RidgeStates:
    """What the ridge auxiliary of any cut holds, as shapes: the counterpart of `AuxiliaryStates`."""

    def __init__(self, config: Config, problem: Problem, analysis: Analysis) -> None:
        self._analysis = analysis
        self._make = partial(make_ridge, config, problem, analysis.model)

    def at(self, cut: str) -> dict[str, Tensor]:
        """Its weights, and the embedding that it shares with the client part."""
        return dict(self._make(self._analysis.boundary(cut)).named_parameters())

    def flops(self, cut: str) -> int:
        """Of an estimate for a batch."""
        tensors = self._analysis.boundary(cut)
        ridge = self._make(tensors)
        return ridge.flops(tensors[ridge.place].shape)


def auxiliary_states(config: Config, problem: Problem, analysis: Analysis) -> AuxiliaryStates | RidgeStates:
    """What the configured auxiliary holds at any cut."""
    if random_features(config.model.auxiliary) is not None:
        return RidgeStates(config, problem, analysis)
    return AuxiliaryStates(analysis, config.model.auxiliary or usual_auxiliary(analysis.model))


class Planner:
    """Footprints of the configured algorithm's roles at the cuts of a model."""

    def __init__(
        self, config: Config, problem: Problem, analysis: Analysis, auxiliaries: "AuxiliaryStates | RidgeStates"
    ) -> None:
        self._config = config
        self._analysis = analysis
        self._auxiliaries = auxiliaries
        task = problem.make_task(config, META)
        self._loss = _loss_of(config, task)
        self._leave_out = task.leaves_out(config.batch_size)
        self.step = self._step()
        """Of the whole model."""
        self._algorithm = make_algorithm(config)
        self._steps: dict[tuple[str, ...], tuple[Step, Step]] = {}
        self._passes: dict[tuple[str, ...], Step] = {}

    def at(self, plan: Plan, cut: str) -> dict[str, Footprint]:
        """By role; nothing where this cut allows no such auxiliary."""
        try:
            client = self._client(plan, cut)
        except SplitError:
            return {}
        if not plan.server:
            return {"client": client}
        return {"client": client, "server": self._server(plan, cut)}

    def _client(self, plan: Plan, cut: str) -> Footprint:
        events, inputs = plan.client, self._analysis.inputs.leaves
        holds, trains = self._algorithm.holds, self._algorithm.trained_in(0)
        behind = "auxiliary" if "auxiliary" in holds else "server"
        costs, shared = self._costs(events, cut, behind, trained=behind in trains)
        stepped = any(event.what == "step" for event in events)
        parts = {part: self._tensors(part, cut) for part in holds}
        trained = [tensor for part in holds if part in trains for tensor in _trained(parts[part])]
        static = _bytes(tensor for tensors in parts.values() for tensor in tensors.values())
        static += self._training(trained) if stepped else 0
        static += _bytes(_trained(parts["client"])) if plan.holds else 0
        corrected = (part for part in self._algorithm.averaged if part in trains)
        static += copies_kept(self._algorithm.averaging) * sum(_bytes(_trained(parts[part])) for part in corrected)
        sizes = _Sizes(self._config.batch_size, _bytes(tensor_leaves(inputs)), sum(x.nbytes for x in trained))
        return _played(events, costs, shared, sizes, static)

    def _costs(
        self, events: Sequence[Event], cut: str, behind: str, *, trained: bool
    ) -> "tuple[dict[str, _Cost], int]":
        """By part, what its passes cost at a client; and what the graphs of both parts keep together."""
        front = back = self.step
        if behind == "auxiliary" and isinstance(self._auxiliaries, RidgeStates):  # its estimate has no graph
            return {"client": _front(front, cut), behind: _Cost(0, self._auxiliaries.flops(cut), 0, 0)}, 0
        if behind == "auxiliary":
            front, back = self._steps_without(cut, trained=trained)
        costs = {"client": _front(front, cut), behind: _behind(back, cut)}
        if any(event.what == "pass" for event in events):
            crosses = sum(tensor.nbytes for tensor in self._analysis.boundary(cut))
            costs = _with_passes(costs, behind, self._pass_of(cut, behind).most_alive(cut), crosses)
        return costs, back.client_kept(cut) + back.server_kept(cut) - back.all_kept()

    def _server(self, plan: Plan, cut: str) -> Footprint:
        tensors = self._tensors("server", cut)
        trained, held = _trained(tensors), _bytes(tensors.values())
        static = held + self._training(trained)
        if plan.copies:  # gradients are of one copy at a time; frozen weights are shared
            gradients = sum(tensor.nbytes for tensor in trained)
            buffers = sum(tensor.nbytes for tensor in tensors.values() if not isinstance(tensor, nn.Parameter))
            copy = self._training(trained) + buffers
            static = held + plan.copies * copy + gradients
        return _played(plan.server, {"server": _behind(self.step, cut)}, 0, _Sizes(self._config.batch_size), static)

    def _tensors(self, part: str, cut: str) -> dict[str, Tensor]:
        """All that a part holds; an auxiliary's weights that only it trains are marked as such."""
        if part != "auxiliary":
            names = self._analysis.parts([cut], tied="untie")[0][part]
            return {name: self._analysis.tensors[name] for name in names}
        return {name: self._opened(name, tensor) for name, tensor in self._auxiliaries.at(cut).items()}

    def _opened(self, name: str, tensor: Tensor) -> Tensor:
        model = self._analysis.model
        if (
            isinstance(self._auxiliaries, RidgeStates)
            or not is_language_model(model)
            or not is_trained_in_auxiliary(model, self._config.lora, name)
        ):
            return tensor
        return nn.Parameter(torch.empty_like(tensor, device="meta"))

    def _training(self, trained: Sequence[Tensor]) -> int:
        """Gradients, and what the optimizer remembers."""
        optimizer = self._config.optimizer
        weights = {str(number): tensor for number, tensor in enumerate(trained)}
        return nbytes(weights) + nbytes(state_shapes(optimizer.name, weights, optimizer.momentum))

    def _step(self, prepare: Callable[[nn.Module], None] | None = None, *, graph: bool = True) -> Step:
        def prepared(model: nn.Module) -> None:
            self._leave_out(model)
            if prepare is not None:
                prepare(model)

        return training_step(self._analysis, prepared, self._loss, graph=graph)

    def _steps_without(self, cut: str, *, trained: bool) -> tuple[Step, Step]:
        """Steps of the client's part and the auxiliary: of the model without what the auxiliary leaves out.

        They serve all cuts whose auxiliaries leave out the same. Where clients do not train the auxiliary, its weights
        are frozen from the last of these cuts on in the first step, which so tells all of what comes before a cut, and
        from the first cut on in the second one, which tells all of what comes behind.
        """
        assert isinstance(self._auxiliaries, AuxiliaryStates)
        recipe = self._auxiliaries.recipe(cut)
        left_out = tuple(call.name for call in recipe.left_out)
        if left_out not in self._steps:
            cuts = [name for name in self._analysis.cut_names if self._leaves_out(name) == left_out]
            # Only where something before it is trained does a gradient come back to a cut.
            cuts = [name for name in cuts if _trained(self._tensors("client", name))] or cuts
            taken = {
                place: self._step(partial(self._made_small, recipe, place, trained)) for place in {cuts[-1], cuts[0]}
            }
            self._steps[left_out] = taken[cuts[-1]], taken[cuts[0]]
        return self._steps[left_out]

    def _made_small(self, recipe: Recipe, cut: str, trained: bool, model: nn.Module) -> None:
        """Leave out what an auxiliary leaves out; behind the cut train what clients train of it, or nothing."""
        _shorten(model, recipe)
        state = {name: self._opened(name, tensor) for name, tensor in self._auxiliaries.at(cut).items()}
        for name, weight in list(model.named_parameters(remove_duplicate=False)):
            if name not in state:
                continue
            learns = trained and state[name].requires_grad
            if learns and not weight.requires_grad:  # not the weight of the model that it may be tied to
                weight = nn.Parameter(weight.detach().clone())
                set_tensor(model, name, weight)
            weight.requires_grad_(learns)
        if not trained:  # its pass is one with batch statistics and without dropout
            for module in self._modules_behind(cut, model):
                module.training = isinstance(module, _BatchNorm)

    def _modules_behind(self, cut: str, model: nn.Module) -> Iterator[nn.Module]:
        """The modules of a copy of the model that run behind a cut as a whole."""
        returned = self.step.returned
        for name, module in model.named_modules():
            if returned.get(name, 0) > returned[cut] and not cut.startswith(f"{name}."):
                yield module

    def _pass_of(self, cut: str, behind: str) -> Step:
        """A forward pass without a graph, of the client's part and what is behind it."""
        recipe = None
        if behind == "auxiliary":
            assert isinstance(self._auxiliaries, AuxiliaryStates)
            recipe = self._auxiliaries.recipe(cut)
        key = () if recipe is None else tuple(call.name for call in recipe.left_out)
        if key not in self._passes:
            prepare = None if recipe is None else partial(_shorten, recipe=recipe)
            self._passes[key] = self._step(prepare, graph=False)
        return self._passes[key]

    def _leaves_out(self, cut: str) -> tuple[str, ...] | None:
        assert isinstance(self._auxiliaries, AuxiliaryStates)
        try:
            return tuple(call.name for call in self._auxiliaries.recipe(cut).left_out)
        except SplitError:
            return None


def _shorten(model: nn.Module, recipe: Recipe) -> None:
    """Leave out of a model what an auxiliary leaves out."""
    recipe.leave_out(model)
    recipe.make_linears(model)


class _Cost(NamedTuple):
    """A forward and a backward pass of a part, on a batch."""

    kept: int
    forward: int
    backward: int
    without_cut_gradient: int
    """The FLOPs of the backward pass, if nobody asks for the gradient of the cut."""
    alive: int = 0
    """The most bytes alive in a forward pass without a graph, besides what has crossed the cut."""
    left: int = 0
    """What it leaves alive: of the client's part, what crosses."""


class _Sizes(NamedTuple):
    """What a role's step works on."""

    batch: int
    inputs: int = 0
    """Bytes of the inputs of a batch."""
    weights: int = 0
    """Bytes of the weights that the role trains."""


def _front(step: Step, cut: str) -> _Cost:
    forward = sum(step.flops[: step.returned[cut]])
    backward = step.client_flops(cut) - forward
    return _Cost(step.client_kept(cut), forward, backward, backward)


def _behind(step: Step, cut: str) -> _Cost:
    forward = sum(step.flops[step.returned[cut] : step.loss_at])
    both, less = (step.server_flops(cut, cut_gradient=wanted) - forward for wanted in (True, False))
    return _Cost(step.server_kept(cut), forward, both, less)


def _with_passes(costs: Mapping[str, _Cost], behind: str, alive: tuple[int, int], crosses: int) -> dict[str, _Cost]:
    """The costs with what forward passes without a graph need: the most before and behind the cut, and what crosses."""
    client, other = costs["client"], costs[behind]
    return {
        "client": client._replace(alive=alive[0], left=crosses),
        behind: other._replace(alive=alive[1] - crosses),
    }


def _played(events: Sequence[Event], costs: Mapping[str, _Cost], shared: int, sizes: _Sizes, static: int) -> Footprint:
    """The peak of what is needed besides the weights, and the sum of all operations."""
    kept = peak = flops = 0
    if any(event.what == "pass" for event in events):
        kept = sizes.inputs
    opened: list[str] = []
    for event in events:
        if event.what in ("direction", "moved", "back"):
            # A direction is made of a vector as long that is not yet of length 1.
            kept += -sizes.weights if event.what == "back" else sizes.weights
            peak = max(peak, kept + (sizes.weights if event.what == "direction" else 0))
        cost, share = costs.get(event.part), event.samples / sizes.batch
        if cost is None:
            continue
        if event.what == "close":
            opened.remove(event.part)
            flops += int((cost.backward if event.cut_gradient else cost.without_cut_gradient) * share)
            kept -= int(cost.kept * share) - (shared if opened else 0)
            continue
        flops += int(cost.forward * share)
        if event.what == "open":
            kept += int(cost.kept * share) - (shared if opened else 0)
            peak = max(peak, kept)
            opened.append(event.part)
        elif event.what == "pass":
            peak = max(peak, kept + int(cost.alive * share))
            kept += int(cost.left * share)
    return Footprint(static, peak, flops)


def _trained(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    unique = {id(tensor): tensor for tensor in tensors.values() if tensor.requires_grad}
    return list(unique.values())


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())


def _loss_of(config: Config, task: Task) -> Callable[[Any], Tensor]:
    """The task's loss of outputs without data, for targets of the right shapes.

    A task may pick what counts by values, as that of texts does; then it is an entropy of everything.
    """
    (indices,) = example_shapes([config.batch_size])

    def loss(output: Any) -> Tensor:
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        if not tensors:
            raise without_tensor(output)
        if task.sizes_vary:
            return torch.log_softmax(tensors[0].float(), -1).mean()
        target = task.training_batch(indices, torch.Generator()).target
        there = {name: torch.empty_like(tensor, device=tensors[0].device) for name, tensor in target.items()}
        return task.loss(output, there)

    return loss
