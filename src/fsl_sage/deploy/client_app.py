"""The ClientApp: what a node does with the server's messages.

Flower starts a process for every message. torch and other modules for training are imported only in the functions that
train, so that a process that stores a chunk of weights starts fast.
"""

import atexit
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fsl_sage.engines.flower.weight_store import WEIGHTS, WeightStore
from fsl_sage.errors import InputError

if TYPE_CHECKING:
    from fsl_sage.deploy.site import Site

LOG = logging.getLogger("flwr")

Result = TypeVar("Result")


class SiteError(RuntimeError):
    """A failure at a site, as the server is told of it. The site's own log says more."""


def make_client_app(config_file: Path, mods: Sequence[Any] = ()) -> ClientApp:
    """The ClientApp of an app.

    Args:
        config_file: The app's config.json, with the configuration and the agreement.
        mods: Flower's mods, which wrap every message.
    """
    app = ClientApp(mods=list(mods))

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        """Say which client this node is."""
        return _reply(message, client=_careful(lambda: _hello(_site(config_file, context))))

    @app.query("offer")
    def offer(message: Message, context: Context) -> Message:
        """Say which chunks of the frozen weights are missing here."""
        return _reply(message, lacks=_careful(lambda: _lacking(_site(config_file, context), message)))

    @app.query(WEIGHTS)
    def weights(message: Message, context: Context) -> Message:
        """Keep chunks of weights."""
        _careful(lambda: _keep(WeightStore(_state(context) / WEIGHTS), message))
        return _reply(message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        """Play one local round."""
        return Message(_careful(lambda: _train(_site(config_file, context), message)), reply_to=message)

    @app.query("finish")
    def finish(message: Message, context: Context) -> Message:
        """End the run."""
        _careful(lambda: _finish(_site(config_file, context), message))
        return Message(RecordDict(), reply_to=message)

    return app


def _hello(site: "Site") -> int:
    """The site's client. Its data are read, so that a fault shows before the first round."""
    site.look()
    return site.client


def _lacking(site: "Site", message: Message) -> list[str]:
    """SHA256.NUMBER of every missing chunk of the foundation in the message."""
    about = message.content.config_records["about"]
    block = message.content.array_records["foundation"]["block"].data
    site.look()
    return [f"{sha256}.{number}" for sha256, number in site.lacks(str(about["run"]), block)]


def _keep(store: WeightStore, message: Message) -> None:
    """Put the chunks of a message into the store."""
    arrays = message.content.array_records["tensors"]
    sizes: Any = message.content.config_records["about"]["sizes"]
    for (name, array), size in zip(arrays.items(), sizes, strict=True):
        sha256, _, number = name.partition(".")
        store.put(sha256, int(size), int(number), array.data)


def _train(site: "Site", message: Message) -> RecordDict:
    """The report of the local round that the message assigns."""
    from fsl_sage.engines.flower.contents import Assignment

    assignment = Assignment.read(message.content)
    if Path(sys.argv[0]).name == "flwr-clientapp":  # the process ends after the reply is sent
        atexit.register(site.note_peak, assignment.run, 0)
    try:
        return site.train(assignment).content()
    finally:
        site.note_peak(assignment.run)


def _finish(site: "Site", message: Message) -> None:
    from fsl_sage.engines.flower.contents import Assignment

    site.finish(Assignment.read(message.content))


def _reply(message: Message, **values: Any) -> Message:
    return Message(RecordDict({"about": ConfigRecord(values)}), reply_to=message)


def _site(config_file: Path, context: Context) -> "Site":
    """The site that the SuperNode's --node-config describes."""
    from fsl_sage.deploy.agreement import at_site, read_agreement
    from fsl_sage.deploy.site import Place, Site

    config, agreement = read_agreement(config_file)
    node = context.node_config
    if not isinstance(node.get("client"), int) or not isinstance(node.get("data"), str):
        raise InputError("""The SuperNode needs --node-config 'client=0 data="PATH" state="DIR"'.""")
    own = {name: Path(str(node[name])).expanduser() for name in ("tokenizer", "model") if node.get(name)}
    place = Place(int(node["client"]), Path(str(node["data"])).expanduser(), _state(context), **own)
    return Site(at_site(config, config_file), agreement, place)


def _state(context: Context) -> Path:
    default = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "fsl-sage"
    return Path(str(context.node_config.get("state", default))).expanduser()


def _careful(work: Callable[[], Result]) -> Result:
    """Call `work`. Flower sends an exception's text to the server, so only sentences for people are raised."""
    try:
        return work()
    except InputError as error:
        LOG.error("%s", error)
        raise SiteError(str(error)) from None
    except Exception as error:
        LOG.exception("The round failed")
        raise SiteError(_in_a_sentence(error)) from None


def _in_a_sentence(error: Exception) -> str:
    if "allocate memory" in str(error) or isinstance(error, MemoryError):
        return f"the memory of its process does not suffice{_allowed()}; a cut nearer to the input needs less"
    if "fsl_sage.engines.base" in sys.modules:
        from fsl_sage.engines.base import ClientError

        if isinstance(error, ClientError):
            return "its training failed; the log of the node says why"
    return f"{type(error).__name__}; the log of the node says more"


def _allowed() -> str:
    """The limit that was set for the process, if there is one."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    except (ImportError, OSError):
        return ""
    return "" if limit == resource.RLIM_INFINITY else f": it may take {limit / 1e6:,.0f} MB"
