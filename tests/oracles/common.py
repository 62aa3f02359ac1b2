"""What the oracles share: parts and their weights, optimizers, the F-server's average, and the bytes."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from tests.oracles.averaging import Correction, FedOpt, zeros_of_trained
from tests.oracles.given import Given, Target, Tensors

# --------------------------------------------------------------------------------------------------- parts of a model


def new_part(given: Given, part: str) -> nn.Module:
    """A module of its own with the initial weights, in training mode."""
    module = given.parts[part]()
    load(module, given.initial[part])
    return module.train()


def load(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replaces weights and buffers. Those that `tensors` does not name (frozen ones) stay."""
    unexpected = module.load_state_dict(tensors, strict=False).unexpected_keys
    assert not unexpected, unexpected


def state(given: Given, part: str, module: nn.Module) -> Tensors:
    """A copy of the trained weights and the buffers: what travels as a model."""
    tensors = module.state_dict()
    return {name: tensors[name].clone() for name in given.initial[part]}


def frozen(given: Given, parts: Iterable[str]) -> list[Tensor]:
    """The weights of these parts that nobody trains; one that is shared (has the same memory) comes once."""
    found: dict[int, Tensor] = {}
    for part in parts:
        for name, tensor in given.parts[part]().state_dict().items():
            if name not in given.initial[part]:
                found[tensor.data_ptr()] = tensor
    return list(found.values())


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def new_optimizer(given: Given, module: nn.Module, lr: float, weight_decay: float) -> Optimizer:
    """The optimizer of a client or of the S-server, for one part."""
    plain = {"lr": lr, "weight_decay": weight_decay, "foreach": False, "fused": False}
    if given.optimizer == "adam":
        return Adam(trained(module), **plain)
    if given.optimizer == "adamw":
        return AdamW(trained(module), **plain)
    if given.optimizer == "sgd":
        return SGD(trained(module), momentum=given.momentum, **plain)
    raise ValueError(given.optimizer)


@contextmanager
def running_statistics_untouched(module: nn.Module) -> Iterator[None]:
    """Training mode, in which BatchNorm uses the batch's statistics, but without moving the running ones."""
    norms = [inner for inner in module.modules() if isinstance(inner, nn.BatchNorm2d)]
    module.train()
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True


def cut_gradient(given: Given, module: nn.Module, z: Tensor, target: Target, create_graph: bool = False) -> Tensor:
    """The gradient with respect to z of the mean loss behind the cut. It changes nothing in the module."""
    z = z.detach().requires_grad_()
    with running_statistics_untouched(module):
        loss = given.loss(module(z), target)
    (gradient,) = torch.autograd.grad(loss, z, create_graph=create_graph)
    return gradient


# -------------------------------------------------------------------------------------------------------------- bytes


class Ledger:
    """Bytes by (round, client, "up" or "down", kind)."""

    def __init__(self) -> None:
        self.bytes: Counter[tuple[int, int, str, str]] = Counter()

    def bill(self, t: int, client: int, direction: str, kind: str, tensors: Iterable[Tensor]) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if size:
            self.bytes[t, client, direction, kind] += size

    def bill_upload(self, t: int, client: int, z: Tensor, target: Target) -> None:
        self.bill(t, client, "up", "activations", [z])
        self.bill(t, client, "up", "labels", target.values())


# ------------------------------------------------------------------------------------------------------------ clients


@dataclass
class Client:
    """One client: its own copy of the parts that it holds, and an optimizer for each, which lasts for the whole run."""

    number: int
    parts: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    last_round: int | None = None
    """The last round that it took part in."""
    corrections: dict[str, Correction] = field(default_factory=dict)
    """By part: what FedProx and SCAFFOLD add to its gradients."""
    held: nn.Module | None = None
    """With a hold: its client part as it was when it got its auxiliary."""


def new_clients(given: Given, held: Iterable[str]) -> list[Client]:
    """The federation's clients with their initial parts."""
    clients = []
    for number in range(given.clients):
        parts = {part: new_part(given, part) for part in held}
        optimizers = {}
        for part, module in parts.items():
            decay = given.weight_decay if part in ("client", "server") else given.auxiliary_weight_decay
            lr = given.decoder_lr if part == "decoder" else given.lr
            optimizers[part] = new_optimizer(given, module, lr, decay)
        clients.append(Client(number, parts, optimizers))
    return clients


def cohort_of(given: Given, clients: list[Client], t: int) -> list[Client]:
    return [clients[number] for number in given.cohorts[t]]


def interleaved(given: Given, cohort: list[Client], t: int) -> Iterator[tuple[int, list[Client]]]:
    """Step by step, the clients that have a batch for it."""
    k = 0
    while present := [client for client in cohort if (t, client.number, k) in given.batches]:
        yield k, present
        k += 1


def backward_and_step(loss: Tensor, optimizers: Iterable[Optimizer]) -> None:
    """One step of each optimizer on the gradient of a loss."""
    optimizers = list(optimizers)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()


def start_optimizers(given: Given, optimizers: Iterable[Optimizer]) -> None:
    """At the start of a client's round: with `resets_optimizers` they remember nothing, as new ones."""
    for optimizer in optimizers if given.resets_optimizers else ():
        optimizer.state.clear()


def step_on_cut_gradient(client: Client, z: Tensor, gradient: Tensor) -> None:
    """The client part steps on a gradient that comes from behind the cut: its Jacobian times the gradient."""
    client.optimizers["client"].zero_grad()
    z.backward(gradient)
    client.optimizers["client"].step()


# ------------------------------------------------------------------------------------------------------- the F-server


def average(states: list[Tensors], weights: list[float]) -> Tensors:
    """The weighted mean of every floating tensor; of an integer counter the largest."""
    total = sum(weights)
    mean: Tensors = {}
    for name, first in states[0].items():
        if first.is_floating_point():
            mean[name] = sum(weight / total * one[name] for one, weight in zip(states, weights, strict=True))
        else:
            mean[name] = torch.stack([one[name] for one in states]).amax(dim=0)
    return mean


def averages_within(every: int, first: int, end: int) -> bool:
    """Whether one of the rounds from `first` until before `end` ends with an average, if every `every`-th does."""
    return any((t + 1) % every == 0 for t in range(first, end))


class FServer:
    """It averages parts of the clients (Algorithm 2), and sends the averages to them."""

    def __init__(
        self,
        given: Given,
        ledger: Ledger,
        kinds: Mapping[str, tuple[str, ...]],
        held: Iterable[str],
        every: int = 1,
    ) -> None:
        """`kinds`: by kind of message, the parts in it, which are averaged; `held`: all parts that a client has;
        `every`: how many rounds lie between two averages."""
        self.given = given
        self.ledger = ledger
        self.kinds = kinds
        self.held = list(held)
        self.every = every
        self.newest = {part: dict(given.initial[part]) for parts in kinds.values() for part in parts}
        self.optimizers = {part: FedOpt(given, part) for part in self.newest}
        self.controls = {part: zeros_of_trained(given, part) for part in self.newest} if given.scaffold else {}
        """SCAFFOLD's c."""
        self.moments: dict[str, list[Tensors]] = {}
        """By part, for each of its trained weights: the mean of what the optimizers of the last cohort remember."""

    def first_download(self) -> None:
        """Before round 0: all that a client holds."""
        for client in self.given.cohorts[0]:
            for part in self.held:
                self.ledger.bill(-1, client, "down", "first download", self.given.initial[part].values())
            self.ledger.bill(-1, client, "down", "first download", frozen(self.given, self.held))

    def send_newest(self, t: int, client: Client) -> None:
        """At the start of a client's round, if there is a newer average than its own. Who was there in the round that
        made it has paid already."""
        start_optimizers(self.given, client.optimizers.values())
        for part, moments in self.moments.items():
            for weight, mean in zip(trained(client.parts[part]), moments, strict=True):
                client.optimizers[part].state[weight] = {name: value.clone() for name, value in mean.items()}
        comes_first = client.last_round is None
        if self.is_due(t, client):
            for part, tensors in self.newest.items():
                load(client.parts[part], tensors)
                self.correct(client, part)
        if t > 0 and comes_first:
            self.ledger.bill(t, client.number, "down", "first download", frozen(self.given, self.held))
        if t > 0 and (comes_first or averages_within(self.every, client.last_round + 1, t)):
            self.bill("down", t, client)
        client.last_round = t

    def is_due(self, t: int, client: Client) -> bool:
        """Whether the client starts round t from the newest average, and not from its own weights."""
        return client.last_round is None or averages_within(self.every, client.last_round, t)

    def next_state(self, client: Client, part: str) -> Tensors:
        """What the client would start the round after the last one with."""
        if self.is_due(self.given.rounds, client):
            return self.newest[part]
        return state(self.given, part, client.parts[part])

    def correct(self, client: Client, part: str) -> None:
        """FedProx and SCAFFOLD need to know what was received."""
        if self.given.proximal == 0 and not self.given.scaffold:
            return
        if part not in client.corrections:
            client.corrections[part] = Correction(self.given, client.parts[part], client.optimizers[part])
        client.corrections[part].receive(self.newest[part], self.controls.get(part))

    def aggregate(self, t: int, cohort: list[Client]) -> None:
        """At the end of a round: updates come up, the averages go down."""
        if not cohort or not averages_within(self.every, t, t + 1):
            return
        for part in self.newest:
            if self.given.averages_optimizers:
                self.moments[part] = self.mean_moments(part, cohort)
            mean = average_part(self.given, part, cohort)
            self.newest[part] = self.optimizers[part].step(self.newest[part], mean)
            if self.given.scaffold:
                self.move_control(part, [client.corrections[part].new_control() for client in cohort])
        for client in cohort:
            self.bill("up", t, client)
            self.bill("down", t, client)

    def mean_moments(self, part: str, cohort: list[Client]) -> list[Tensors]:
        """Moments are averaged like weights; a counter of steps becomes the largest."""
        total = sum(self.given.weights[client.number] for client in cohort)
        means = []
        for weights in zip(*(trained(client.parts[part]) for client in cohort), strict=True):
            states = [client.optimizers[part].state[own] for client, own in zip(cohort, weights, strict=True)]
            mean: Tensors = {}
            for name in states[0]:
                if states[0][name] is None:
                    continue
                shares = [self.given.weights[client.number] / total for client in cohort]
                values = [state[name] for state in states]
                if name == "step":
                    mean[name] = max(values)
                else:
                    mean[name] = sum(share * value for share, value in zip(shares, values, strict=True))
            means.append(mean)
        return means

    def move_control(self, part: str, changes: list[Tensors]) -> None:
        """SCAFFOLD: c moves by the changes of the c_i, over the number of all clients. So it stays their mean."""
        self.controls[part] = {
            name: c + sum(change[name] for change in changes) / self.given.clients
            for name, c in self.controls[part].items()
        }

    def bill(self, direction: str, t: int, client: Client) -> None:
        for kind, parts in self.kinds.items():
            for part in parts:
                self.ledger.bill(t, client.number, direction, kind, self.newest[part].values())
                # the change of c_i on the way up, c on the way down: of the same size
                self.ledger.bill(t, client.number, direction, "control", self.controls.get(part, {}).values())
                for moments in self.moments.get(part, []):
                    arrays = [value for name, value in moments.items() if name != "step"]
                    self.ledger.bill(t, client.number, direction, "optimizer state", arrays)

    def all_controls(self, clients: list[Client]) -> dict[int, dict[str, Tensors]]:
        """For `Found`: c_i of those who have one, and c as that of client -1."""
        if not self.given.scaffold:
            return {}
        own = {client.number: {part: one.own_control for part, one in client.corrections.items()} for client in clients}
        return {**own, -1: self.controls}


def average_part(given: Given, part: str, cohort: list[Client]) -> Tensors:
    """The cohort's average of one part."""
    states = [state(given, part, client.parts[part]) for client in cohort]
    return average(states, [given.weights[client.number] for client in cohort])
