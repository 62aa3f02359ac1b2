"""The ClientApp: what a node does with the server's messages."""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fsl_sage.deploy.agreement import read_agreement
from fsl_sage.deploy.site import Site
from fsl_sage.engines.base import ClientError
from fsl_sage.engines.flower.contents import ABOUT, FINISH, HELLO, Assignment
from fsl_sage.errors import InputError

LOG = logging.getLogger("flwr")

Result = TypeVar("Result")


class SiteError(RuntimeError):
    """What the server is told of a failure at a site; the site's own log says more."""


def make_client_app(config_file: Path, mods: Sequence[Any] = ()) -> ClientApp:
    """The ClientApp of an app whose configuration and agreement are in `config_file`."""
    app = ClientApp(mods=list(mods))

    @app.query(HELLO)
    def hello(message: Message, context: Context) -> Message:
        """Which client this node is; its data are read, so that a fault shows before the first round."""
        site = _careful(lambda: _site(config_file, context))
        return Message(RecordDict({ABOUT: ConfigRecord({"client": site.client})}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        """One local round."""
        report = _careful(lambda: _site(config_file, context).train(Assignment.read(message.content)))
        return Message(report.content(), reply_to=message)

    @app.query(FINISH)
    def finish(message: Message, context: Context) -> Message:
        """The end of the run."""
        _careful(lambda: _site(config_file, context).finish(Assignment.read(message.content)))
        return Message(RecordDict(), reply_to=message)

    return app


def _site(config_file: Path, context: Context) -> Site:
    """The site that the SuperNode's --node-config describes."""
    config, agreement = read_agreement(config_file)
    node = context.node_config
    if not isinstance(node.get("client"), int) or not isinstance(node.get("data"), str):
        raise InputError("""The SuperNode needs --node-config 'client=0 data="PATH" state="DIR"'.""")
    state = Path(str(node.get("state", _default_state()))).expanduser()
    return Site(config, agreement, int(node["client"]), Path(str(node["data"])).expanduser(), state)


def _default_state() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "fsl-sage"


def _careful(work: Callable[[], Result]) -> Result:
    """Flower sends the text of an exception to the server: only what was written for a person may go there."""
    try:
        return work()
    except (InputError, ClientError) as error:
        LOG.error("%s", error, exc_info=not isinstance(error, InputError))
        said = str(error) if isinstance(error, InputError) else "its training failed; the log of the node says why"
        raise SiteError(said) from None
    except Exception as error:
        LOG.exception("The round failed")
        raise SiteError(f"{type(error).__name__}; the log of the node says more") from None
