"""The roles of a run, and a round of theirs."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from fsl_sage.activity import now
from fsl_sage.algorithms.base import Algorithm
from fsl_sage.config import Config
from fsl_sage.devices import all_on
from fsl_sage.engines.base import REMEDY, Delivery, Engine, Setup, known_weights
from fsl_sage.engines.server import CACHE_BYTES, part_states
from fsl_sage.engines.worker import copied
from fsl_sage.errors import TrainingError
from fsl_sage.experiment.probe import Point
from fsl_sage.experiment.round_metrics import fidelities, footprint_figures, mean_over_clients, training_losses
from fsl_sage.precision import all_finite
from fsl_sage.roles.averaging import average
from fsl_sage.roles.client import local_batch_sizes
from fsl_sage.roles.f_server import FServer
from fsl_sage.roles.footprint import Footprint
from fsl_sage.roles.protocols import Parts, Update
from fsl_sage.roles.replica import Slots, frozen_weights
from fsl_sage.seeding import numpy_generator
from fsl_sage.split import Ridge
from fsl_sage.wire.ledger import Ledger
from fsl_sage.wire.link import Link
from fsl_sage.wire.message import AUXILIARY, Message, Tensors, nbytes
from fsl_sage.wire.paths import below, flat, grouped
from fsl_sage.wire.post import NOTHING, Download, Post, Renewal


class Federation:
    """All that a round needs: the F-server, the mail, and an engine with clients and S-server."""

    def __init__(self, setup: Setup, engine: Engine) -> None:
        self.setup = setup
        self.engine = engine
        self._round = -1
        """The last round that was played."""
        self.footprints: dict[str, Footprint] = {}
        """By role ("client", "server"), memory and operations of its first step."""
        self.link = Link(Ledger(self._frozen_by_kind()))
        self.post = Post(self.link, setup.settings.config.clients)
        self._lost: dict[str, Tensors] = {}
        """By part, what coding has lost of the averaged weights on their way to the clients."""
        self.f_server = FServer(
            {part: setup.settings.travelling(part, tensors) for part, tensors in setup.initial.items()},
            setup.algorithm.averaged,
            {part: frozenset(Slots(module).trainable) for part, module in setup.modules.items()},
            setup.client_weights,
            setup.settings.config.averaging,
        )

    @property
    def ledger(self) -> Ledger:
        """Every byte that has travelled so far."""
        return self.link.ledger

    def play_round(self, t: int, cohort: Sequence[int]) -> dict[str, Any]:
        """Play round t with these clients; returns its metrics."""
        self._round = t
        known = set(self.footprints)
        updates: list[Update] = []
        averaged: tuple[str, ...] = ()
        missing: set[int] = set()
        turns = self.setup.algorithm.turns(t, cohort, self._local_steps(cohort))
        for turn in turns:
            # 1.-3. Clients get what is new and take their local steps; the S-server learns from their uploads.
            trained = self._train(t, [client for client in turn if client not in missing])
            missing |= set(turn) - {update.client for update in trained}
            # 4. The F-server averages.
            if trained:
                averaged = self._average(trained)
            updates += trained
        if not updates:
            raise TrainingError(f"No client came to the end of round {t}; the last checkpoint is kept.")
        present = {update.client for update in updates}
        if averaged and not self.setup.algorithm.in_turn:
            # Clients that begin the next round get the last average; the others get theirs when their turn comes.
            for group in self._by_download(client for client in turns[0] if client in present):
                self.post.broadcast(t, group, self._newest(averaged, group[0]))
        server = self.engine.server
        # 5. The S-server aligns, if it is time to.
        now("comparing the auxiliaries' gradients with the server's")
        held_out = server.fidelity()
        now("the S-server ends the round")
        for client, message in server.end_of_round(t):
            self.post.send(t, client, message, present=client in present)
        if "server" not in known and (footprint := server.footprint()) is not None:
            self.footprints["server"] = footprint
        measured = footprint_figures({role: own for role, own in self.footprints.items() if role not in known})
        losses = training_losses(updates, server.take_loss(), t)
        remarks = server.remarks()
        seen = server.fidelity(seen=True) if remarks["aligned"] else None
        self._check_finite(t)
        members = {"cohort": len(cohort), "missing": sorted(set(cohort) - present)}
        remarks |= self._codec_memory(remarks.pop(CACHE_BYTES, 0))
        return {**members, **remarks, **self.engine.remarks(), **losses, **fidelities(held_out, seen), **measured}

    def _codec_memory(self, cached: int) -> dict[str, int]:
        """For the metrics: the bytes that codecs remember at all roles together, if there are any."""
        codecs = self.setup.settings.codecs
        if not (codecs.update or codecs.published or cached):
            return {}
        trained = self.setup.settings.trained
        parts = {part: self.f_server.weights[part] for part in self.setup.algorithm.averaged}
        own = sum(nbytes({n: x for n, x in tensors.items() if n in trained[part]}) for part, tensors in parts.items())
        clients = sum(version != NOTHING for version in self.post.has) if codecs.update else 0
        # Clients keep what coding has lost of their updates, and the same activations as the S-server.
        return {"codec_memory_bytes": nbytes(flat(self._lost)) + clients * own + 2 * cached}

    def _local_steps(self, cohort: Iterable[int]) -> dict[int, int]:
        """By client, the number of its local steps in a round."""
        config, examples = self.setup.settings.config, self.setup.examples
        return {client: len(local_batch_sizes(len(examples[client]), config)) for client in cohort}

    def _check_finite(self, t: int) -> None:
        """Refuse a global model that is not finite: it must not reach a checkpoint."""
        for path, tensor in flat(self.weights()).items():
            if not all_finite(tensor):
                raise TrainingError(f"'{path}' became infinite or NaN in round {t}. {REMEDY}")

    def _train(self, t: int, group: Sequence[int]) -> list[Update]:
        group = self.engine.present(t, group) if group else []
        if not group:
            return []
        now(f"training {len(group)} clients")
        groups = self._by_download(group)
        renewed = frozenset().union(*(self.post.welcome(t, own, self._download(own[0])) for own in groups))
        self.engine.on_update = None
        if self._averages_as_they_come(t, group):
            self.f_server.expect(group)
            self.engine.on_update = self.f_server.fold
        updates = self.engine.train(t, group, self.delivery(group, renewed), self.link)
        for client in set(group) - {update.client for update in updates}:
            self.post.lost(client)
        for update in updates:
            self.post.arrived(update.client)
            if update.footprint is not None:
                self.footprints.setdefault("client", update.footprint)
        return [self._brought(t, update) for update in updates]

    def _averages_as_they_come(self, t: int, group: Sequence[int]) -> bool:
        """Whether the plain mean is all that is made of the updates, and every client will bring its own.

        They are then added up one by one, and are never in memory all at once.
        """
        settings = self.setup.settings
        config, algorithm = settings.config, self.setup.algorithm
        plain = type(algorithm).aggregate is Algorithm.aggregate and config.averaging.rule == "mean"
        return (
            self.engine.takes_in_order
            and list(group) == sorted(group)  # as the F-server sums
            and plain
            and bool(algorithm.averaged_in(t))
            and settings.codecs.update is None
            and not self.setup.cuts
            and config.on_client_failure == "stop"
        )

    def _by_download(self, clients: Iterable[int]) -> list[list[int]]:
        """Groups of these clients that get the same from the F-server: all, or each alone if it has its own cut."""
        if self.setup.cuts:
            return [[client] for client in clients]
        return [group] if (group := list(clients)) else []

    def _largest(self, clients: Iterable[int]) -> int | None:
        """The first of these clients; if cuts differ, the first one with the deepest cut."""
        depth = {cut: place for place, cut in enumerate(self.setup.at_cut)}
        cuts = self.setup.cuts
        return min(clients, key=lambda client: (-depth[cuts[client]] if cuts else 0, client), default=None)

    def delivery(self, clients: Iterable[int], renewed: frozenset[int] = frozenset()) -> Delivery:
        """What these clients get before their round."""
        clients = list(clients)
        mail, changes = (
            {client: kept[client] for client in clients if client in kept}
            for kept in (self.post.waiting, self.post.changes)
        )
        measured = None if "client" in self.footprints else self._largest(clients)
        return Delivery(
            self.f_server.weights,
            mail,
            self.f_server.sends,
            renewed,
            measured,
            self.post.version,
            self.post.renewal,
            changes,
        )

    def _brought(self, t: int, update: Update) -> Update:
        """An update as it arrives at the F-server."""
        kinds = {part: self.setup.algorithm.kind(part) for part in update.parts}
        message = self.link.up(t, update.client, update.message(kinds))
        arrived = Update.arrived(update.client, message, kinds.values())
        if (change := self.setup.settings.codecs.update) is None:
            return arrived
        held = known_weights(self.setup, arrived.parts, self.f_server.weights)
        return replace(arrived, parts=grouped(change.decode(flat(arrived.parts), flat(held))))

    def _average(self, updates: list[Update]) -> tuple[str, ...]:
        """Replace the F-server's weights by the average; returns the parts that it has."""
        held = known_weights(self.setup, self.f_server.weights, self.f_server.weights)
        updates = self._completed(updates)
        averaged = self.setup.algorithm.aggregate(self.f_server, updates)
        self.f_server.take(averaged, updates)
        renewal = self._publish(averaged, held)
        if self.setup.cuts and averaged:
            self.engine.server.take(self.f_server.weights["client"])
        if "auxiliary" in averaged:
            self.engine.server.set_auxiliary(self.f_server.weights["auxiliary"])
        if averaged:
            self.post.renew(renewal)
        return tuple(averaged)

    def _publish(self, parts: Iterable[str], held: Parts) -> Renewal:
        """Code the new weights of these parts for clients that have `held`; the F-server then holds what they decode.

        So all who are up to date have the same weights, and a difference is coded once for all of them.
        """
        settings = self.setup.settings
        changes: dict[str, Tensors] = {}
        for_all: dict[str, Tensors] = {}
        for part in parts:
            kind = self.setup.algorithm.kind(part)
            if (change := settings.codecs.published.get(kind)) is None:
                continue
            noise = settings.codecs.noise(f"weights/{part}", t=self.post.version + 1)
            weights, lost = self.f_server.weights[part], self._lost.get(part, {})
            held_now = held.get(part, self.setup.initial[part])
            sent = change.encode(weights, held_now, lost, settings.trained[part], noise)
            self.f_server.weights[part], self._lost[part] = sent.decoded, sent.lost
            arrays = for_all if change.absolute else changes
            arrays[kind] = {**arrays.get(kind, {}), **flat({part: sent.arrays})}
        return Renewal(changes, for_all)

    def _completed(self, updates: list[Update]) -> list[Update]:
        """Updates with all weights up to the deepest cut. The S-server trained those behind a shallower cut.

        This is not billed: F-server and S-server are at the same end of the link.
        """
        if not self.setup.cuts:
            return updates
        weights = self.engine.server.weights() or {}
        return [
            replace(update, parts={part: self._complete(own, weights) for part, own in update.parts.items()})
            for update in updates
        ]

    def _complete(self, own: Tensors, at_s_server: Tensors) -> Tensors:
        """A client's part completed by the S-server's layers, in the model's order."""
        return {name: own[name] if name in own else at_s_server[name] for name in self.setup.initial["client"]}

    def _newest(self, parts: Iterable[str], client: int) -> Message:
        """The averaged weights of these parts that a client holds, by kind, with what the F-server sends along."""
        own = {part: self._held(client, part, self.f_server.weights[part]) for part in parts}
        return self._by_kind(own, self.f_server.sends)

    def _held(self, client: int, part: str, tensors: Tensors) -> Tensors:
        """Those of a part's weights that a client holds."""
        if not self.setup.cuts:
            return tensors
        return {name: tensors[name] for name in self.setup.initial_of(client, part)}

    def _download(self, client: int) -> Download:
        algorithm, initial = self.setup.algorithm, self.setup.initial
        held = {
            part: self._held(client, part, {**initial[part], **self.f_server.weights.get(part, {})})
            for part in algorithm.holds
        }
        return Download(
            self._newest(algorithm.averaged, client),
            self._by_kind(held, self.f_server.sends),
            self._frozen(algorithm.holds),
            algorithm.in_turn,
        )

    def _by_kind(self, parts: Parts, more: Parts) -> Message:
        kinds: dict[str, dict[str, Tensors]] = {}
        for part, tensors in parts.items():
            kinds.setdefault(self.setup.algorithm.kind(part), {})[part] = tensors
        return Message({**{kind: flat(own) for kind, own in kinds.items()}, **more})

    def _frozen(self, parts: Iterable[str]) -> Tensors:
        """These parts' frozen weights; what two of them share is there once."""
        return frozen_weights(self.setup.modules[part] for part in parts)

    def _frozen_by_kind(self) -> dict[str, int]:
        """Bytes of frozen weights in what travels under each kind, by the convention that bills whole models.

        A ridge auxiliary has none of its own: the embedding that it reads is the client part's.
        """
        algorithm, modules = self.setup.algorithm, self.setup.modules
        travels = {*algorithm.averaged, *algorithm.holds}
        parts = [part for part, module in modules.items() if part in travels and not isinstance(module, Ridge)]
        kinds = {algorithm.kind(part) for part in parts}
        return {kind: nbytes(self._frozen(part for part in parts if algorithm.kind(part) == kind)) for kind in kinds}

    def weights(self) -> dict[str, Tensors]:
        """The global model by part; what clients keep local is not in it."""
        parts = dict(self.f_server.weights)
        server = self.engine.server.weights()
        if server is not None:  # from the deepest cut on, where there are several
            parts["server"] = {name: server[name] for name in self.setup.initial["server"]}
        return parts

    def newest_weights(self) -> dict[str, Tensors]:
        """The global model by part; where clients go on without an average, the mean of what they have trained since.

        That mean is for evaluation alone: nothing travels, and no client sees it.
        """
        weights = self.weights()
        own = self.engine.local_tensors() if self._apart() else {}
        for part in self._apart():
            newest = {client: parts[part] for client, parts in own.items() if self._is_newest(client)}
            trained = {client: tensors for client, tensors in newest.items() if tensors}
            if trained and self.setup.cuts:
                at_s_server = self.engine.server.weights() or {}
                trained = {client: self._complete(tensors, at_s_server) for client, tensors in trained.items()}
            if trained:
                counts = [self.setup.client_weights[client] for client in trained]
                weights[part] = {**weights[part], **average(list(trained.values()), counts)}
        return weights

    def _is_newest(self, client: int) -> bool:
        """Whether a client has the newest average, or has trained from it; else its own weights are older."""
        return self.post.has[client] == self.post.version

    def point(self) -> Point:
        """The weights between two rounds, copied because training changes them in place."""
        states, _ = part_states(self.engine.state())
        parts = {part: copied(tensors) for part, tensors in self.newest_weights().items()}
        clients = range(self.setup.settings.config.clients)
        return Point(parts, {client: copied(self._auxiliary(client, states.get(client, {}))) for client in clients})

    def _auxiliary(self, client: int, state: Tensors) -> Tensors:
        """The auxiliary that a client will use: one that waits for it, its own, the average, or the initial one."""
        common = {**self.setup.initial["auxiliary"], **self.f_server.weights.get("auxiliary", {})}
        own = self.post.waiting.get(client, {}).get(AUXILIARY) or below("own/auxiliary/", state)
        return {**common, **own}

    def _apart(self) -> list[str]:
        """The parts that the last round did not average, though others do."""
        algorithm = self.setup.algorithm
        if self._round < 0:
            return []
        return [part for part in algorithm.averaged if part not in algorithm.averaged_in(self._round)]

    def evaluate(self) -> dict[str, Any]:
        """Metrics of the merged model; the mean over the clients if each keeps parts or statistics of its own."""
        weights = self.newest_weights()
        now("evaluating")
        scores = self._evaluate(weights)
        if self.setup.settings.config.model.recalibrate and (server := self.engine.server.recalibrated()) is not None:
            again = self._evaluate({**weights, "server": server})
            scores |= {f"{name}_recalibrated": score for name, score in again.items()}
        return scores

    def _evaluate(self, weights: Parts) -> dict[str, Any]:
        if not self.setup.settings.stays_local and not self.setup.algorithm.own_parts:
            return self.engine.evaluate(weights)
        scores = [self.engine.evaluate(_overlay(weights, self._own(x))) for x in self.engine.local_tensors().values()]
        return {name: mean_over_clients([score[name] for score in scores]) for name in scores[0]}

    def _own(self, local: Parts) -> Parts:
        """What of a client's tensors is its alone: parts that are never averaged, of others the statistics."""
        apart, stays = self.setup.algorithm.own_parts, self.setup.settings.stays_local
        return {
            part: {name: x for name, x in own.items() if part in apart or name in stays.get(part, ())}
            for part, own in local.items()
        }

    def merged(self) -> Tensors:
        """The ordinary unsplit model's state; statistics that stay local are represented by their average.

        Where clients have parts of their own there is no such model, but `server/NAME` and `clients/ID/PART/NAME`.
        """
        weights = self.newest_weights()
        if self.setup.algorithm.own_parts:
            clients = {
                f"clients/{id}/{part}": x for id, own in self.engine.local_tensors().items() for part, x in own.items()
            }
            return flat({**weights, **clients})
        if self.setup.settings.stays_local:
            local = list(self.engine.local_tensors().values())
            for part in self.setup.algorithm.averaged:
                names = self.setup.settings.stays_local[part]
                own = [{name: x for name, x in parts[part].items() if name in names} for parts in local]
                weights[part] = {**weights[part], **average(own, [1.0] * len(own))}
        parts = [weights[part] for part in ("client", "server", "head") if part in weights]
        return {name: tensor for part in parts for name, tensor in part.items()}

    def checkpoint(self, rounds: int) -> tuple[Tensors, dict[str, Any]]:
        """All that the next round depends on."""
        waiting, post = self.post.state()
        engine, files = self.engine.checkpoint()
        states = {"f_server": self.f_server.state(), "post": waiting, "engine": engine}
        named = {"clients": files} if files else {}
        return flat({**states, "lost": flat(self._lost)}), {"rounds": rounds, "post": post, **named}

    def load_checkpoint(self, tensors: Tensors, values: dict[str, Any]) -> int:
        """Restore what `checkpoint` returned; returns the number of rounds that are done."""
        tensors = all_on(tensors, self.setup.settings.device)
        self.f_server.load_state(below("f_server/", tensors))
        self.post.load_state(below("post/", tensors), values["post"])
        self._lost = grouped(below("lost/", tensors))
        self.engine.restore(below("engine/", tensors), values.get("clients"))
        self._round = int(values["rounds"]) - 1
        return self._round + 1


def _overlay(weights: Parts, own: Parts) -> dict[str, Tensors]:
    return {part: {**weights.get(part, {}), **own.get(part, {})} for part in {**weights, **own}}


def draw_cohort(config: Config, t: int) -> list[int]:
    """The clients that take part in round t: all of them, or a fraction drawn at random."""
    size = max(1, round(config.cohort * config.clients))
    if size == config.clients:
        return list(range(config.clients))
    drawn = numpy_generator(config.seed, "cohort", round=t).choice(config.clients, size, replace=False)
    return sorted(int(client) for client in drawn)
