"""Averages and corrections that any algorithm may use: FedProx, FedOpt, two-sided learning rates, SCAFFOLD.

They are switched on by `Given.proximal`, `Given.f_server_optimizer` and `Given.scaffold`, and act in every oracle that
has a common.FServer: FedAvg, both SplitFed, joint steps, CSE-FSL, FSL-SAGE, local-loss, LocFedMix-SL, AdaptSFL with one
cut. HERON has no client optimizer, so of these it takes FedOpt alone. SL, CPSL, FedGKT and AdaptSFL with cuts take
none.

FedProx: each gradient of a client gets + μ (x - x_received).
FedOpt: Δ = mean - x, with x the F-server's newest, and
    sgd      m = β1 m + Δ,             x += η m
    adagrad  m = β1 m + (1 - β1) Δ,    v = v + Δ²,                                 x += η m / (√v + τ)
    adam     the same m,               v = β2 v + (1 - β2) Δ²,                     the same step
    yogi     the same m,               v = v - (1 - β2) Δ² sign(v - Δ²),           the same step
Two-sided learning rates: x + η (mean - x), which is FedOpt's sgd with β1 = 0.
SCAFFOLD, option II: each gradient of a client gets + c - c_i. At the end of its round c_i+ = c_i - c + (x - x_i) / Σ
lr, with x and c as received and Σ lr over the steps that it took. Then c += Σ over the cohort (c_i+ - c_i) / (all
clients).

Left open by the specification, chosen here:
1. All of it concerns the parts that the F-server averages, at the clients that hold them. A server part at the S-server
   (SplitFed, CSE-FSL), copies of it that the S-server averages (SplitFed-MS, local-loss) and an auxiliary that the
   F-server does not average (FSL-SAGE) are trained and averaged as ever. So SplitFed-MS = FedAvg is no law with these.
2. The correction is added to the gradient of the loss before the optimizer sees it: before weight decay, momentum and
   Adam's moments. A weight without a gradient in a step gets no correction in it.
3. x_received is what the F-server sent last. Where it averages only every I-th round, that may lie rounds back.
4. FedOpt has no bias correction, m starts at 0 and v at τ² (from memory of Reddi et al., Algorithm 2, which asks for
   v_{-1} >= τ²). The step is divided by √v + τ, not by √(v + τ).
5. adagrad has β1 too, as in Algorithm 2 (the paper's experiments set it to 0).
6. sgd's momentum is the heavy ball m = β1 m + Δ, without a factor 1 - β1: FedAvgM.
7. FedOpt concerns trained weights. Buffers, and counters, take the average's value. There is one m and one v for each
   weight; no state leaves the F-server, so no byte is billed. sgd with η = 1 and β1 = 0 is the average itself.
8. A round with nobody in it leaves x, m, v and c alone.
9. SCAFFOLD starts with c = c_i = 0. Nobody sends zeros before round 0: the first download has no control in it.
10. SCAFFOLD's bytes: kind "control", the size of the trained weights of the averaged parts, up (Δc_i) with each model
    that goes up, down (c) with each model that comes down, also to who returns or comes first after round 0.
11. A client that takes no step in its round keeps its c_i (Σ lr = 0), and sends a change of zero.
12. SCAFFOLD with FedOpt: x takes FedOpt's step, c the plain one. SCAFFOLD refuses an optimizer that is not sgd.
13. SCAFFOLD's c_i contains weight decay and momentum, because x - x_i does.
"""

from torch import Tensor, nn, no_grad, zeros_like
from torch.optim import Optimizer

from tests.oracles.given import Given, Tensors


def trained_names(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def zeros_of_trained(given: Given, part: str) -> Tensors:
    return {name: zeros_like(given.initial[part][name]) for name in trained_names(given.parts[part]())}


class Correction:
    """What FedProx and SCAFFOLD add to the gradients of one part of one client."""

    def __init__(self, given: Given, module: nn.Module, optimizer: Optimizer) -> None:
        if given.scaffold and given.optimizer != "sgd":
            raise ValueError("SCAFFOLD's controls are sums of gradients, which Adam's steps are not")
        self.proximal = given.proximal
        self.scaffold = given.scaffold
        self.weights = {name: dict(module.named_parameters())[name] for name in trained_names(module)}
        self.own_control: Tensors = {name: zeros_like(weight) for name, weight in self.weights.items()}
        """SCAFFOLD's c_i."""
        self.control: Tensors = {}
        """SCAFFOLD's c, as it was received."""
        self.received: Tensors = {}
        self.lr_used = 0.0
        """The sum of the learning rates of all steps since then."""
        optimizer.register_step_pre_hook(self.before_step)

    def receive(self, tensors: Tensors, control: Tensors | None) -> None:
        self.received = {name: tensors[name].clone() for name in self.weights}
        self.control = control or {}
        self.lr_used = 0.0

    def before_step(self, optimizer: Optimizer, *_: object) -> None:
        self.lr_used += optimizer.param_groups[0]["lr"]
        for name, weight in self.weights.items():
            if weight.grad is None:
                continue
            if self.proximal:
                weight.grad = weight.grad + self.proximal * (weight.detach() - self.received[name])
            if self.scaffold:
                weight.grad = weight.grad + self.control[name] - self.own_control[name]

    @no_grad()
    def new_control(self) -> Tensors:
        """The end of a client's round: its new c_i; returns the change."""
        change: Tensors = {}
        for name, weight in self.weights.items():
            if self.lr_used:
                change[name] = (self.received[name] - weight) / self.lr_used - self.control[name]
            else:
                change[name] = zeros_like(weight)
            self.own_control[name] = self.own_control[name] + change[name]
        return change


class FedOpt:
    """The F-server's optimizer of one part."""

    def __init__(self, given: Given, part: str) -> None:
        self.options = given.f_server_optimizer
        self.m: Tensors = {}
        self.v: Tensors = {}
        if self.options is not None:
            self.m = zeros_of_trained(given, part)
            self.v = {name: zeros + self.options.tau**2 for name, zeros in self.m.items()}

    def step(self, x: Tensors, mean: Tensors) -> Tensors:
        """The new x, from the F-server's newest and the cohort's average."""
        options = self.options
        if options is None or (options.kind == "sgd" and options.lr == 1 and options.beta1 == 0):
            return mean
        return {name: self._step_one(name, x[name], mean[name]) if name in self.m else mean[name] for name in mean}

    def _step_one(self, name: str, x: Tensor, mean: Tensor) -> Tensor:
        options = self.options
        delta = mean - x
        if options.kind == "sgd":
            self.m[name] = options.beta1 * self.m[name] + delta
            return x + options.lr * self.m[name]
        self.m[name] = options.beta1 * self.m[name] + (1 - options.beta1) * delta
        self.v[name] = self._second_moment(self.v[name], delta.square())
        return x + options.lr * self.m[name] / (self.v[name].sqrt() + options.tau)

    def _second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        beta2 = self.options.beta2
        if self.options.kind == "adagrad":
            return v + square
        if self.options.kind == "adam":
            return beta2 * v + (1 - beta2) * square
        if self.options.kind == "yogi":
            return v - (1 - beta2) * square * (v - square).sign()
        raise ValueError(self.options.kind)
