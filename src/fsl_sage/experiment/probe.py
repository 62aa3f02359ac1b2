"""The quantities of the paper's theory, measured on fixed probe batches of every client (`--theory N`).

The paper bounds the gradient of f(x) = 1/m sum_i F_i(x) by constants that it does not measure: the estimation error
eps^t of the auxiliaries, the variances sigma_L^2, sigma_hat_L^2 and sigma_G^2, and Lipschitz constants. Here each
client's distribution D_i is the uniform one on `BATCHES` mini-batches, drawn once for the whole run. On it every mean
and every variance is exact, so that the numbers can be checked against a second computation.

All passes are without a trace: weights are copies, batch norms use the batch's own statistics and leave the running
ones alone, dropout is off, images are not augmented. So measuring changes no bit of the training.

A Lipschitz constant is measured along the way that the run takes: the largest secant |g(u) - g(v)| / |u - v| with
u = x^t and v = x^{t+1}. That is a lower bound of the constant, so a bound computed with it is not a proof.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fsl_sage.algorithms import Algorithm, names_where
from fsl_sage.engines.base import Setup
from fsl_sage.errors import InputError, listed
from fsl_sage.models.norm import batch_statistics
from fsl_sage.precision import wide
from fsl_sage.problems.base import Batch
from fsl_sage.problems.batches import batch_indices
from fsl_sage.roles.client import local_batch_sizes
from fsl_sage.roles.protocols import Parts
from fsl_sage.roles.replica import Replica, Slots
from fsl_sage.roles.work import Workbench, boundary
from fsl_sage.seeding import generator
from fsl_sage.split import with_gradients
from fsl_sage.wire.message import Tensors

PARTS = ("client", "server", "auxiliary")

BATCHES = 4
"""Probe batches of a client, of the run's batch size, as far as it has examples for them."""


@dataclass(frozen=True)
class Point:
    """Where a run stands between two rounds: x_c, x_s, and by client the auxiliary x_{a,i} that it will use."""

    parts: Parts
    auxiliaries: Mapping[int, Tensors]


@dataclass(frozen=True)
class Quantities:
    """What is measured of round t at x^t, the weights before it, and on the way to x^{t+1}. Squares of norms."""

    loss: float
    """f(x^t), the mean over the clients."""
    client_gradient: float
    """|grad_c f(x^t)|^2, of the client part."""
    server_gradient: float
    """|grad_s f(x^t)|^2, of the server part."""
    estimation_error: float
    """eps^t: the mean over the clients of |grad_c F_hat_i - grad_c F_i|^2."""
    cut_error: float
    """The mean over clients and batches of |z_hat_b - z_b|^2: the auxiliaries' true loss L_i (equation 10)."""
    variance: float
    """sigma_L^2: the largest variance over a client's batches of the gradient of F_i."""
    estimate_variance: float
    """sigma_hat_L^2: the same of the estimated gradient of the client part."""
    heterogeneity: float
    """sigma_G^2: the largest |grad F_i - grad f|^2 of a client."""
    smoothness: float
    """L_c: the largest secant of the gradient of F_i on a batch."""
    estimate_smoothness: float
    """L_hat_c: the largest secant of the estimated gradient, the auxiliary being the same at both ends."""
    client_lipschitz: float
    """L_zf: the largest secant of the smashed data of a batch with respect to the client part."""
    local_steps: int
    """K, of the client with the most."""
    uploads: int
    """Q, the uploads of that client in a round."""


class _Gradients(NamedTuple):
    """Of one batch at one point, flat and wide."""

    loss: Tensor
    smashed: Tensor
    cut: Tensor
    """z_b."""
    estimated_cut: Tensor
    client: Tensor
    server: Tensor
    estimated: Tensor
    """The client part's gradient by the auxiliary."""

    @property
    def whole(self) -> Tensor:
        return torch.cat([self.client, self.server])


class Probe:
    """Measures a run on probe batches, with modules of its own."""

    def __init__(self, setup: Setup, asked_by: str = "--theory") -> None:
        """Refuse algorithms that the theory is not about; `asked_by` is the option that asks for it."""
        if not _estimates_gradients(type(setup.algorithm)):
            others = listed(names_where(_estimates_gradients), "or")
            raise InputError(
                f"{asked_by} measures how well auxiliaries estimate gradients, and the clients of "
                f"{setup.settings.config.algorithm} have none: give {others}."
            )
        self._setup = setup
        self._slots = Workbench({part: setup.modules[part] for part in PARTS}).slots

    def measure(self, before: Point, after: Point) -> dict[str, float | int]:
        """The quantities of the round that led from one point to the other, by name."""
        sums = _Sums()
        moved = _distance(self._slots, before.parts, after.parts)
        for client in range(self._setup.settings.config.clients):
            auxiliary = before.auxiliaries[client]
            here, there = {**before.parts, "auxiliary": auxiliary}, {**after.parts, "auxiliary": auxiliary}
            pairs = ((self._gradients(here, b), self._gradients(there, b)) for b in self._batches(client))
            sums.add_client(pairs, moved)
        steps, uploads = _steps(self._setup)
        return asdict(sums.quantities(steps, uploads))

    def _batches(self, client: int) -> Iterator[Batch]:
        config, examples = self._setup.settings.config, self._setup.examples[client]
        order = batch_indices(len(examples), config.batch_size, generator(config.seed, "theory", client))
        for indices in order[:BATCHES]:
            yield self._setup.settings.task.plain_batch(examples[indices])

    def _gradients(self, parts: Parts, batch: Batch) -> _Gradients:
        """Forward and backward through the whole model, and through the auxiliary in the server's place."""
        task, passes = self._setup.settings.task, self._setup.settings.passes
        replicas = self._replicas(parts)
        z = self._smashed(replicas["client"].module(), batch)
        roots = [tensor for tensor in z if tensor.requires_grad]
        module = replicas["server"].module()
        with batch_statistics(module), passes.autocast():
            loss = task.loss(task.output(module, z, batch.target), batch.target)
        wanted = [*roots, *replicas["server"].weights]
        true = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
        cut = true[: len(roots)]
        _, estimated_cut = with_gradients(z, passes.cut_gradient(replicas["auxiliary"].module(), z, batch.target)[0])
        gradients = [replicas["client"].back(roots, own) for own in (cut, estimated_cut)]
        server = replicas["server"].flat(true[len(roots) :])
        joined = (_joined(roots), _joined(cut), _joined(estimated_cut))
        return _Gradients(wide(loss.detach()), *joined, gradients[0], server, gradients[1])

    def _replicas(self, parts: Parts) -> "dict[str, _Trained]":
        return {part: _Trained(self._slots[part], {**self._setup.initial[part], **parts[part]}) for part in PARTS}

    def _smashed(self, client: torch.nn.Module, batch: Batch) -> tuple[Tensor, ...]:
        inputs = batch.inputs
        with batch_statistics(client), self._setup.settings.passes.autocast():
            return boundary(client(**inputs) if isinstance(inputs, Mapping) else client(inputs))

    def parameter_fidelity(self, point: Point) -> dict[str, float | None]:
        """How well the estimated gradient of one batch points to where other examples' loss falls, by name.

        For each client, the gradient of the client part's weights that the auxiliary estimates for its first probe
        batch is compared with the true gradient of all other probe batches of all clients. Beside it stands the same of
        the first batch's own true gradient. Both are cosines, the mean over the clients; None where a gradient is zero.
        """
        everyone = torch.zeros(())
        firsts = []
        task = self._setup.settings.task
        for client in range(self._setup.settings.config.clients):
            parts = {**point.parts, "auxiliary": point.auxiliaries[client]}
            for number, batch in enumerate(self._batches(client)):
                true, estimated = self._of_client_part(parts, batch, estimated=number == 0)
                whole = true * task.terms(batch.target)
                everyone = everyone + whole
                if estimated is not None:
                    firsts.append((whole, estimated))
        estimates = [_cosine(estimated, everyone - own) for own, estimated in firsts]
        truths = [_cosine(own, everyone - own) for own, _ in firsts]
        return {"fidelity_parameters_cosine": _mean_of(estimates), "fidelity_parameters_cosine_true": _mean_of(truths)}

    def _of_client_part(self, parts: Parts, batch: Batch, *, estimated: bool) -> tuple[Tensor, Tensor | None]:
        """The client part's gradient of the mean loss, flat, and if asked for what the auxiliary estimates of it."""
        passes = self._setup.settings.passes
        replicas = self._replicas(parts)
        z = self._smashed(replicas["client"].module(), batch)
        wanted = ("server", "auxiliary") if estimated else ("server",)
        cuts = [passes.cut_gradient(replicas[part].module(), z, batch.target)[0] for part in wanted]
        found = [replicas["client"].back(*with_gradients(z, cut)) for cut in cuts]
        return found[0], found[1] if estimated else None


class _Trained:
    """One part's weights in its module, ready to get gradients."""

    def __init__(self, slots: Slots, tensors: Tensors) -> None:
        self._replica = Replica(slots, tensors, None)
        self.weights = [w.requires_grad_() for w in self._replica.parameters().values()]

    def module(self) -> torch.nn.Module:
        return self._replica.module()

    def back(self, roots: Sequence[Tensor], cut: Sequence[Tensor]) -> Tensor:
        """[all weights of the part]: the cut gradients of what it gave, carried back to its weights."""
        return self.flat(torch.autograd.grad(roots, self.weights, cut, retain_graph=True, allow_unused=True))

    def flat(self, gradients: tuple[Tensor | None, ...]) -> Tensor:
        """[all weights of the part]; a weight that the loss does not reach has gradient 0."""
        pairs = zip(self.weights, gradients, strict=True)
        return _joined([torch.zeros_like(weight) if own is None else own for weight, own in pairs])


class _Sums:
    """Sums over the clients, which are added one after the other."""

    def __init__(self) -> None:
        self._loss, self._error, self._cut_error = [], [], []  # type: tuple[list[float], list[float], list[float]]
        self._largest = dict.fromkeys(("variance", "estimate_variance", "L", "L_hat", "L_zf"), 0.0)
        self._means: list[_Mean] = []
        self._sizes = (0, 0)

    def add_client(self, pairs: Iterator[tuple[_Gradients, _Gradients]], moved: "_Moved") -> None:
        mean, estimate = _Mean(), _Mean()
        losses, cuts = [], []
        for here, there in pairs:
            self._sizes = here.client.numel(), here.server.numel()
            mean.add(here.whole)
            estimate.add(here.estimated)
            losses.append(float(here.loss))
            cuts.append(float((here.estimated_cut - here.cut).square().sum()))
            self._raise("L", _norm(here.whole - there.whole), moved.whole)
            self._raise("L_hat", _norm(here.estimated - there.estimated), moved.client)
            self._raise("L_zf", _norm(here.smashed - there.smashed), moved.client)
        self._loss.append(_average(losses))
        self._cut_error.append(_average(cuts))
        self._error.append(float((estimate.mean - mean.mean[: self._sizes[0]]).square().sum()))
        self._largest["variance"] = max(self._largest["variance"], mean.variance)
        self._largest["estimate_variance"] = max(self._largest["estimate_variance"], estimate.variance)
        self._means.append(mean)

    def _raise(self, name: str, difference: float, distance: float) -> None:
        if distance > 0:
            self._largest[name] = max(self._largest[name], difference / distance)

    def quantities(self, steps: int, uploads: int) -> Quantities:
        gradient = sum((mean.mean for mean in self._means), torch.zeros(())) / len(self._means)
        client, server = torch.split(gradient, list(self._sizes))
        apart = [float((mean.mean - gradient).square().sum()) for mean in self._means]
        return Quantities(
            loss=_average(self._loss),
            client_gradient=float(client.square().sum()),
            server_gradient=float(server.square().sum()),
            estimation_error=_average(self._error),
            cut_error=_average(self._cut_error),
            variance=self._largest["variance"],
            estimate_variance=self._largest["estimate_variance"],
            heterogeneity=max(apart),
            smoothness=self._largest["L"],
            estimate_smoothness=self._largest["L_hat"],
            client_lipschitz=self._largest["L_zf"],
            local_steps=steps,
            uploads=uploads,
        )


class _Mean:
    """The mean of vectors and the mean square of their distances from it."""

    def __init__(self) -> None:
        self.count, self._squares = 0, 0.0
        self.mean = torch.zeros(())

    def add(self, vector: Tensor) -> None:
        """Welford's update, which loses no digits if the variance is small compared with the mean."""
        self.count += 1
        before = vector - self.mean
        self.mean = self.mean + before / self.count
        self._squares += float((before * (vector - self.mean)).sum())

    @property
    def variance(self) -> float:
        return self._squares / self.count


class _Moved(NamedTuple):
    """How far a round has moved the weights."""

    client: float
    whole: float


def _distance(slots: Mapping[str, Slots], before: Parts, after: Parts) -> _Moved:
    squares = {
        part: sum(float((wide(after[part][n]) - wide(before[part][n])).square().sum()) for n in slots[part].trainable)
        for part in ("client", "server")
    }
    return _Moved(squares["client"] ** 0.5, (squares["client"] + squares["server"]) ** 0.5)


def _steps(setup: Setup) -> tuple[int, int]:
    """(K, Q): local steps of the client with the most, and its uploads in a round."""
    config = setup.settings.config
    steps = max(len(local_batch_sizes(len(examples), config)) for examples in setup.examples)
    return steps, -(-steps // getattr(setup.algorithm.options, "upload_every", 1))


def _estimates_gradients(kind: type[Algorithm]) -> bool:
    """Whether the theory is about an algorithm: its clients have auxiliaries for the gradients of an S-server."""
    return kind.has_s_server and "auxiliary" in kind.holds and not kind.own_parts


def _joined(tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return torch.cat([wide(tensor.detach().flatten()) for tensor in tensors])


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))


def _average(values: list[float]) -> float:
    return sum(values) / len(values)


def _cosine(one: Tensor, other: Tensor) -> float | None:
    lengths = _norm(one) * _norm(other)
    return float((one * other).sum()) / lengths if lengths > 0 else None


def _mean_of(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _average(known) if known else None
