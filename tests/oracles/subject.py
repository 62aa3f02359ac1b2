"""The package's side of a comparison with an oracle: a run of its own, and what an oracle must be handed for it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from fsl_sage.alignment import matching
from fsl_sage.config import Config, all_options
from fsl_sage.engines.base import Setup
from fsl_sage.engines.local import LocalEngine
from fsl_sage.experiment.federation import Federation, draw_cohort
from fsl_sage.experiment.setup import make_setup
from fsl_sage.models.conv import Conv2d
from fsl_sage.models.layout import AdaptiveAvgPool2d
from fsl_sage.models.norm import BatchNorm2d
from fsl_sage.problems.batches import batch_indices
from fsl_sage.roles import server_jobs
from fsl_sage.roles.client import local_order
from fsl_sage.seeding import generator, numpy_generator
from fsl_sage.split import Ridge
from fsl_sage.wire.paths import below, grouped
from tests.oracles.given import Alignment, Distillation, Found, FServerOptimizer, Given, Tensors
from tests.oracles.given import Ridge as RidgeOptions


class TinyResNet(nn.Module):
    """Convolutions, BatchNorm and residuals, of the package's own layers; cut after block1."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.bn1 = BatchNorm2d(8)
        self.relu = nn.ReLU()
        self.block1 = _Block(8, 16)
        self.block2 = _Block(16, 32)
        self.block3 = _Block(32, 48)
        self.avgpool = AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(48, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.block3(self.block2(self.block1(x)))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class _Block(nn.Module):
    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.conv1 = Conv2d(channels_in, channels, 3, stride=2, padding=1, bias=False)
        self.bn1 = BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.conv2 = Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = BatchNorm2d(channels)
        self.downsample = nn.Sequential(Conv2d(channels_in, channels, 1, stride=2, bias=False), BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.downsample(x))


Orders = dict[tuple[int, int], list[int]]


def run_of(config: Config) -> tuple[Setup, Found, Orders]:
    """A run of the package on its local engine; what it found, and the order of its alignments' batches."""
    setup = make_setup(config)
    initial = {part: {name: x.clone() for name, x in tensors.items()} for part, tensors in setup.initial.items()}
    engine = LocalEngine(setup)
    federation = Federation(setup, engine)
    try:
        with _recorded_orders() as orders:
            for t in range(config.rounds):
                federation.play_round(t, draw_cohort(config, t))
        found = _found(federation, engine)
    finally:
        engine.close()
    for part, tensors in initial.items():
        assert all(torch.equal(tensors[name], x) for name, x in setup.initial[part].items()), "initial weights changed"
    return setup, found, orders


def _found(federation: Federation, engine: LocalEngine) -> Found:
    setup, weights = federation.setup, federation.weights()
    ledger = federation.ledger
    entries = [entry for t in range(-1, setup.settings.config.rounds) for entry in ledger.entries(t)]
    auxiliaries: dict[int, Tensors] = {}
    if "auxiliary" in setup.algorithm.holds:
        common = weights.get("auxiliary", setup.initial["auxiliary"])
        for client in range(setup.settings.config.clients):
            own = below("own/auxiliary/", engine._clients.get(client, {}))
            waiting = federation.post.waiting.get(client, {}).get("auxiliary", {})
            auxiliaries[client] = {**common, **own, **waiting}
    logits = {
        (client, place): row[None]
        for client, mail in federation.post.waiting.items()
        for place, row in enumerate(mail.get("logits", {}).get("logits", ()))
    }
    books = {(entry.round, entry.client, entry.direction, entry.kind): entry.bytes for entry in entries}
    controls = _controls(federation, engine) if setup.settings.config.averaging.control_variates else {}
    decoders = _next_parts(federation, "decoder") if "decoder" in setup.algorithm.holds else {}
    return Found(
        weights.get("client", {}),
        engine.server.weights() or weights["server"],  # where clients have cuts of their own, from the shallowest on
        auxiliaries,
        books,
        clients=_next_parts(federation, "client"),
        decoders=decoders,
        logits=logits,
        controls=controls,
    )


def _next_parts(federation: Federation, part: str) -> dict[int, Tensors]:
    """By client: the weights of a part that it would start the next round with."""
    post, setup = federation.post, federation.setup
    newest = federation.weights().get(part, setup.initial[part])
    own = {client: parts.get(part, {}) for client, parts in federation.engine.local_tensors().items()}
    return {
        client: {
            **{name: newest[name] for name in setup.initial_of(client, part)},
            **(own.get(client, {}) if version == post.version else {}),
        }
        for client, version in enumerate(post.has)
    }


def _controls(federation: Federation, engine: LocalEngine) -> dict[int, dict[str, Tensors]]:
    """SCAFFOLD's c_i by client and part, and c as that of client -1."""
    states = [engine._clients.get(client, {}) for client in range(federation.setup.settings.config.clients)]
    own = {client: grouped(below("extra/control/", state)) for client, state in enumerate(states)}
    return {**own, -1: grouped(federation.f_server.sends["control"])}


@contextmanager
def _recorded_orders() -> Iterator[Orders]:
    """The package draws the order of alignment batches; it is handed to the oracle as data."""
    orders: Orders = {}
    keys: list[tuple[int, int]] = []
    draw, order = server_jobs.generator, matching._order

    def seen_generator(seed: int, purpose: str, client: int, t: int) -> torch.Generator:
        keys.append((t, client))
        return draw(seed, purpose, client, t)

    def seen_order(*arguments: Any) -> list[int]:
        orders[keys[-1]] = order(*arguments)
        return orders[keys[-1]]

    with patch.object(server_jobs, "generator", seen_generator), patch.object(matching, "_order", seen_order):
        yield orders


def given_for(
    config: Config,
    setup: Setup,
    orders: Orders,
    parts: dict[str, Callable[[], nn.Module]],
    loss: Callable[..., torch.Tensor],
    terms: Callable[..., int],
) -> Given:
    """What the paper leaves open, from the configuration of a run of the package; all of it in float64."""
    task, seed = setup.settings.task, config.seed
    batches = {}
    cohorts = [draw_cohort(config, t) for t in range(config.rounds)]
    for t, cohort in enumerate(cohorts):
        for client in cohort:
            for step, places in enumerate(local_order(len(setup.examples[client]), config, client, t)):
                augmentation = generator(seed, "augment", client, t, step)
                batch = task.training_batch(setup.examples[client][places], augmentation)
                inputs = batch.inputs["input_ids"] if isinstance(batch.inputs, dict) else batch.inputs.double()
                batches[t, client, step] = (inputs, batch.target)
    optimizer, alignment = config.optimizer, config.alignment
    decay = optimizer.auxiliary_weight_decay
    own = all_options(setup.algorithm.options)
    if config.algorithm == "fedgkt":
        own = {"distillation": _distillation(config, setup, cohorts, own)}
    if config.algorithm == "locfedmix-sl":
        own["mixing"] = _mixing(config, batches, own)
    known = {each.name for each in fields(Given)}
    own = {name: value for name, value in own.items() if name in known}
    averaging = setup.algorithm.averaging
    is_sgd = averaging.optimizer in (None, "sgd")
    f_server_optimizer = FServerOptimizer(
        averaging.optimizer or "sgd",
        averaging.rate,
        averaging.momentum if is_sgd else averaging.beta1,
        averaging.beta2,
        averaging.tau,
    )
    return Given(
        parts=parts,
        initial={part: {name: _double(x) for name, x in setup.initial[part].items()} for part in parts},
        weights=list(setup.client_weights),
        cohorts=cohorts,
        batches=batches,
        alignment_orders=orders,
        loss=loss,
        terms=terms,
        clients=config.clients,
        rounds=config.rounds,
        optimizer=optimizer.name,
        lr=optimizer.lr,
        server_lr=optimizer.lr if optimizer.server_lr is None else optimizer.server_lr,
        weight_decay=optimizer.weight_decay,
        auxiliary_weight_decay=optimizer.weight_decay if decay is None else decay,
        momentum=optimizer.momentum,
        resets_optimizers=config.client_optimizer == "reset",
        averages_optimizers=config.client_optimizer == "average",
        proximal=averaging.proximal or 0.0,
        f_server_optimizer=f_server_optimizer,
        scaffold=averaging.control_variates,
        **{name: value for name, value in own.items() if value is not None},
        direction=partial(_direction, seed, setup),
        alignment=Alignment(
            samples=alignment.samples,
            total=alignment.total_samples,
            batch_size=alignment.batch_size,
            optimizer=alignment.optimizer,
            lr=alignment.lr,
            clip=alignment.clip,
            start=alignment.start,
            scope=alignment.scope,
            keeps_optimizer=alignment.optimizer_state == "kept",
            loss=alignment.loss,
            tokens=alignment.tokens,
        ),
        ridge=_ridge(config, setup),
        token_rows=task.term_dimensions == 2,
    )


def _ridge(config: Config, setup: Setup) -> RidgeOptions | None:
    """The options of a ridge auxiliary, and the matrix of its random features, which the package draws."""
    ridge = setup.modules.get("auxiliary")
    if not isinstance(ridge, Ridge):
        return None
    signs = ridge._drawn.signs(ridge.random, ridge.inputs, ridge.seed) if ridge.random else None
    return RidgeOptions(config.alignment.ridge, config.alignment.forgetting, signs)


def _distillation(config: Config, setup: Setup, cohorts: list[list[int]], own: dict[str, Any]) -> Distillation:
    """FedGKT's examples, known by (client, place among its own), and the batches of clients and S-server."""
    own = dict(own)
    epochs, examples = own.pop("server_epochs"), {}
    for client, indices in enumerate(setup.examples):
        for place in range(len(indices)):
            batch = setup.settings.task.training_batch(indices[place : place + 1], torch.Generator())
            examples[client, place] = (batch.inputs.double(), batch.target)
    client_batches, server_batches = {}, {}
    for t, cohort in enumerate(cohorts):
        for client in cohort:
            order = local_order(len(setup.examples[client]), config, client, t)
            client_batches[t, client] = [places.tolist() for places in order]
        there = [(client, place) for client in cohort for place in range(len(setup.examples[client]))]
        server_batches[t] = [
            [there[place] for place in places.tolist()]
            for epoch in range(epochs)
            for places in batch_indices(
                len(there), config.batch_size, generator(config.seed, "server order", round=t, step=epoch)
            )
        ]
    return Distillation(examples, client_batches, server_batches, **own)


def _mixing(config: Config, batches: Mapping[tuple[int, int, int], Any], own: Mapping[str, Any]) -> dict:
    """LocFedMix-SL: by (round, step) and client, its partners and its own share of each mixture."""
    mixing: dict[tuple[int, int], dict[int, list[tuple[int, float]]]] = {}
    for t, client, step in batches:
        others = [other for other in range(config.clients) if other != client and (t, other, step) in batches]
        draw = numpy_generator(config.seed, "mixing", client, t, step)
        partners = draw.permutation(others)[: own["partners"]]
        pairs = [(int(partner), draw.beta(own["mix_alpha"], own["mix_alpha"])) for partner in partners]
        mixing.setdefault((t, step), {})[client] = pairs
    return mixing


def _direction(seed: int, setup: Setup, t: int, client: int, step: int) -> torch.Tensor:
    """HERON's u: normal numbers of the step's own seed over all trained weights, scaled to length 1."""
    modules = (setup.modules[part] for part in ("client", "auxiliary"))
    d = sum(weight.numel() for module in modules for weight in module.parameters())
    normal = torch.randn(d, generator=generator(seed, "direction", client, t, step)).double()
    return normal / normal.square().sum().sqrt()


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double().clone() if tensor.is_floating_point() else tensor.clone()


def compare(found: Found, expected: Found, *, tolerance: float = 1e-9, bytes: bool = True) -> None:
    """The same weights to `tolerance` of each tensor's largest value (at least 1), and exactly the same bytes."""
    assert found.auxiliaries.keys() == expected.auxiliaries.keys()
    assert found.logits.keys() == expected.logits.keys()
    assert found.decoders.keys() == expected.decoders.keys()
    pairs = {"client": (found.client, expected.client), "server": (found.server, expected.server)}
    pairs |= {f"client part of {n}": (found.clients[n], own) for n, own in expected.clients.items()}
    pairs |= {f"auxiliary of {n}": (own, expected.auxiliaries[n]) for n, own in found.auxiliaries.items()}
    pairs |= {f"decoder of {n}": (own, expected.decoders[n]) for n, own in found.decoders.items()}
    pairs |= {f"logits of {n}": ({"logits": own}, {"logits": expected.logits[n]}) for n, own in found.logits.items()}
    assert found.controls.keys() == expected.controls.keys()
    for client, parts in found.controls.items():
        assert parts.keys() == expected.controls[client].keys()
        pairs |= {f"control of {client}, {part}": (x, expected.controls[client][part]) for part, x in parts.items()}
    for what, (own, wanted) in pairs.items():
        assert own.keys() == wanted.keys(), what
        for name, tensor in own.items():
            scale = max(1.0, float(wanted[name].abs().max()))
            distance = float((tensor.double() - wanted[name].double()).abs().max())
            assert distance <= tolerance * scale, f"{what}: {name} is off by {distance:.1e}"
    if bytes:
        assert found.bytes == expected.bytes
