"""Where to cut a model: what every cut costs, which cuts fit given limits, and which one to take."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from fsl_sage.algorithms import find_algorithm
from fsl_sage.config import CodecConfig, Config
from fsl_sage.errors import InputError, listed
from fsl_sage.experiment.costs import cost
from fsl_sage.experiment.planning import Planner, RidgeStates, auxiliary_states
from fsl_sage.experiment.revealing import revealed
from fsl_sage.experiment.role_plan import plan_of
from fsl_sage.models import is_language_model, is_trained_in_auxiliary, statistics_names
from fsl_sage.problems.images.problem import ImageProblem
from fsl_sage.problems.make import make_dry_problem
from fsl_sage.problems.parts import META, build_model
from fsl_sage.roles.footprint import Footprint
from fsl_sage.split import Analysis, AuxiliaryStates, CutPoint, SplitError, cut_points_of
from fsl_sage.units import bytes_text
from fsl_sage.wire.message import (
    ACTIVATIONS,
    AUXILIARY,
    CLIENT_MODEL,
    CONTROL,
    CUT_GRADIENTS,
    DECODER,
    OPTIMIZER_STATE,
    nbytes,
)


@dataclass(frozen=True)
class Limits:
    """A client's limits; None means no limit."""

    client_memory: float | None = None
    """Bytes of memory for a training step."""
    uplink: float | None = None
    """Bytes that a client may send in a round."""
    client_flops: float | None = None
    """Floating-point operations of a training step."""


@dataclass(frozen=True)
class CutCosts:
    """A cut and what it costs."""

    point: CutPoint
    round_bytes: dict[str, int | None]
    """Bytes of a round by algorithm; None where the cut allows no such auxiliary."""
    sent: int | None
    """Bytes that one client sends in a round of the configured algorithm."""
    revealed: float | None = None
    """The distance correlation of images with what crosses, 0 to 1; None where the model takes no images."""
    client: Footprint | None = None
    """Memory and operations of a client's step; None if the cut allows no such auxiliary."""
    server: Footprint | None = None
    """The same for the S-server; None if the algorithm has none."""

    def weighed(self, algorithm: str) -> float:
        """The bytes of a round divided by 1 - the distance correlation: a cut that reveals more counts as dearer."""
        return (self.round_bytes[_column(algorithm)] or 0) / (1 - min(self.revealed or 0.0, 0.999))

    def obstacles(self, limits: Limits) -> list[str]:
        """The limits that this cut exceeds: memory, uplink, FLOPs; or auxiliary, where it allows none."""
        return [*self.excess(limits)]

    def excess(self, limits: Limits) -> dict[str, float]:
        """By the limit that this cut exceeds, how many times the limit it needs."""
        if self.client is None or self.sent is None:
            return {"auxiliary": math.inf}
        wanted = {
            "memory": (self.client.memory, limits.client_memory),
            "uplink": (self.sent, limits.uplink),
            "FLOPs": (self.client.step_flops, limits.client_flops),
        }
        return {name: need / limit for name, (need, limit) in wanted.items() if limit is not None and need > limit}


def cuts_of(config: Config) -> list[CutCosts]:
    """Every cut of the configured model, in the model's order.

    All is computed on the meta device, without weights, but what the cuts reveal of images.
    """
    problem = make_dry_problem(config)
    model = build_model(config, problem, META)
    analysis = Analysis(model, problem.largest_example(config.batch_size, META))
    if not analysis.cut_names:
        raise InputError(f"--model.name {config.model.name} cannot be cut anywhere: {analysis.why_nowhere()}.")
    if config.model.cut is not None and config.model.cut not in analysis.cut_names:
        names = ", ".join(analysis.cut_names)
        raise InputError(f"--model.cut {config.model.cut} is not a cut of {config.model.name}: give one of {names}.")
    auxiliaries = auxiliary_states(config, problem, analysis)
    planner = Planner(config, problem, analysis, auxiliaries)
    points = cut_points_of(analysis, planner.step)
    travelling = _Travelling(config, analysis, auxiliaries)
    travels = {point.name: travelling.at(point) for point in points}
    # A round's bytes of each kind are in proportion to what travels, so the ledger of one cut where all kinds do, if
    # there is one, gives those of all cuts.
    known = max(travels, key=lambda name: sum(map(bool, travels[name].values())))
    costs = _without_decoders(config, cost(replace(config, model=replace(config.model, cut=known))))
    reveals = revealed(config, problem, points) if isinstance(problem, ImageProblem) else {}
    if _in_proportion(config, costs):
        rows = [_costs_at(config, costs, point, travels[point.name], travels[known]) for point in points]
    else:
        rows = [_priced(config, point) for point in points]
    plan = plan_of(config, problem, known)
    planned = [planner.at(plan, point.name) for point in points]
    return [
        replace(row, revealed=reveals.get(row.point.name), client=steps.get("client"), server=steps.get("server"))
        for row, steps in zip(rows, planned, strict=True)
    ]


def _without_decoders(config: Config, costs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The algorithms whose bytes at one cut determine those at the others."""
    known = {name: row for name, row in costs.items() if DECODER not in row["by_kind"]}
    if config.algorithm not in known and config.algorithm in costs:
        raise InputError(
            f"The cuts of {config.algorithm} cannot be priced together, because each has another decoder: give "
            "--no-decoder, or another --algorithm."
        )
    return known


class _Travelling:
    """The bytes of what travels, by the ledger's kinds; only those that depend on the cut."""

    def __init__(self, config: Config, analysis: Analysis, auxiliaries: AuxiliaryStates | RidgeStates) -> None:
        self._analysis = analysis
        self._auxiliaries = auxiliaries
        self._config = config
        local = config.model.batch_norm == "local"
        self._stays = statistics_names(analysis.model) if local else frozenset()

    def at(self, point: CutPoint) -> dict[str, int | None]:
        """The bytes at one cut, by kind; None for an auxiliary that this cut does not allow."""
        parts, _ = self._analysis.parts([point.name], tied="untie")
        client = {name: self._analysis.tensors[name] for name in parts["client"] if name in self._analysis.saved}
        return {
            CLIENT_MODEL: self._averaged(client),
            AUXILIARY: self._auxiliary(point.name),
            ACTIVATIONS: sum(tensor.nbytes for tensor in point.tensors),
            CUT_GRADIENTS: sum(tensor.nbytes for tensor in point.tensors if tensor.has_gradient),
        }

    def _auxiliary(self, cut: str) -> int | None:
        try:
            state = self._auxiliaries.at(cut)
        except SplitError:
            return None
        if isinstance(self._auxiliaries, RidgeStates) or not is_language_model(self._analysis.model):
            return self._averaged(state)
        return self._averaged(state) + self._opened(state)

    def _opened(self, state: Mapping[str, Tensor]) -> int:
        """Weights of a language model that are trained in its auxiliary alone."""
        model, lora = self._analysis.model, self._config.lora
        frozen = {name: x for name, x in state.items() if isinstance(x, Parameter) and not x.requires_grad}
        return nbytes({name: x for name, x in frozen.items() if is_trained_in_auxiliary(model, lora, name)})

    def _averaged(self, tensors: Mapping[str, Tensor]) -> int:
        """Frozen weights stay where they are, and tied ones travel once."""
        travel = (tensor for name, tensor in tensors.items() if name not in self._stays)
        unique = {id(tensor): tensor for tensor in travel if tensor.requires_grad or not isinstance(tensor, Parameter)}
        return sum(tensor.numel() * tensor.element_size() for tensor in unique.values())


def _in_proportion(config: Config, costs: dict[str, dict[str, Any]]) -> bool:
    """Whether the bytes of every kind are in proportion to what travels, so that one cut tells those of all."""
    kinds = {kind for name in costs if "server" not in find_algorithm(name).averaged for kind in costs[name]["by_kind"]}
    return config.codec == CodecConfig() and not kinds & {OPTIMIZER_STATE, CONTROL}


def _priced(config: Config, point: CutPoint) -> CutCosts:
    """The costs at a cut by a dry round there, of the configuration's algorithm alone."""
    name = config.algorithm
    try:
        row = cost(replace(config, model=replace(config.model, cut=point.name)), algorithms=[name])[name]
    except SplitError:
        return CutCosts(point, {_column(name): None}, None)
    up, down = (sum(table[way] for table in row["by_kind"].values()) for way in ("up", "down"))
    return CutCosts(point, {_column(name): up + down}, up // _cohort(config))


def _cohort(config: Config) -> int:
    return max(1, round(config.cohort * config.clients))


def _costs_at(
    config: Config,
    costs: dict[str, dict[str, Any]],
    point: CutPoint,
    here: Mapping[str, int | None],
    there: Mapping[str, int | None],
) -> CutCosts:
    """The costs at `point`, scaled from those of a known cut.

    Args:
        config: The configuration; its algorithm decides what a client sends.
        costs: The costs of the known cut, by algorithm.
        point: The cut in question.
        here: What travels at `point`, in bytes by kind.
        there: What travels at the known cut.
    """

    def scaled(by_kind: dict[str, dict[str, int]], ways: Sequence[str]) -> int | None:
        total = 0
        for kind, table in by_kind.items():
            size, reference = here.get(kind, 1), there.get(kind, 1)
            if size is None or reference is None:
                return None
            total += sum(table[way] for way in ways) * size // (reference or 1)
        return total

    both = ("up", "down")
    by_algorithm = {name: scaled(row["by_kind"], both) for name, row in costs.items() if _column(name) == name}
    if here[AUXILIARY] is None:
        by_algorithm |= {name: None for name in by_algorithm if "auxiliary" in find_algorithm(name).holds}
    sent = scaled(costs[config.algorithm]["by_kind"], ("up",))
    return CutCosts(point, by_algorithm, None if sent is None else sent // _cohort(config))


def best(cuts: Sequence[CutCosts], limits: Limits, algorithm: str) -> CutCosts | None:
    """The cut that fits and moves the fewest bytes in a round, weighed by what it reveals (`CutCosts.weighed`).

    Among equals it is the one with the fewest client FLOPs.
    """
    fitting = [each for each in _possible(cuts, algorithm) if not each.obstacles(limits)]
    return min(fitting, key=lambda each: (each.weighed(algorithm), _flops(each)), default=None)


def _flops(costs: CutCosts) -> int:
    return costs.client.step_flops if costs.client else 0


def _column(algorithm: str) -> str:
    return find_algorithm(algorithm).moves_like or algorithm


def _possible(cuts: Sequence[CutCosts], algorithm: str) -> list[CutCosts]:
    """The cuts with an auxiliary and with something to train at the client."""
    moved = _column(algorithm)
    return [each for each in cuts if each.round_bytes[moved] is not None and each.point.client_trainable_bytes]


def recommend(cuts: Sequence[CutCosts], limits: Limits, algorithm: str) -> str:
    """The cut to take, and why, in a sentence or two."""
    possible, chosen = _possible(cuts, algorithm), best(cuts, limits, algorithm)
    if not possible:
        return "No cut has something to train at the client and such an auxiliary: --model.auxiliary chooses another."
    if chosen is None:
        least = min(possible, key=lambda each: (len(each.excess(limits)), max(each.excess(limits).values())))
        needs = [f"{_times(times)} the limit of {name}" for name, times in least.excess(limits).items()]
        return f"No cut fits these limits; {least.point.name} comes closest: it needs {listed(needs)}."
    reveals = "" if chosen.revealed is None else f" It reveals {chosen.revealed:.2f} of 1."
    moved = chosen.round_bytes[_column(algorithm)] or 0
    return (
        f"Recommended: {chosen.point.name}. {_reason(possible, chosen, limits, algorithm)}: {bytes_text(moved)}; a "
        f"client's step needs {_memory(chosen)} of memory.{reveals}{_without_auxiliary(cuts, algorithm)}"
    )


def _reason(possible: Sequence[CutCosts], chosen: CutCosts, limits: Limits, algorithm: str) -> str:
    """Why this cut is the one to take; the bytes of a round there are to follow."""
    out = sum(bool(each.obstacles(limits)) for each in possible)
    others = f"({out} {'does' if out == 1 else 'do'} not)"
    if len(possible) - out == 1:
        fits = f" that fits {others}" if out else ""
        return f"It is the only cut{fits}. The bytes of a round of {algorithm} there"
    among = f"Of the {len(possible) - out} cuts that fit {others}" if out else f"Of {len(possible)} cuts"
    weighed = "" if chosen.revealed is None else ", weighed by what they reveal"
    return f"{among} a round of {algorithm} moves the fewest bytes there{weighed}"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} times" if ratio >= 100 else f"{ratio:.{1 if ratio >= 10 else 2}f} times"


def _memory(costs: CutCosts) -> str:
    return bytes_text(costs.client.memory) if costs.client else "an unknown amount"


def _without_auxiliary(cuts: Sequence[CutCosts], algorithm: str) -> str:
    """A sentence on how many cuts are impossible because no auxiliary can be made behind them."""
    count = sum(each.round_bytes[_column(algorithm)] is None for each in cuts)
    if not count:
        return ""
    return f" {count} of {len(cuts)} cuts allow no such auxiliary: --model.auxiliary chooses another."
