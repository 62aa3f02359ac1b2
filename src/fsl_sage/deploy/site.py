"""The client's side of a round: at the site, with its own data and its own state.

The process only ever holds the parts that the algorithm gives a client. It builds their structure on the meta device.
The server has sent the foundation before: where the model is cut, and all that training does not change. Frozen weights
are mapped from the site's disk. The weights that are trained come with the round's message.
"""

from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fsl_sage.algorithms import Algorithm, make_algorithm
from fsl_sage.config import Config
from fsl_sage.deploy.agreement import Agreement
from fsl_sage.engines.base import ClientError, Delivery, Setup
from fsl_sage.engines.flower.contents import Assignment, Report
from fsl_sage.engines.flower.foundation import Foundation, Large, as_bytes, sha256_of
from fsl_sage.engines.flower.node_state import NodeState
from fsl_sage.engines.flower.weight_store import CHUNK, WEIGHTS, WeightStore
from fsl_sage.engines.process import check_room, peak_memory, prepare_small_process
from fsl_sage.engines.worker import Worker
from fsl_sage.errors import InputError
from fsl_sage.experiment.setup import make_site_setup
from fsl_sage.problems.base import Problem
from fsl_sage.problems.sites import problem_at_site
from fsl_sage.reading import read_json
from fsl_sage.records.files import write_json
from fsl_sage.roles.protocols import Parts
from fsl_sage.split.plan.split_plan import dtype_of
from fsl_sage.wire.message import Message, Tensors
from fsl_sage.wire.paths import below, flat, grouped


@dataclass(frozen=True)
class Place:
    """What a site has, from the SuperNode's --node-config."""

    client: int
    data: Path
    """Its training examples."""
    state: Path
    """Where it keeps what it needs between rounds."""
    tokenizer: Path | None = None
    """For texts: the directory of the tokenizer."""
    model: Path | None = None
    """A directory with frozen weights of its parts, or of the whole model, as .safetensors."""


class Site:
    """One client with its data, at its node."""

    def __init__(self, config: Config, agreement: Agreement, place: Place) -> None:
        if not 0 <= place.client < config.clients:
            raise InputError(f"client={place.client} is not possible: there are the clients 0 to {config.clients - 1}.")
        prepare_small_process(config.threads)
        self.client = place.client
        self.place = place
        self.config = config
        self.agreement = agreement
        self.weights = WeightStore(place.state / WEIGHTS)

    def look(self) -> Problem:
        """Read the site's data, and refuse what is not as agreed."""
        tokenizer = self.place.tokenizer or self.place.model
        problem = problem_at_site(self.place.data, self.config, self.agreement, tokenizer)
        agreed = self.agreement.examples[self.client]
        if problem.examples != agreed:
            raise InputError(
                f"Client {self.client} has {problem.examples} examples here but {agreed} in the agreement: "
                "correct 'examples' in the app's config.json, or the site's data."
            )
        return problem

    def lacks(self, run: str, block: bytes) -> list[tuple[str, int]]:
        """Keep a packed foundation; returns (SHA-256, number) of the chunks of its weights that are missing here.

        A MemoryError says that the weights do not fit into a process of this site, before any are sent.

        Args:
            run: The run's id.
            block: The packed foundation.
        """
        wanted = {large.sha256: large for large in Foundation.unpack(block).large.values()}
        check_room(sum(large.nbytes for large in wanted.values()))
        NodeState(self.place.state, run, self.client).save_foundation(block)
        self.weights.drop_unfinished()
        for sha256 in wanted:
            self.weights.drop_if_damaged(sha256)
        if self.place.model is not None:
            self._take_from_files(wanted)
        return [(x.sha256, number) for x in wanted.values() for number in self.weights.lacks(x.sha256, x.nbytes)]

    def _take_from_files(self, wanted: dict[str, Large]) -> None:
        """Take the wanted weights from the site's own files, by their SHA-256."""
        missing = {sha256 for sha256, large in wanted.items() if self.weights.lacks(sha256, large.nbytes)}
        kinds = {(large.dtype, large.shape) for large in wanted.values()}
        assert self.place.model is not None
        for file in sorted(self.place.model.glob("*.safetensors")):
            try:
                with safe_open(file, "pt") as content:
                    for name in content.keys():  # noqa: SIM118
                        shape = tuple(content.get_slice(name).get_shape())
                        for dtype in {kind for kind, of in kinds if of == shape and missing}:
                            tensor = content.get_tensor(name).to(dtype_of(dtype)).contiguous()
                            if (sha256 := sha256_of(tensor)) in missing:
                                self._keep(sha256, tensor)
                                missing.discard(sha256)
            except (SafetensorError, OSError) as error:
                raise InputError(f"{file} cannot be read: {error}.") from None

    def _keep(self, sha256: str, tensor: Tensor) -> None:
        content = as_bytes(tensor)
        for number, start in enumerate(range(0, len(content), CHUNK)):
            self.weights.put(sha256, len(content), number, bytes(content[start : start + CHUNK]))

    def train(self, assignment: Assignment) -> Report:
        """Play the client's local round and write its state to disk; returns what the site sends."""
        node_state = self._node_state(assignment)
        if assignment.foundation is not None:
            node_state.save_foundation(assignment.foundation)
        node_state.keep_only(assignment.keep, assignment.after)
        kept = node_state.load(assignment.after)
        setup = self._setup(node_state)
        assignment = decoded(setup, assignment, kept)
        held = self._held(setup, assignment, kept)
        worker = Worker(replace(setup, initial=held))
        mail = {self.client: assignment.mail} if assignment.mail else {}
        device = setup.settings.device
        extra = {kind: {n: x.to(device) for n, x in own.items()} for kind, own in assignment.extra.items()}
        uploads: list[Message] = []
        outcome = worker.whole_round(
            assignment.round,
            self.client,
            below("state/", kept),
            Delivery(held, mail, extra, measured=self.client if assignment.measured else None),
            uploads.append,
        )
        if isinstance(outcome, ClientError):
            raise outcome
        # Weights that come again in every round are not kept, unless they come as differences.
        coded = setup.settings.codecs.published
        stay = [part for part in held if part not in setup.algorithm.averaged or setup.algorithm.kind(part) in coded]
        node_state.save(
            assignment.round, flat({part: held[part] for part in stay}, "held/") | flat({"state": outcome.state})
        )
        update = outcome.update
        return Report(
            assignment.run,
            assignment.round,
            self.client,
            update.losses,
            update.parts,
            uploads,
            update.extra,
            update.footprint,
        )

    def finish(self, assignment: Assignment) -> None:
        """End the run: keep the newest weights of the client's parts and delete its states.

        A second time this changes nothing. A server that was killed meanwhile does not know of the first.
        """
        node_state = self._node_state(assignment)
        if node_state.is_finished(assignment.after):
            node_state.keep_only()
            return
        if assignment.foundation is not None:
            node_state.save_foundation(assignment.foundation)
        kept = node_state.load(assignment.after)
        algorithm = make_algorithm(self.config)
        if assignment.changes or assignment.mail_changes:  # only to decode them does it need its parts
            assignment = decoded(self._setup(node_state), assignment, kept)
        held = {part: _newest(algorithm, part, assignment, kept) for part in algorithm.holds}
        node_state.finish({**flat(held), **below("state/own/", kept), **flat(assignment.mail)})

    def note_peak(self, run: str, processes: int = 1) -> None:
        """Write down the peak memory of this client's processes in the run. `processes` is added to their number."""
        file = NodeState(self.place.state, run, self.client).result_file
        if not file.parent.is_dir():  # the round was refused before anything was kept
            return
        before = read_json(file) if file.exists() else {"processes": 0, "peak_memory_bytes": 0}
        peak = max(int(before["peak_memory_bytes"]), peak_memory())
        write_json(file, {"processes": int(before["processes"]) + processes, "peak_memory_bytes": peak})

    def _node_state(self, assignment: Assignment) -> NodeState:
        if assignment.version != version("fsl-sage"):
            raise InputError(f"The server runs fsl-sage {assignment.version}, this node {version('fsl-sage')}.")
        if assignment.client != self.client:
            raise InputError(f"A message for client {assignment.client} came to the node of client {self.client}.")
        return NodeState(self.place.state, assignment.run, self.client)

    def _setup(self, node_state: NodeState) -> Setup:
        """An engine's setup with this site's data and parts. Of other clients it has only the numbers of examples."""
        foundation = Foundation.unpack(node_state.load_foundation())
        put_in = partial(foundation.put_in, large=self._mapped)
        return make_site_setup(self.config, self.look(), self.agreement.examples, foundation.plan, put_in)

    def _mapped(self, large: Large) -> Tensor:
        """A frozen weight, mapped from its file. Pages that are not used take no memory."""
        path, size = self.weights.path(large.sha256), large.nbytes
        if not path.exists() or path.stat().st_size != size:
            raise InputError(
                f"A frozen weight of this client is not in {path.parent} any more, or damaged: it comes again before "
                "the next round."
            )
        dtype = dtype_of(large.dtype)
        return torch.from_file(str(path), shared=False, size=size // dtype.itemsize, dtype=dtype).view(large.shape)

    def _held(self, setup: Setup, assignment: Assignment, kept: Tensors) -> Parts:
        """The newest weights of every part that this client holds: those in the message, else those kept before."""
        held = {}
        for part in setup.algorithm.holds:
            tensors, names = _newest(setup.algorithm, part, assignment, kept), setup.initial[part].keys()
            if tensors.keys() != names:
                raise InputError(f"The weights of the part '{part}' neither came with the message nor are they here.")
            held[part] = {name: tensors[name].to(setup.settings.device) for name in names}
        return held


def _newest(algorithm: Algorithm, part: str, assignment: Assignment, kept: Tensors) -> Tensors:
    """The newest weights of a part: in the message, else kept before, else in a message that waited for the client."""
    waiting = assignment.mail.get(algorithm.kind(part), {})
    return assignment.held.get(part) or below(f"held/{part}/", kept) or waiting


def decoded(setup: Setup, assignment: Assignment, kept: Tensors) -> Assignment:
    """The assignment with its coded differences decoded, by the weights that this site has kept."""
    codecs = setup.settings.codecs.published
    had = {part: below(f"held/{part}/", kept) or setup.initial[part] for part in setup.algorithm.holds}
    held, mail = dict(assignment.held), dict(assignment.mail)
    for kind, change in assignment.changes.items():
        held |= grouped(codecs[kind].decode(change, flat(had)))
    for kind, change in assignment.mail_changes.items():
        # What the S-server took as known: the newest average, if one came with this message, else what is here.
        known = {**had[kind], **held.get(kind, {}), **below(f"state/own/{kind}/", kept)}
        mail[kind] = codecs[kind].decode(change, known)
    return replace(assignment, held=held, mail=mail, changes={}, mail_changes={})
