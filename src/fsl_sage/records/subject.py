"""What a run is about, in the few words that stand above a figure: model, data, partition, clients."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def subject(options: Sequence[Mapping[str, Any]], *, of_model: bool = True) -> str:
    """What all runs with these options, by path, have in common; what differs between them is left out."""
    model = _common(options, lambda own: short_name(own["model.name"])) if of_model else ""
    data = _common(options, lambda own: short_name(own["data.name"]))
    task = f"{model} on {data}" if model and data else model or data
    rest = (_common(options, partition_text), _common(options, lambda own: clients_text(own["clients"])))
    return ", ".join(part for part in (task, *rest) if part)


def _common(options: Sequence[Mapping[str, Any]], tell: Callable[[Mapping[str, Any]], str]) -> str:
    """What is told of every run, or nothing."""
    told = {tell(own) for own in options}
    return told.pop() if len(told) == 1 else ""


def partition_text(options: Mapping[str, Any]) -> str:
    """How the examples are divided among the clients."""
    partition = str(options["data.partition"])
    more = {
        "dirichlet": f" (alpha {options['data.alpha']:g})",
        "shards": f" ({options['data.shards_per_client']} a client)",
    }
    return partition + more.get(partition, "")


def clients_text(clients: int) -> str:
    """How many clients there are."""
    return "1 client" if clients == 1 else f"{clients} clients"


def short_name(name: str) -> str:
    """A name that fits: of a path its end."""
    return name if len(name) <= 40 else f"…{name[-39:]}"
