"""Which client holds which image: iid, Dirichlet and shard partitions into equal-sized clients."""

from bisect import bisect_right

import numpy as np

from fsl_sage.errors import InputError

KINDS = ("iid", "dirichlet", "shards", "restaurant")
ALPHA_MIN, ALPHA_MAX = 1e-6, 1e9
"""Beyond these a Dirichlet draw differs in nothing but rounding from one class a client, or from equal proportions."""


def client_sizes(examples: int, clients: int) -> list[int]:
    """How many images each client holds: equal up to one, the first clients have the extra one."""
    if clients < 1:
        raise InputError(f"{clients} clients were asked for: there must be at least one")
    if examples < 2:
        raise InputError(f"{_training_examples(examples)} too few: each client needs two. Give more training data.")
    if examples < 2 * clients:
        raise InputError(
            f"{_training_examples(examples)} too few for {_clients(clients)}, each needs two: use at most "
            f"{_clients(examples // 2)}."
        )
    return _even(examples, clients)


def _training_examples(count: int) -> str:
    return "1 training example is" if count == 1 else f"{count} training examples are"


def _clients(count: int) -> str:
    return "1 client" if count == 1 else f"{count} clients"


def partition(
    labels: np.ndarray,
    clients: int,
    kind: str,
    *,
    alpha: float = 1.0,
    shards_per_client: int = 2,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """The sorted indices of each client's images; every image belongs to exactly one, sizes are `client_sizes`.

    - `iid`: a random permutation, cut.
    - `dirichlet`: each client's class proportions are drawn from the symmetric Dirichlet(alpha), alpha per class.
      Clients then take turns, one image each, of a class drawn by their own proportions. A class that has run out is
      left out and the proportions of the others are scaled up, which makes them again a Dirichlet(alpha) draw over
      the classes that are left; by the turns this happens to all clients alike, not to the last one.
    - `shards`: the images sorted by label are cut into clients * shards_per_client runs of equal length (up to one),
      and every client gets `shards_per_client` of them at random.
    - `restaurant`: all examples of a class (the texts on a restaurant) are at one client. From the largest class to
      the smallest, each goes to the client that has the fewest so far, so the sizes differ from `client_sizes`.
    """
    sizes = client_sizes(len(labels), clients)
    if kind == "iid":
        parts = np.split(rng.permutation(len(labels)), np.cumsum(sizes)[:-1])
    elif kind == "dirichlet":
        parts = _dirichlet(labels, clients, alpha, rng)
    elif kind == "shards":
        parts = _shards(labels, sizes, shards_per_client, rng)
    elif kind == "restaurant":
        parts = _whole_classes(labels, clients, rng)
    else:
        raise InputError(f"'{kind}' is not a partition: use one of {', '.join(KINDS)}")
    return [np.sort(part) for part in parts]


def _even(total: int, parts: int) -> list[int]:
    return [total // parts + (part < total % parts) for part in range(parts)]


def _dirichlet(labels: np.ndarray, clients: int, alpha: float, rng: np.random.Generator) -> list[np.ndarray]:
    if not ALPHA_MIN <= alpha <= ALPHA_MAX:
        raise InputError(f"alpha is {alpha}: a Dirichlet partition needs a number from {ALPHA_MIN:g} to {ALPHA_MAX:g}")
    classes, class_of = np.unique(labels, return_inverse=True)
    supply = [rng.permutation(np.flatnonzero(class_of == label)).tolist() for label in range(len(classes))]
    log_weights = _log_gamma(alpha, (clients, len(classes)), rng)

    taken: list[list[int]] = [[] for _ in range(clients)]
    cumulative: list[list[float]] = [[]] * clients
    exhausted, exhausted_when_computed = 0, [-1] * clients
    for turn, draw in enumerate(rng.random(len(labels)).tolist()):
        client = turn % clients
        if exhausted_when_computed[client] != exhausted:
            cumulative[client] = _cumulative(log_weights[client])
            exhausted_when_computed[client] = exhausted
        # An exhausted class has width zero, so the first bound above the draw is never its own.
        chosen = bisect_right(cumulative[client], draw)
        taken[client].append(supply[chosen].pop())
        if not supply[chosen]:
            log_weights[:, chosen] = -np.inf
            exhausted += 1
    return [np.array(indices, dtype=np.int64) for indices in taken]


def _log_gamma(shape: float, size: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Logarithms of Gamma(shape) variates; normalised in a row they are a Dirichlet(shape) draw.

    For small shapes the variates themselves underflow to zero, a row of zeros has no proportions. The logarithm is
    safe: Gamma(shape) is Gamma(shape + 1) * U^(1 / shape).
    """
    uniform = 1.0 - rng.random(size)  # in (0, 1]
    return np.log(rng.standard_gamma(shape + 1.0, size)) + np.log(uniform) / shape


def _cumulative(log_weights: np.ndarray) -> list[float]:
    """Upper bounds of the classes' intervals in [0, 1); minus infinity stands for an exhausted class."""
    bounds = np.cumsum(np.exp(log_weights - log_weights.max()))
    return (bounds / bounds[-1]).tolist()


def _shards(labels: np.ndarray, sizes: list[int], shards_per_client: int, rng: np.random.Generator) -> list[np.ndarray]:
    if not 1 <= shards_per_client <= min(sizes):
        raise InputError(
            f"{shards_per_client} shards a client is not possible: with {min(sizes)} images each, "
            f"use 1 to {min(sizes)} shards"
        )
    shuffled = rng.permutation(len(labels))
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    # Each client's share is cut into its shards first, and these lengths are laid along the sorted images in random
    # order: so the shards differ by one image at most, and the clients' sizes come out exactly.
    lengths = np.array([length for size in sizes for length in _even(size, shards_per_client)])
    order = rng.permutation(len(lengths))
    shards = np.split(by_label, np.cumsum(lengths[order])[:-1])
    dealt = [shards[place] for place in np.argsort(order)]
    return [
        np.concatenate(dealt[first : first + shards_per_client]) for first in range(0, len(dealt), shards_per_client)
    ]


def _whole_classes(labels: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    names, counts = np.unique(labels, return_counts=True)
    if len(names) < clients:
        raise InputError(
            f"{len(names)} restaurants are too few for {clients} clients that have each their own: "
            f"use at most {len(names)} clients"
        )
    order = rng.permutation(len(names))  # so that chance decides between classes of the same size
    order = order[np.argsort(-counts[order], kind="stable")]
    holder, held = np.empty(len(names), dtype=np.int64), np.zeros(clients, dtype=np.int64)
    for place in order:
        holder[place] = held.argmin()
        held[holder[place]] += counts[place]
    client_of = holder[np.searchsorted(names, labels)]
    parts = [np.flatnonzero(client_of == client) for client in range(clients)]
    if min(map(len, parts)) < 2:
        raise InputError(f"a restaurant has a single text and {clients} clients need two each: use fewer clients")
    return parts
