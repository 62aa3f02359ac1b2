"""Server-side models of the clients' own, which the S-server averages at the end of a round (SplitFed-MS).

No copy depends on another, so clients may take their rounds in groups, one group after the other. The copies of a group
are then added to the mean and forgotten before the next group makes its own: a thousand of them need not be in memory
at once. The mean, the mean loss and the bytes that are told are those of a round without groups, to the bit.
"""

from collections.abc import Sequence

from torch import Tensor

from fsl_sage.roles.averaging import RULES, RunningMean
from fsl_sage.roles.replica import Replica
from fsl_sage.roles.work import Settings
from fsl_sage.wire.message import Tensors, nbytes

Loss = tuple[int, Tensor]
"""The local step that the S-server took for a client, and the loss it had."""


class Copies:
    """By client, a copy of the server-side model in this round, and the state of its optimizer between rounds."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._replicas: dict[int, Replica] = {}
        self.optimizers: dict[int, Tensors] = {}
        """By client, the optimizer's state after its last round."""
        self._mean: RunningMean | None = None
        self._folded: dict[int, int] = {}
        """By client whose copy is in the mean already, the bytes that it had."""
        self._in_groups = False

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

    def fold(self, clients: Sequence[int], client_weights: Sequence[float]) -> None:
        """Add the copies of clients whose round is over to the average, and forget them.

        Args:
            clients: Their numbers, ascending from call to call.
            client_weights: How much each client of the whole round counts, in the order of their numbers.
        """
        self._in_groups = True
        self._mean = self._mean or RunningMean(client_weights)
        for client in clients:
            copy = self._replicas.pop(client)
            self._folded[client] = sum(tensor.nbytes for tensor in copy.held())
            self._mean.add(copy.weights())
            self._keep_optimizer(client, copy)

    def take_average(self, client_weights: Sequence[float], start: Tensors) -> Tensors:
        """The average of the copies, which are forgotten.

        Their optimizer states are kept, or forgotten (--client-optimizer). The F-server's rule makes the average,
        because a rule against poisoned clients must hold for these copies too.

        Args:
            client_weights: How much each client counts.
            start: The weights that the copies were made of.
        """
        if self._mean is not None:
            assert not self._replicas, "all copies of a round are folded, or none"
            average, self._mean = self._mean.result(), None
            self._folded.clear()
            return average
        clients = sorted(self._replicas)
        states = [self._replicas[client].weights() for client in clients]
        rule = RULES[self._settings.config.averaging.rule]
        average = rule(states, [client_weights[client] for client in clients], start)
        for client in clients:
            self._keep_optimizer(client, self._replicas.pop(client))
        return average

    def _keep_optimizer(self, client: int, copy: Replica) -> None:
        if self._settings.keeps_optimizer(averaged=True):
            self.optimizers[client] = copy.optimizer_state()

    def in_order(self, losses: Sequence[Loss]) -> list[Loss]:
        """The losses of the steps of a round in the order that they have without groups."""
        in_groups, self._in_groups = self._in_groups, False
        if not in_groups or self._settings.config.order == "blocked":
            return list(losses)
        return sorted(losses, key=lambda loss: loss[0])  # every client's step k comes before any step k + 1

    def resting_bytes(self) -> int:
        """Bytes of copies that are in the mean already, and of optimizer states of clients without a copy."""
        here = {*self._replicas, *self._folded}
        states = (nbytes(state) for client, state in self.optimizers.items() if client not in here)
        return sum(self._folded.values()) + sum(states)
