"""The client's side of a round: at the site, with its own images and its own state."""

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from fsl_sage.config import Config
from fsl_sage.deploy.agreement import Agreement
from fsl_sage.engines.base import ClientError, Delivery, Setup
from fsl_sage.engines.flower.contents import Assignment, Report
from fsl_sage.engines.flower.node_state import NodeState
from fsl_sage.engines.process import prepare_process
from fsl_sage.engines.worker import Worker
from fsl_sage.errors import InputError
from fsl_sage.experiment.setup import make_setup
from fsl_sage.problems.images.sites import load_site
from fsl_sage.roles.protocols import Parts
from fsl_sage.wire.message import Message, Tensors
from fsl_sage.wire.paths import below, flat


class Site:
    """One client with its images, at its node."""

    def __init__(self, config: Config, agreement: Agreement, client: int, data: Path, state: Path) -> None:
        if not 0 <= client < config.clients:
            raise InputError(f"client={client} is not possible: there are the clients 0 to {config.clients - 1}.")
        self.client = client
        self.state = state
        self.setup = _setup(config, agreement, client, data)
        prepare_process(config.threads)

    def train(self, assignment: Assignment) -> Report:
        """The client's local round; afterwards its state is on disk."""
        node_state = self._node_state(assignment)
        node_state.forget_before(assignment.keep)
        kept = node_state.load(assignment.after)
        held = self._held(assignment, kept)
        worker = Worker(replace(self.setup, initial=held))
        mail = {self.client: assignment.mail} if assignment.mail else {}
        device = self.setup.settings.device
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
        node_state.save(assignment.round, self._kept(held, outcome.state))
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
        """The run is over: keep the newest weights of what this client holds, drop the states."""
        node_state = self._node_state(assignment)
        kept = node_state.load(assignment.after)
        held = self._held(assignment, kept)
        node_state.finish({**flat(held), **below("state/own/", kept), **flat(assignment.mail)})

    def _node_state(self, assignment: Assignment) -> NodeState:
        if assignment.version != version("fsl-sage"):
            raise InputError(f"The server runs fsl-sage {assignment.version}, this node {version('fsl-sage')}.")
        if assignment.client != self.client:
            raise InputError(f"A message for client {assignment.client} came to the node of client {self.client}.")
        return NodeState(self.state, assignment.run, self.client)

    def _held(self, assignment: Assignment, kept: Tensors) -> Parts:
        """The newest weights of every part that this client holds: what came now, else what came before."""
        held = {}
        for part in self.setup.algorithm.holds:
            waiting = assignment.mail.get(self.setup.algorithm.kind(part), {})
            tensors = assignment.held.get(part) or below(f"held/{part}/", kept) or waiting
            names = self.setup.initial[part].keys()
            if tensors.keys() != names:
                raise InputError(f"The weights of the part '{part}' neither came with the message nor are they here.")
            held[part] = {name: tensors[name].to(self.setup.settings.device) for name in names}
        return held

    def _kept(self, held: Parts, state: Tensors) -> Tensors:
        """What goes to disk: the client's state, and the weights that will not come again every round."""
        stay = [part for part in held if part not in self.setup.algorithm.averaged]
        return flat({part: held[part] for part in stay}, "held/") | flat({"state": state})


def _setup(config: Config, agreement: Agreement, client: int, data: Path) -> Setup:
    """As every engine starts, with this site's images alone; of the other clients only the numbers are known."""
    problem, agreed = load_site(data, agreement), agreement.examples[client]
    if problem.examples != agreed:
        raise InputError(
            f"Client {client} has {problem.examples} images here but {agreed} in the agreement: "
            "correct 'examples' in the app's config.json, or the site's data."
        )
    return make_setup(config, problem, agreement.examples)
