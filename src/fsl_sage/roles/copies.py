"""Server-side models of the clients' own, which the S-server averages at the end of a round (SplitFed-MS).

No copy depends on another, so each client may take its round by itself. Its copy is then added to the mean and
forgotten before other clients make theirs: a thousand of them need not be in memory at once. The mean, the mean loss
and the bytes that are told are those of a round in which all copies are kept to its end, to the bit.
"""

from collections.abc import Sequence

from torch import Tensor

from fsl_sage.roles.averaging import RULES, RunningMean
from fsl_sage.roles.replica import Replica
from fsl_sage.roles.work import Settings
from fsl_sage.wire.message import Tensors, nbytes

Loss = tuple[int, int, Tensor]
"""A client, the local step that the S-server took for it, and the loss it had."""


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
        self._are_apart = False
        """Whether steps of this round were taken in an order that the clients' threads chose."""

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

    def fold(self, client: int, client_weights: Sequence[float]) -> None:
        """Add the copy of a client whose round is over to the average, and forget it.

        Args:
            client: Its number; ascending from call to call.
            client_weights: How much each client of the whole round counts, in the order of their numbers.
        """
        self._are_apart = True
        self._mean = self._mean or RunningMean(client_weights)
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
        """The losses of a round's steps in the order that they have when the S-server takes uploads by its rule."""
        are_apart, self._are_apart = self._are_apart, False
        if not are_apart:
            return list(losses)
        blocked = self._settings.config.order == "blocked"
        return sorted(losses, key=lambda loss: loss[:2] if blocked else (loss[1], loss[0]))

    def resting_bytes(self) -> int:
        """Bytes of copies that are in the mean already, and of optimizer states of clients without a copy."""
        here = {*self._replicas, *self._folded}
        states = (nbytes(state) for client, state in self.optimizers.items() if client not in here)
        return sum(self._folded.values()) + sum(states)
