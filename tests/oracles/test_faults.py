"""An oracle is worth what it notices: each of these faults, put into the package, must make the comparison fail."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from fsl_sage import optimizers
from fsl_sage.algorithms.fedgkt import FedGKT
from fsl_sage.algorithms.locfedmix_sl import LocFedMixSL
from fsl_sage.alignment.dataset import AlignmentData, Upload
from fsl_sage.config import Config
from fsl_sage.engines import base as engine_base
from fsl_sage.problems.base import Batch
from fsl_sage.roles import averaging, corrections, f_server, fed_opt, s_server
from fsl_sage.roles import client as client_role
from fsl_sage.roles.averaging import RunningSum
from fsl_sage.roles.client import Client
from fsl_sage.roles.copies import Copies
from fsl_sage.roles.f_server import FServer
from fsl_sage.roles.protocols import Parts, Update
from fsl_sage.roles.replica import Replica
from fsl_sage.roles.s_server import SServer
from fsl_sage.roles.work import Settings
from fsl_sage.wire.ledger import Ledger
from fsl_sage.wire.paths import flat
from tests.oracles import ORACLES
from tests.oracles.given import Found
from tests.oracles.subject import compare, run_of
from tests.oracles.test_images import AVERAGING, DIRICHLET, SETTINGS, check, followed, found_and_expected

Patch = pytest.MonkeyPatch
Oracle = Callable[[Config], tuple[Found, Found, object]]
_PROPER: dict[str, Found] = {}


def notices(config: Config, patch: Patch, fault: Callable[[Patch], None], oracle: Oracle = found_and_expected) -> None:
    """With the fault the package finds other weights than the oracle says; without it, it does not.

    All faults of a configuration share what the oracle says.
    """
    key = repr(replace(config, out=Path()))
    if key not in _PROPER:
        found, _PROPER[key], _ = oracle(config)
        compare(found, _PROPER[key])
    fault(patch)
    with pytest.raises(AssertionError, match="is off by"):
        compare(run_of(followed(config))[1], _PROPER[key])


def scrambled_alignment(patch: Patch) -> None:
    """What `torch.autograd.grad` gives goes into `.grad` as it is, and a fused optimizer takes it."""

    proper = torch.autograd.backward

    def backward(loss: object, *more: object, inputs: list[torch.Tensor] | None = None) -> None:
        if more or inputs is None:  # not the alignment's call
            proper(loss, *more, inputs=inputs)
            return
        for weight, gradient in zip(inputs, torch.autograd.grad(loss, inputs, allow_unused=True), strict=True):
            weight.grad = gradient

    patch.setattr(torch.autograd, "backward", backward)
    patch.setattr(optimizers, "_check", lambda *_: None)


def lost_optimizer_state(patch: Patch) -> None:
    """Clients start every round with a new optimizer."""
    patch.setattr(Replica, "load_optimizer_state", lambda self, state: None)


def kept_optimizer_state(patch: Patch) -> None:
    """Clients start a round with the state of the round before, though they should not."""
    patch.setattr(Settings, "keeps_optimizer", lambda self, averaged: True)


def copies_keep_their_state(patch: Patch) -> None:
    """The S-server's copies do, the clients do not."""

    def keep(self: Copies, client: int, copy: Replica) -> None:
        self.optimizers[client] = copy.optimizer_state()

    patch.setattr(Copies, "_keep_optimizer", keep)


def moved_statistics(patch: Patch) -> None:
    """A second forward pass moves the client part's running statistics, and nothing else."""
    forward = Client.forward

    def twice(self: Client, batch: object) -> object:
        with torch.no_grad():
            forward(self, batch)
        return forward(self, batch)

    patch.setattr(Client, "forward", twice)


def wrong_weight(patch: Patch) -> None:
    """The average counts every client the same."""
    average = averaging.average
    patch.setattr(averaging, "average", lambda states, weights: average(states, [1.0] * len(weights)))
    init = averaging.RunningMean.__init__
    patch.setattr(
        averaging.RunningMean, "__init__", lambda self, weights, *more: init(self, [1.0] * len(weights), *more)
    )


def skipped_upload(patch: Patch) -> None:
    """The S-server answers one upload of the run without learning from it."""
    step, skipped = Replica.step, []

    def skip_one(self: SServer, client: int, smashed: object, **options: bool) -> object:
        if not skipped:
            skipped.append(client)
            patch.setattr(Replica, "step", lambda self, lr: self.optimizer.zero_grad(set_to_none=True))
        try:
            return learn(self, client, smashed, **options)
        finally:
            patch.setattr(Replica, "step", step)

    learn = SServer.learn
    patch.setattr(SServer, "learn", skip_one)


def other_samples(patch: Patch) -> None:
    """Of an upload that does not fit any more, the first samples are kept instead of the last."""
    patch.setattr(
        Upload,
        "last",
        lambda self, count: Upload(
            tuple(x[:count] for x in self.z), {name: x[:count] for name, x in self.target.items()}
        ),
    )


def older_samples(patch: Patch) -> None:
    """An alignment sees only what came up before the newest upload."""
    add, held = AlignmentData.add, {}

    def one_late(self: AlignmentData, smashed: object) -> None:
        add(self, held.get(id(self), smashed))
        held[id(self)] = smashed

    patch.setattr(AlignmentData, "add", one_late)


def probe_moves_statistics(patch: Patch) -> None:
    """The perturbed pass moves the running statistics too."""
    patch.setattr(client_role, "without_trace", lambda module: nullcontext())


def one_direction_a_round(patch: Patch) -> None:
    """All steps of a client's round go along the direction of the first."""
    direction = Client.direction

    def first(self: Client) -> torch.Tensor:
        step, self.step_index = self.step_index, 0
        u = direction(self)
        self.step_index = step
        return u

    patch.setattr(Client, "direction", first)


def longer_direction(patch: Patch) -> None:
    """u is not of length 1."""
    direction = Client.direction
    patch.setattr(Client, "direction", lambda self: 1.001 * direction(self))


def stays_moved(patch: Patch) -> None:
    """After the perturbed pass the weights stay where they were moved to."""

    @contextmanager
    def moved(self: Client, u: torch.Tensor, by: float) -> Iterator[None]:
        self.move(u, by)
        yield

    patch.setattr(Client, "moved", moved)


def uploads_perturbed(patch: Patch) -> None:
    """What goes up is of the perturbed pass."""
    loss = Client.loss

    def perturbed(self: Client, batch: object, part: str, *, leaves_trace: bool = True) -> object:
        z, value = loss(self, batch, part, leaves_trace=leaves_trace)
        if leaves_trace:
            with self.moved(self.direction(), 1e-2):
                z, _ = loss(self, batch, part, leaves_trace=False)
        return z, value

    patch.setattr(Client, "loss", perturbed)


WITHOUT_BACKWARD: list[Callable[[Patch], None]] = [
    probe_moves_statistics,
    one_direction_a_round,
    longer_direction,
    stays_moved,
    uploads_perturbed,
]


def logits_by_place_in_batch(patch: Patch) -> None:
    """An example is taught by the logits of another one that had its place in a batch."""
    patch.setattr(torch, "searchsorted", lambda known, wanted: torch.arange(len(wanted)))


def features_in_training_mode(patch: Patch) -> None:
    """What a client sends is computed with the statistics of the batch."""

    def infer(self: Client, batch: Batch, part: str) -> tuple[object, object]:
        with torch.no_grad():
            z = self.forward(batch)
            return z, self.output(part, *z)

    patch.setattr(Client, "infer", infer)


def divergence_without_square(patch: Patch) -> None:
    """The divergence is not multiplied by the temperature's square."""
    divergence = FedGKT._divergence
    patch.setattr(FedGKT, "_divergence", lambda self, *args: divergence(self, *args) / self.options.temperature**2)


def divergence_the_other_way(patch: Patch) -> None:
    """KL(student || teacher)."""
    kl_div = functional.kl_div
    patch.setattr(functional, "kl_div", lambda student, teacher, **options: kl_div(teacher, student, **options))


def never_taught(patch: Patch) -> None:
    """A client does not look at the server's logits."""
    patch.setattr(FedGKT, "on_download", lambda self, client, message: None)


BY_LOGITS: list[Callable[[Patch], None]] = [
    logits_by_place_in_batch,
    features_in_training_mode,
    divergence_without_square,
    divergence_the_other_way,
    never_taught,
]


def shared_reply(patch: Patch) -> None:
    """The reply to a client is multiplied by its share of the data."""
    join = SServer.join
    patch.setattr(
        SServer, "join", lambda self, client, upload, share: tuple(share * g for g in join(self, client, upload, share))
    )


def fixed_share(patch: Patch) -> None:
    """All mixtures have both in equal parts."""
    partners = LocFedMixSL._partners
    patch.setattr(LocFedMixSL, "_partners", lambda self, *given: [(j, 0.5) for j, _ in partners(self, *given)])


def mixtures_move_statistics(patch: Patch) -> None:
    """The running statistics are of mixed activations too."""
    patch.setattr(s_server, "without_trace", lambda module: nullcontext())


def detached_encoder(patch: Patch) -> None:
    """The reconstruction trains the decoder alone."""
    gradient = Client.gradient
    patch.setattr(Client, "gradient", lambda self, *given: tuple(torch.zeros_like(g) for g in gradient(self, *given)))


def one_learning_rate(patch: Patch) -> None:
    """The decoder has the client part's learning rate."""
    step = Client.step
    patch.setattr(Client, "step", lambda self, **lr: step(self))


def skipped_joint_step(patch: Patch) -> None:
    """The S-server leaves out one step of the run."""
    step, skipped = SServer.step, []

    def skip_one(self: SServer, k: int) -> None:
        if skipped:
            step(self, k)
        else:
            self._model.optimizer.zero_grad(set_to_none=True)
            skipped.append(k)

    patch.setattr(SServer, "step", skip_one)


MIXED: list[Callable[[Patch], None]] = [
    shared_reply,
    fixed_share,
    mixtures_move_statistics,
    detached_encoder,
    one_learning_rate,
    skipped_joint_step,
]


def decay_for_a_pull(patch: Patch) -> None:
    """FedProx pulls to zero, not to what was received."""

    def pull(client: Client, proximal: float, parts: Iterable[str]) -> None:
        for part in parts:
            for weight in client.parameters(part).values():
                weight.grad.add_(weight.detach(), alpha=proximal)

    patch.setattr(client_role, "pull", pull)


def pull_to_the_start(patch: Patch) -> None:
    """FedProx pulls to the weights before round 0."""
    first: dict[str, torch.Tensor] = {}

    def pull(client: Client, proximal: float, parts: Iterable[str]) -> None:
        for part in parts:
            for name, weight in client.parameters(part).items():
                start = first.setdefault(f"{part}/{name}", client.received[part][name].clone())
                weight.grad.add_(weight.detach() - start, alpha=proximal)

    patch.setattr(client_role, "pull", pull)


def optimised_buffers(patch: Patch) -> None:
    """FedOpt takes its step with BatchNorm's statistics too."""
    init = FServer.__init__

    def all_trained(self: FServer, initial: Parts, averaged: Sequence[str], *more: object) -> None:
        init(self, initial, averaged, *more)
        self._trained = {path for path, x in flat(self.weights).items() if x.is_floating_point()}

    patch.setattr(FServer, "__init__", all_trained)


def lost_moments(patch: Patch) -> None:
    """FedOpt starts anew in every round."""
    step = FServer._step
    patch.setattr(FServer, "_step", lambda self, average: (self.extra.clear(), step(self, average))[1])


def no_first_variance(patch: Patch) -> None:
    """FedOpt's v starts at 0 instead of tau squared."""
    patch.setattr(torch, "full_like", lambda tensor, value: torch.zeros_like(tensor))


def adam_for_yogi(patch: Patch) -> None:
    """Yogi's second moment is Adam's."""
    patch.setitem(fed_opt.SECOND_MOMENTS, "yogi", fed_opt.SECOND_MOMENTS["adam"])


def swapped_controls(patch: Patch) -> None:
    """SCAFFOLD corrects by c_i - c."""
    controls = corrections._controls
    patch.setattr(corrections, "_controls", lambda *where: controls(*where)[::-1])


def controls_of_the_cohort(patch: Patch) -> None:
    """SCAFFOLD's c moves by the mean over the cohort, not over all clients."""
    take, renew = FServer.take, FServer._renew_control
    counts = []

    def counted(self: FServer, averaged: Parts, updates: Sequence[Update]) -> None:
        counts.append(len(updates))
        take(self, averaged, updates)

    def fewer(self: FServer, changes: RunningSum) -> None:
        every, self.client_weights = self.client_weights, self.client_weights[: counts[-1]]
        renew(self, changes)
        self.client_weights = every

    patch.setattr(FServer, "take", counted)
    patch.setattr(FServer, "_renew_control", fewer)


def controls_by_steps(patch: Patch) -> None:
    """SCAFFOLD divides by the number of steps, not by the learning rates."""
    renew = corrections.renew_controls

    def by_steps(client: Client, parts: Iterable[str]) -> object:
        client.lr_used = client.step_index + 1
        return renew(client, parts)

    patch.setattr(engine_base, "renew_controls", by_steps)


def forgotten_controls(patch: Patch) -> None:
    """A client keeps no c_i."""
    renew = corrections.renew_controls

    def forget(client: Client, parts: Iterable[str]) -> object:
        changes = renew(client, parts)
        client.extra = {name: torch.zeros_like(c) for name, c in client.extra.items()}
        return changes

    patch.setattr(engine_base, "renew_controls", forget)


EVERYWHERE: list[Callable[[Patch], None]] = [lost_optimizer_state, moved_statistics, wrong_weight]
AT_THE_S_SERVER: list[Callable[[Patch], None]] = [skipped_upload]
IN_ALIGNMENT: list[Callable[[Patch], None]] = [scrambled_alignment, other_samples, older_samples]
NO_FAULT = [
    ("heron-sfl", lost_optimizer_state),  # its clients have no optimizer state
    ("fedgkt", wrong_weight),  # nothing is averaged
    ("fedgkt", skipped_upload),  # its S-server does not learn from single uploads
    ("locfedmix-sl", skipped_upload),  # nor does this one: see skipped_joint_step
]
FAULTS = [
    *((algorithm, fault) for algorithm in ORACLES for fault in EVERYWHERE if (algorithm, fault) not in NO_FAULT),
    *(
        (algorithm, fault)
        for algorithm in ORACLES
        for fault in AT_THE_S_SERVER
        if algorithm != "fedavg" and (algorithm, fault) not in NO_FAULT
    ),
    *(("fsl-sage", fault) for fault in IN_ALIGNMENT),
    *(("heron-sfl", fault) for fault in WITHOUT_BACKWARD),
    *(("fedgkt", fault) for fault in BY_LOGITS),
    *(("locfedmix-sl", fault) for fault in MIXED),
]


@pytest.mark.parametrize(("algorithm", "fault"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_the_oracle_notices(subject, monkeypatch, algorithm, fault):
    rounds = 3 if fault in IN_ALIGNMENT else 2
    notices(subject(DIRICHLET, algorithm=algorithm, decoder_lr=3e-3, rounds=rounds), monkeypatch, fault)


@pytest.mark.parametrize(
    ("algorithm", "fault"),
    [("fedavg", kept_optimizer_state), ("splitfed-ms", kept_optimizer_state), ("splitfed-ms", copies_keep_their_state)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_oracle_notices_an_optimizer_that_was_not_new(subject, monkeypatch, algorithm, fault):
    notices(subject(DIRICHLET, algorithm=algorithm, client_optimizer="reset", rounds=2), monkeypatch, fault)


def optimizers_counted_alike(patch: Patch) -> None:
    """The mean of optimizers' states does not weigh clients by their examples."""
    mean = f_server.mean_of_optimizers
    patch.setattr(f_server, "mean_of_optimizers", lambda weights: mean([1.0] * len(weights)))


def averaged_step_counters(patch: Patch) -> None:
    """Adam's counter of steps is averaged too, and no longer the largest."""
    patch.setattr(f_server, "mean_of_optimizers", averaging.RunningMean)


def optimizers_not_taken_over(patch: Patch) -> None:
    """What came down for the optimizers is not used."""
    patch.setattr(Client, "set_optimizer_state", lambda self, part, state: None)


@pytest.mark.parametrize(
    "fault",
    [optimizers_counted_alike, averaged_step_counters, optimizers_not_taken_over],
    ids=lambda value: value.__name__,
)
def test_the_oracle_notices_in_an_average_of_optimizers(subject, monkeypatch, fault):
    # Batches of 4 make 6 steps of 22 images, and 5 of 21.
    notices(subject(DIRICHLET, algorithm="fedavg", client_optimizer="average", batch_size=4), monkeypatch, fault)


AVERAGING_FAULTS: dict[str, list[Callable[[Patch], None]]] = {
    "fedprox": [decay_for_a_pull, pull_to_the_start],
    "momentum": [optimised_buffers, lost_moments],
    "yogi": [optimised_buffers, lost_moments, no_first_variance, adam_for_yogi],
    "scaffold": [swapped_controls, controls_of_the_cohort, controls_by_steps, forgotten_controls],
}


@pytest.mark.parametrize(
    ("averaging", "fault"),
    [(name, fault) for name, faults in AVERAGING_FAULTS.items() for fault in faults],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_oracle_notices_in_an_average(subject, monkeypatch, averaging, fault):
    config = subject(SETTINGS["Dirichlet, cohort 2 of 3"], AVERAGING[averaging], algorithm="fedavg")
    notices(config, monkeypatch, fault)


@pytest.mark.parametrize("name", ["upload", "reply", "model"])
def test_the_oracle_notices_a_byte_that_was_not_billed(subject, monkeypatch, name):
    kind = {"upload": "activations", "reply": "cut gradients", "model": "client model"}[name]
    bill = Ledger.bill
    monkeypatch.setattr(
        Ledger, "bill", lambda self, t, client, way, what, n: bill(self, t, client, way, what, n - (what == kind))
    )
    with pytest.raises(AssertionError):
        check(subject(algorithm="splitfed-ss"))


@pytest.mark.parametrize("way", ["up", "down"])
def test_the_oracle_notices_a_control_that_was_not_billed(subject, monkeypatch, way):
    bill = Ledger.bill
    monkeypatch.setattr(
        Ledger,
        "bill",
        lambda self, t, client, to, kind, n: bill(self, t, client, to, kind, n * ((to, kind) != (way, "control"))),
    )
    with pytest.raises(AssertionError):
        check(subject(AVERAGING["scaffold"], algorithm="fedavg"))
