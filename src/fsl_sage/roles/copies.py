"""Server-side models of the clients' own, which the S-server averages at the end of a round (SplitFed-MS)."""

from collections.abc import Sequence

from fsl_sage.roles.averaging import RULES
from fsl_sage.roles.replica import Replica
from fsl_sage.roles.work import Settings
from fsl_sage.wire.message import Tensors, nbytes


class Copies:
    """By client, a copy of the server-side model in this round, and the state of its optimizer between rounds."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._replicas: dict[int, Replica] = {}
        self.optimizers: dict[int, Tensors] = {}
        """By client, the optimizer's state after its last round."""

    def __contains__(self, client: int) -> bool:
        return client in self._replicas

    def __getitem__(self, client: int) -> Replica:
        return self._replicas[client]

    def replicas(self) -> list[Replica]:
        """The copies of this round."""
        return list(self._replicas.values())

    def make(self, client: int, model: Replica) -> Replica:
        """A new copy of the model for a client, with its own optimizer."""
        copy = Replica(model.slots, model.weights(), self._settings.optimizer_of("server"))
        state = self.optimizers.get(client, {})
        if self._settings.config.on_client_failure == "drop":  # a client that fails returns with the state it had
            state = {path: tensor.clone() for path, tensor in state.items()}
        copy.load_optimizer_state(state)
        self._replicas[client] = copy
        return copy

    def drop(self, client: int) -> None:
        """Forget the copy of a client that failed."""
        self._replicas.pop(client, None)

    def take_average(self, client_weights: Sequence[float], start: Tensors) -> Tensors:
        """The average of the copies, which are forgotten.

        Their optimizer states are kept, or forgotten (--client-optimizer). The F-server's rule makes the average,
        because a rule against poisoned clients must hold for these copies too.

        Args:
            client_weights: How much each client counts.
            start: The weights that the copies were made of.
        """
        clients = sorted(self._replicas)
        states = [self._replicas[client].weights() for client in clients]
        rule = RULES[self._settings.config.averaging.rule]
        average = rule(states, [client_weights[client] for client in clients], start)
        if self._settings.keeps_optimizer(averaged=True):
            self.optimizers |= {client: self._replicas[client].optimizer_state() for client in clients}
        self._replicas.clear()
        return average

    def resting_bytes(self) -> int:
        """Bytes of the optimizer states of clients that have no copy now."""
        return sum(nbytes(state) for client, state in self.optimizers.items() if client not in self._replicas)
