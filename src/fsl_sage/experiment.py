"""A run: builds the roles from a configuration and plays the rounds."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fsl_sage.algorithms import ALGORITHMS
from fsl_sage.alignment.fidelity import Fidelity
from fsl_sage.alignment.passes import Smash
from fsl_sage.config import NO_PART_OF_THE_RESULT, Config, option
from fsl_sage.engines.base import Delivery, Engine, LostError, Setup
from fsl_sage.engines.dry import DryEngine, Shapes
from fsl_sage.engines.local import LocalEngine
from fsl_sage.engines.process import prefer_huge_pages
from fsl_sage.engines.setup import make_dry_setup, make_setup
from fsl_sage.errors import InputError, MissingExtra, TrainingError
from fsl_sage.models import mask_buffers, save_adapters
from fsl_sage.records.figures import accuracy_figure, classes_figure
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.records.trackers import TRACKERS, Tracker
from fsl_sage.roles.averaging import average
from fsl_sage.roles.client import below
from fsl_sage.roles.f_server import FServer, Update
from fsl_sage.roles.replica import frozen_bytes
from fsl_sage.roles.work import Parts
from fsl_sage.seeding import numpy_generator
from fsl_sage.wire.ledger import BEFORE, GIB, Ledger, totals
from fsl_sage.wire.message import Tensors, nbytes
from fsl_sage.wire.post import Post


@dataclass(frozen=True)
class Result:
    """A finished run."""

    directory: Path
    config: Config
    metrics: list[dict[str, Any]]
    """One dict a round, as in metrics.jsonl."""
    stopped: str
    """Which stop rule ended the run."""

    @property
    def best_accuracy(self) -> float:
        """The best test accuracy of any round."""
        return max(line["test_accuracy"] for line in self.metrics)

    @property
    def model_file(self) -> Path:
        """The final merged weights, for the ordinary unsplit model."""
        return RunDirectory(self.directory).model_file


def run(config: Config, trackers: Sequence[Tracker] = ()) -> Result:
    """Train from the beginning, in a new run directory."""
    directory = RunDirectory.create(config)
    try:
        return play(directory, config, trackers)
    except InputError:
        directory.abandon()  # so that the corrected command may use the same directory
        raise


def resume(path: Path, trackers: Sequence[Tracker] = (), workers: int | None = None, **changes: Any) -> Result:
    """Go on with a run that was interrupted, from its last checkpoint; bit for bit the run that never was.

    `changes` are other options that decide no number, such as `engine` or `ray_address`.
    """
    directory = RunDirectory(path)
    config = directory.config()
    if directory.finished():
        raise InputError(f"{path} is finished: its result is in {directory.result_file}.")
    decisive = sorted(set(changes) - set(NO_PART_OF_THE_RESULT))
    if decisive:
        raise InputError(f"{', '.join(map(option, decisive))} cannot change when a run goes on: start a new run.")
    if workers is not None:
        changes["workers"] = workers
    return play(directory, replace(config, **changes), trackers)


def play(
    directory: RunDirectory,
    config: Config,
    trackers: Sequence[Tracker],
    build: "Callable[[RunDirectory, Config], Federation] | None" = None,
) -> Result:
    """The run of a directory, from its last checkpoint to the end; `build` makes roles that are not all here."""
    prefer_huge_pages()  # before the data is loaded
    # 1. The roles: data, model, clients and servers; as they were at the last checkpoint, if there is one.
    federation, metrics = _restore(directory, config, build or _build)
    trackers = [*trackers, *(TRACKERS[name]() for name in config.track)]
    lost = -1
    try:
        for tracker in trackers:
            tracker.start(config, directory.path, metrics)
        # 2. The rounds, until a stop rule is met.
        while (stopped := stop_reason(config, metrics)) is None:
            t = len(metrics)
            try:
                metrics.append(_timed_round(federation, t, metrics))
                directory.append(metrics[-1], federation.ledger.written_in(t))
                if (t + 1) % config.checkpoint_every == 0:
                    directory.save_checkpoint(config, *federation.checkpoint(t + 1))
            except LostError:
                if t == lost:
                    raise  # twice in the same round is no accident
                lost = t
                federation.engine.close()
                federation, metrics = _restore(directory, config, build or _build)
                continue
            for tracker in trackers:
                tracker.round(metrics[-1])
        # 3. The final model, the figure, the result.
        accuracy_figure(directory.path / "accuracy.png", metrics, config.algorithm)
        result = _summary(metrics, stopped)
        model = federation.merged()
        save_adapters(directory.adapter, config.model.name, config.lora, model)
        directory.finish(model, result, keep_checkpoint=config.keep_checkpoint)
        for tracker in trackers:
            tracker.finish(result)
    finally:
        federation.engine.close()
    return Result(directory.path, config, metrics, stopped)


def _restore(
    directory: RunDirectory, config: Config, build: "Callable[[RunDirectory, Config], Federation]"
) -> "tuple[Federation, list[dict[str, Any]]]":
    """The roles as they were at the last checkpoint, or new, and the metrics up to there."""
    checkpoint = directory.load_checkpoint(config)
    federation = build(directory, config)
    first = federation.load_checkpoint(*checkpoint) if checkpoint else 0
    metrics, entries = directory.cut_back(first)
    federation.ledger.restore(entries, metrics[-1]["bytes_whole_models"] if metrics else 0)
    return federation, metrics


def _build(directory: RunDirectory, config: Config) -> "Federation":
    if config.engine == "flower":
        raise InputError("A run on Flower is an app: make it by 'fsl-sage deploy init DIR' and start it by 'flwr run'.")
    engine = _engine(config)
    setup = make_setup(config)
    _draw_classes(directory, setup)
    return Federation(setup, engine(setup))


def _engine(config: Config) -> Callable[[Setup], Engine]:
    """The engine that the configuration names."""
    if config.engine != "ray":
        return LocalEngine
    try:
        from fsl_sage.engines.ray import RayEngine
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise MissingExtra("--engine ray", "ray") from None
    return RayEngine


def _timed_round(federation: "Federation", t: int, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    start = time.perf_counter()
    # A round's step 0: its cohort is drawn. Steps 1-5 are `play_round`.
    played = federation.play_round(t, draw_cohort(federation.setup.settings.config, t))
    # Step 6: the merged global model is evaluated on the test set.
    scores = federation.evaluate()
    seconds = time.perf_counter() - start
    elapsed = seconds + (metrics[-1]["elapsed_seconds"] if metrics else 0.0)
    ledger = federation.ledger
    moved = {
        "bytes_total": ledger.total,
        "bytes_paper": ledger.paper,
        "bytes_whole_models": ledger.whole_models,
    }
    return {"round": t, **scores, **played, **moved, "seconds": seconds, "elapsed_seconds": elapsed}


def stop_reason(config: Config, metrics: Sequence[dict[str, Any]]) -> str | None:
    """Which stop rule the rounds so far have met, if any."""
    if not metrics:
        return None
    last = metrics[-1]
    if config.target_accuracy is not None and last["test_accuracy"] >= config.target_accuracy:
        return f"target accuracy {config.target_accuracy:.1%} reached"
    if config.budget_gib is not None and last["bytes_paper"] >= config.budget_gib * GIB:
        return f"communication budget of {config.budget_gib:g} GiB used"
    if config.max_seconds is not None and last["elapsed_seconds"] >= config.max_seconds:
        return f"time limit of {config.max_seconds:g} s reached"
    if len(metrics) >= config.rounds:
        return f"all {config.rounds} rounds played"
    return None


def _summary(metrics: Sequence[dict[str, Any]], stopped: str) -> dict[str, Any]:
    best = max(metrics, key=lambda line: line["test_accuracy"])
    last = metrics[-1]
    return {
        "stopped": stopped,
        "rounds": len(metrics),
        "best_accuracy": best["test_accuracy"],
        "best_round": best["round"],
        "final_accuracy": last["test_accuracy"],
        "final_loss": last["test_loss"],
        "bytes_total": last["bytes_total"],
        "bytes_paper": last["bytes_paper"],
        "bytes_whole_models": last["bytes_whole_models"],
        "elapsed_seconds": last["elapsed_seconds"],
    }


def _draw_classes(directory: RunDirectory, setup: Setup) -> None:
    data = setup.settings.task.data  # type: ignore[attr-defined]
    labels, classes = data.train.y.cpu().numpy(), data.classes
    counts = np.stack([np.bincount(labels[share.numpy()], minlength=len(classes)) for share in setup.examples])
    directory.save_classes(counts, classes)
    classes_figure(directory.path / "classes.png", counts, classes)


class Federation:
    """The F-server, the post and an engine with clients and S-server: all that a round needs."""

    def __init__(self, setup: Setup, engine: Engine) -> None:
        self.setup = setup
        self.engine = engine
        self.ledger = Ledger(self._frozen_by_kind())
        self.post = Post(self.ledger, setup.settings.config.clients)
        self.f_server = FServer(
            {part: setup.settings.travelling(part, setup.initial[part]) for part in setup.algorithm.averaged},
            setup.client_weights,
        )

    def play_round(self, t: int, cohort: Sequence[int]) -> dict[str, Any]:
        """One round of these clients, in the order that the docs give; returns its metrics."""
        updates: list[Update] = []
        for group in self.setup.algorithm.groups(cohort):
            # 1.-3. Clients get what they lack, take their local steps; the S-server learns from what they upload.
            trained = self._train(t, group)
            # 4. The F-server averages.
            self._average(t, trained)
            updates += trained
        present = {update.client for update in updates}
        losses = _losses(updates, self.engine.server_loss(), t)
        # 5. The S-server aligns, if it is time to.
        before = self.engine.fidelity()
        messages = self.engine.end_of_round(t)
        for client, message in messages:
            self.post.send(t, client, message, present=client in present)
        after = self.engine.fidelity() if messages else None
        members = {"cohort": len(cohort), "missing": sorted(set(cohort) - present)}
        fidelities = _fidelities(before, after)
        return {**members, **self.engine.remarks(), **losses, **fidelities, "aligned": bool(messages)}

    def _train(self, t: int, group: Sequence[int]) -> list[Update]:
        held = self._sizes(self.setup.algorithm.holds, whole=True)
        self.post.welcome(t, group, held, self._sizes(self.setup.algorithm.averaged))
        mail = {client: self.post.waiting[client] for client in group if client in self.post.waiting}
        updates = self.engine.train(t, group, Delivery(self.f_server.weights, mail), self.ledger)
        if not updates:
            raise TrainingError(f"No client came to the end of round {t}; the last checkpoint is kept.")
        for client in set(group) - {update.client for update in updates}:
            self.post.lost(client)
        for update in updates:
            self.post.arrived(update.client)
            for kind in dict.fromkeys(map(self.setup.algorithm.kind, update.parts)):
                parts = (x for part, x in update.parts.items() if self.setup.algorithm.kind(part) == kind)
                self.ledger.bill(t, update.client, "up", kind, sum(map(nbytes, parts)))
        return updates

    def _average(self, t: int, updates: list[Update]) -> None:
        averaged = self.setup.algorithm.aggregate(self.f_server, updates)
        self.f_server.weights |= averaged
        if "auxiliary" in averaged:
            self.engine.share_auxiliary(averaged["auxiliary"])
        self.post.broadcast(t, [update.client for update in updates], self._sizes(tuple(averaged)))

    def _sizes(self, parts: tuple[str, ...], *, whole: bool = False) -> dict[str, int]:
        """Bytes by kind of these parts as they travel; `whole`: with what later stays local, and frozen weights."""
        sizes: dict[str, int] = {}
        for place, part in enumerate(parts):
            tensors = self.setup.initial[part]
            kind = self.setup.algorithm.kind(part)
            size = nbytes(tensors if whole else self.setup.settings.travelling(part, tensors))
            if whole:  # what a part shares with one before it is not sent twice
                size += self._frozen(parts[: place + 1]) - self._frozen(parts[:place])
            sizes[kind] = sizes.get(kind, 0) + size
        return sizes

    def _frozen(self, parts: Iterable[str]) -> int:
        return frozen_bytes(self.setup.modules[part] for part in parts)

    def _frozen_by_kind(self) -> dict[str, int]:
        """Bytes of frozen weights in what travels under each kind, by the convention that bills whole models."""
        algorithm = self.setup.algorithm
        parts = [part for part in self.setup.modules if part in {*algorithm.averaged, *algorithm.holds}]
        kinds = {algorithm.kind(part) for part in parts}
        return {kind: self._frozen(part for part in parts if algorithm.kind(part) == kind) for kind in kinds}

    def weights(self) -> dict[str, Tensors]:
        """The global model by part; what clients keep local is not in it."""
        parts = dict(self.f_server.weights)
        server = self.engine.server_weights()
        if server is not None:
            parts["server"] = server
        return parts

    def evaluate(self) -> dict[str, float]:
        """Metrics of the merged model; where statistics stay local, their mean over the clients each with its own."""
        weights = self.weights()
        if not self.setup.settings.stays_local:
            return self.engine.evaluate(weights)
        scores = [self.engine.evaluate(_overlay(weights, own)) for own in self.engine.local_tensors()]
        return {name: sum(score[name] for score in scores) / len(scores) for name in scores[0]}

    def merged(self) -> Tensors:
        """The ordinary unsplit model's state; statistics that stay local are represented by their average."""
        weights = self.weights()
        if self.setup.settings.stays_local:
            local = self.engine.local_tensors()
            for part in local[0]:
                weights[part] = {**weights[part], **average([own[part] for own in local], [1.0] * len(local))}
        parts = [weights[part] for part in ("client", "server", "head") if part in weights]
        return {name: tensor for part in parts for name, tensor in part.items()}

    def checkpoint(self, rounds: int) -> tuple[Tensors, dict[str, Any]]:
        """All that the next round depends on."""
        waiting, post = self.post.state()
        states = {"f_server": self.f_server.state(), "post": waiting, "engine": self.engine.state()}
        tensors = {f"{name}/{path}": x for name, state in states.items() for path, x in state.items()}
        return tensors, {"rounds": rounds, "post": post}

    def load_checkpoint(self, tensors: Tensors, values: dict[str, Any]) -> int:
        """Take up where `checkpoint` left; returns the number of rounds that are done."""
        device = self.setup.settings.device
        tensors = {path: tensor.to(device) for path, tensor in tensors.items()}
        self.f_server.load_state(below("f_server/", tensors))
        self.post.load_state(below("post/", tensors), values["post"])
        self.engine.load_state(below("engine/", tensors))
        return int(values["rounds"])


def _overlay(weights: Parts, own: Parts) -> dict[str, Tensors]:
    return {part: {**tensors, **own.get(part, {})} for part, tensors in weights.items()}


def draw_cohort(config: Config, t: int) -> list[int]:
    """The clients that take part in round t: all of them, or a fraction drawn at random."""
    size = max(1, round(config.cohort * config.clients))
    if size == config.clients:
        return list(range(config.clients))
    drawn = numpy_generator(config.seed, "cohort", round=t).choice(config.clients, size, replace=False)
    return sorted(int(client) for client in drawn)


def _losses(updates: Sequence[Update], server_loss: float | None, t: int) -> dict[str, float | None]:
    """Training losses of the round: of the true model (S-server's, or FedAvg's clients'), and of the auxiliaries."""
    for update in updates:
        for loss in update.losses.values():
            if not np.isfinite(loss):
                raise TrainingError(f"The loss of client {update.client} became {loss} in round {t}. {_REMEDY}")
    if server_loss is not None and not np.isfinite(server_loss):
        raise TrainingError(f"The loss of the S-server became {server_loss} in round {t}. {_REMEDY}")
    clients = [update.losses["client_loss"] for update in updates if "client_loss" in update.losses]
    client_loss = sum(clients) / len(clients) if clients else None
    if server_loss is None:
        return {"train_loss": client_loss, "auxiliary_loss": None}
    return {"train_loss": server_loss, "auxiliary_loss": client_loss}


_REMEDY = "A lower --optimizer.lr usually helps; the last checkpoint is kept."


def _fidelities(before: Fidelity | None, after: Fidelity | None) -> dict[str, float | None]:
    return {
        "fidelity_cosine": before.cosine if before else None,
        "fidelity_nmse": before.nmse if before else None,
        "fidelity_cosine_aligned": after.cosine if after else None,
        "fidelity_nmse_aligned": after.nmse if after else None,
    }


def cost(config: Config) -> dict[str, dict[str, Any]]:
    """For every algorithm the bytes of a round by kind and direction, without training.

    The round is one whose cohort was there the round before, too. `bytes_paper_aligning` and its like are those of a
    round of FSL-SAGE that aligns; `bytes_first_download` comes once, before round 0.
    """
    u_shape = len(config.model.cuts) == 2
    possible = [name for name, algorithm in ALGORITHMS.items() if algorithm.takes_two_cuts or not u_shape]
    smashed: dict[Shapes, Smash] = {}
    return {name: _cost(_as_algorithm(config, name), smashed) for name in possible}


def _as_algorithm(config: Config, name: str) -> Config:
    # Round 0 aligns, round 1 does not, and both are without a warm start.
    return replace(config, algorithm=name, rounds=2, align_every=2, align_until=2, warm_start=False)


def _cost(config: Config, smashed: dict[Shapes, Smash]) -> dict[str, Any]:
    setup = make_dry_setup(config)
    federation = Federation(setup, DryEngine(setup, smashed))
    cohort = draw_cohort(config, 0)
    aligned, whole = [], []
    for t in range(2):
        before = federation.ledger.whole_models
        aligned.append(federation.play_round(t, cohort)["aligned"])
        whole.append(federation.ledger.whole_models - before)
    tables = [federation.ledger.by_kind(t) for t in range(2)]
    total, paper = totals(tables[1])
    result: dict[str, Any] = {"bytes_paper": paper, "bytes_total": total, "bytes_whole_models": whole[1]}
    result["by_kind"] = tables[1]
    if aligned[0]:
        total, paper = totals(tables[0])
        result |= {
            "bytes_paper_aligning": paper,
            "bytes_total_aligning": total,
            "bytes_whole_models_aligning": whole[0],
        }
        result["by_kind_aligning"] = tables[0]
    result["bytes_first_download"] = totals(federation.ledger.by_kind(BEFORE))[0]
    return {**result, "is_upper_bound": setup.settings.task.sizes_are_bounds}


def part_sizes(config: Config) -> dict[str, dict[str, int]]:
    """For each part of the model its parameters and buffers, how many of them are trained, and how many the paper has.

    `in_paper` differs for GPT-2 alone, whose older code held a causal mask in every block as a buffer.
    """
    modules = make_dry_setup(_as_algorithm(config, config.algorithm)).modules
    return {part: _part_size(module) for part, module in modules.items()}


def _part_size(module: nn.Module) -> dict[str, int]:
    tensors = {id(x): x for x in module.state_dict(keep_vars=True).values()}.values()
    count = sum(x.numel() for x in tensors)
    trained = sum(x.numel() for x in tensors if x.requires_grad)
    return {"parameters_and_buffers": count, "trained": trained, "in_paper": count + mask_buffers(module)}


def run_cost(config: Config) -> dict[str, int]:
    """Rounds and bytes of a whole run, without training: exact, unless a target or a time limit ends it earlier."""
    setup = make_dry_setup(config)
    federation = Federation(setup, DryEngine(setup))
    whole = len(draw_cohort(config, 0)) == config.clients
    alike = whole and (not setup.settings.task.sizes_vary or setup.settings.task.sizes_are_bounds)
    known: dict[Any, tuple[int, int, int]] = {}
    total = paper = models = rounds = 0
    while rounds < config.rounds and (config.budget_gib is None or paper < config.budget_gib * GIB):
        # Rounds of all clients cost the same where the same parts and messages travel, so one of a sort is played.
        sort = _sort_of_round(federation, rounds) if alike and rounds else None
        if sort is None or sort not in known:
            before = _sums(federation.ledger)
            federation.play_round(rounds, draw_cohort(config, rounds))
            after = _sums(federation.ledger)
            known[sort] = after[0] - before[0], after[1] - before[1], after[2] - before[2]
        moved = known[sort]
        total, paper, models = total + moved[0], paper + moved[1], models + moved[2]
        rounds += 1
    bound = setup.settings.task.sizes_are_bounds
    sums = {"bytes_total": total, "bytes_paper": paper, "bytes_whole_models": models}
    return {"rounds": rounds, **sums, "is_upper_bound": bound}


def _sums(ledger: Ledger) -> tuple[int, int, int]:
    return ledger.total, ledger.paper, ledger.whole_models


def _sort_of_round(federation: Federation, t: int) -> tuple[Any, ...]:
    messages = federation.engine.end_of_round(t)
    sizes = tuple((client, tuple(message.sizes().items())) for client, message in messages)
    return federation.setup.algorithm.averaged_in(t), sizes
