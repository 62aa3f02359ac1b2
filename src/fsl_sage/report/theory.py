"""The paper's bounds for a run that has measured its constants (`--theory N`): Theorems 1 and 2 and the corollary.

Everything is read from the run's directory. The assumptions hold for all weights; a run sees only its own way. So each
constant is the largest that was measured in any round: a lower bound of the true one. Where a bound needs a constant
that nothing can measure, the docstrings below say what is taken for it.

The paper divides Phi by T in all three statements. Its proof sums Phi over T rounds and divides by T once, so Phi
itself must stand there; that is what is computed here.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fsl_sage.algorithms import resolve
from fsl_sage.config import Config
from fsl_sage.errors import InputError
from fsl_sage.records.run_directory import RunDirectory


class Condition(NamedTuple):
    """A step size, and the largest that is allowed."""

    name: str
    value: float
    limit: float
    in_paper: bool = True
    """Whether the theorem states it. The proof needs two more (after its equation for the client-side bound)."""

    @property
    def holds(self) -> bool:
        """Whether the step size is allowed."""
        return self.value <= self.limit


class Bound(NamedTuple):
    """A measured left-hand side and the terms of the right-hand side; None for what cannot be told."""

    name: str
    left: float | None
    terms: dict[str, float] | None

    @property
    def right(self) -> float | None:
        """The right-hand side."""
        return None if self.terms is None else sum(self.terms.values())


@dataclass(frozen=True)
class Constants:
    """The largest that were measured, and what the configuration says."""

    clients: int
    local_steps: int
    uploads: int
    client_lr: float
    server_lr: float
    variance: float
    estimate_variance: float
    heterogeneity: float
    smoothness: float
    estimate_smoothness: float
    client_lipschitz: float

    @property
    def slower(self) -> float:
        """min{eta_L, m eta}."""
        return min(self.client_lr, self.clients * self.server_lr)

    def conditions(self) -> list[Condition]:
        """The step sizes that Theorem 1 allows, and two that its proof needs without stating them."""
        K, Q, m = self.local_steps, self.uploads, self.clients
        return [
            Condition(
                "eta_L <= 1 / (2 sqrt(10) K L_hat_c)",
                self.client_lr,
                _over(2 * math.sqrt(10) * K * self.estimate_smoothness),
            ),
            Condition("eta <= 1 / (4 sqrt(2) Q L_c)", self.server_lr, _over(4 * math.sqrt(2) * Q * self.smoothness)),
            Condition("eta_L <= 1 / (K L_c)", self.client_lr, _over(K * self.smoothness), in_paper=False),
            Condition("eta <= 1 / (m Q L_c)", self.server_lr, _over(m * Q * self.smoothness), in_paper=False),
        ]

    def factors(self) -> tuple[float, float] | None:
        """(c, c'): the smaller and the larger of 1/2 - 20 K² eta_L² L_hat_c² and 1/2 - 16 Q² eta² L_c².

        They are the largest that the proof allows. None where one is not above 0: then there is no bound.
        """
        client = 0.5 - 20 * (self.local_steps * self.client_lr * self.estimate_smoothness) ** 2
        server = 0.5 - 16 * (self.uploads * self.server_lr * self.smoothness) ** 2
        return (min(client, server), max(client, server)) if min(client, server) > 0 else None

    def phi(self) -> float:
        """Phi(eta_L, eta) of Theorem 1."""
        factors = self.factors()
        assert factors is not None
        c, c_prime = factors
        K, Q, m = self.local_steps, self.uploads, self.clients
        eta_L, eta = self.client_lr, self.server_lr
        inner = (
            eta_L**2 * self.estimate_variance * self.smoothness
            + 40 * m * K * eta_L**3 * self.estimate_smoothness**2 * (self.estimate_variance + K * self.heterogeneity)
            + m**2 * eta**2 * self.variance * self.smoothness
            + 32 * Q * m**2 * eta**3 * self.smoothness**2 * (self.variance + Q * self.heterogeneity)
        )
        return c_prime * K / (2 * c**2 * m * Q * self.slower) * inner


@dataclass(frozen=True)
class Theory:
    """What a run says about the paper's theory."""

    constants: Constants
    measured: list[dict[str, Any]]
    """The rounds that were measured: `round`, and the quantities of `fsl_sage.experiment.probe`."""
    rounds: int
    bounds: list[Bound]
    remarks: list[str]
    """What of the run the theory is not about."""


def theory_of(path: Path | str) -> Theory:
    """Read what a run has measured, and compute the bounds for it.

    Args:
        path: The directory of a run, finished or not, that was given --theory N.
    """
    directory = RunDirectory(path)
    config, lines = resolve(directory.config()), directory.metrics()
    try:
        measured = [{"round": line["round"], **line["theory"]} for line in lines if "theory" in line]
        if not measured:
            raise InputError(f"{path} has not measured the theory's quantities: give --theory N to 'fsl-sage run'.")
        constants = _constants(config, measured)
        found = bounds(config, constants, measured, len(lines))
    except (TypeError, KeyError, AttributeError, ArithmeticError):
        raise InputError(f"{directory.metrics_file} is damaged: what it says of the theory is no numbers.") from None
    return Theory(constants, measured, len(lines), found, _remarks(config))


def as_plain(theory: Theory) -> dict[str, Any]:
    """The same as plain values, for JSON; what has no bound is None, for JSON has no infinity."""
    values = {
        "constants": asdict(theory.constants),
        "conditions": [{**each._asdict(), "holds": each.holds} for each in theory.constants.conditions()],
        "bounds": [{**each._asdict(), "right": each.right} for each in theory.bounds],
        "measured": theory.measured,
        "remarks": theory.remarks,
    }
    return _finite(values)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def bounds(config: Config, constants: Constants, measured: Sequence[dict[str, Any]], rounds: int) -> list[Bound]:
    """Theorem 1, Theorem 2 and the corollary on lazy alignment after so many rounds.

    f* is taken as 0, which no loss is below. Theorem 2 and the corollary speak of the least error eps_star of the best
    auxiliary, and of a constant C. Neither can be measured: the smallest cut error of any round stands for eps_star,
    and C is the smallest for which the paper's eps^t <= L_zf² eps_star + C_1 / sqrt(t) holds in all measured rounds. So
    these two are fitted to the run, and only Theorem 1 is computed from constants alone.
    """
    every = getattr(config.options, "align_every", None) or 1
    aligned = [line for line in measured if line["round"] % every == every - 1]
    at_all, at_aligned = _least_gradient(measured), _least_gradient(aligned)
    names = ("Theorem 1", "Theorem 2", "Corollary (lazy)")
    if (factors := constants.factors()) is None:
        return [Bound(name, left, None) for name, left in zip(names, (at_all, at_aligned, at_aligned), strict=True)]
    c = factors[0]
    K, Q = constants.local_steps, constants.uploads
    weight = 3 * K * constants.client_lr / (2 * c * Q * constants.slower)
    start = {"start": measured[0]["loss"] / (c * constants.slower * Q * rounds)}
    noise = {"noise (Phi)": constants.phi()}
    errors = [line["estimation_error"] for line in measured]
    best = constants.client_lipschitz**2 * min(line["cut_error"] for line in measured)
    excess = max(math.sqrt(max(line["round"], 1)) * max(line["estimation_error"] - best, 0.0) for line in measured)
    until = getattr(config.options, "align_until", None)
    last = rounds if until is None else min(until, rounds)
    stale = math.inf if last == 0 and excess else excess * (1 + last / rounds) / math.sqrt(max(last, 1))
    return [
        Bound(names[0], at_all, start | {"estimation error": weight * sum(errors) / len(errors)} | noise),
        Bound(
            names[1],
            at_aligned,
            start
            | {"learning the auxiliary": weight * 2 * excess / math.sqrt(rounds), "best auxiliary": weight * best}
            | noise,
        ),
        Bound(
            names[2],
            at_aligned,
            start | {"learning the auxiliary": weight * stale, "best auxiliary": weight * best} | noise,
        ),
    ]


def _constants(config: Config, measured: Sequence[dict[str, Any]]) -> Constants:
    def most(name: str) -> float:
        return max(line[name] for line in measured)

    lr, server_lr = config.optimizer.lr, config.optimizer.server_lr
    return Constants(
        clients=config.clients,
        local_steps=measured[0]["local_steps"],
        uploads=measured[0]["uploads"],
        client_lr=lr,
        server_lr=lr if server_lr is None else server_lr,
        variance=most("variance"),
        estimate_variance=most("estimate_variance"),
        heterogeneity=most("heterogeneity"),
        smoothness=most("smoothness"),
        estimate_smoothness=most("estimate_smoothness"),
        client_lipschitz=most("client_lipschitz"),
    )


def _least_gradient(measured: Sequence[dict[str, Any]]) -> float | None:
    return min((line["client_gradient"] + line["server_gradient"] for line in measured), default=None)


def _remarks(config: Config) -> list[str]:
    """Where the run is not the algorithm that the theory analyses."""
    optimizer, found = config.optimizer, []
    if optimizer.name != "sgd" or optimizer.momentum:
        with_momentum = " with momentum" if optimizer.name == "sgd" else ""
        found.append(f"The theory is about plain SGD; this run used {optimizer.name}{with_momentum}.")
    if optimizer.schedule != "constant" or optimizer.warmup:
        found.append("The theory is about constant learning rates; the bounds use --optimizer.lr itself.")
    if optimizer.weight_decay:
        found.append("The theory has no weight decay.")
    if config.cohort < 1:
        found.append("The theory has all clients in every round.")
    if config.averaging.weighting != "uniform":
        found.append("The theory averages uniformly; f is the uniform mean over the clients.")
    return found


def _over(denominator: float) -> float:
    return math.inf if denominator == 0 else 1 / denominator
