"""The page that shows runs live, as long as the command runs."""

import webbrowser
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from fsl_sage.watch.server import Server


def watch(console: Console, folder: Path, port: int, *, open_browser: bool) -> None:
    """Serve the page until Ctrl-C, which is no error here: there is no other end."""
    with Server(folder, port) as server:
        named = escape(str(folder))
        if not folder.exists():
            console.print(f"There is no {named} yet: what starts there will appear.", highlight=False, soft_wrap=True)
        console.print(f"Watching {named} at [bold]{server.address}[/]", highlight=False, soft_wrap=True)
        console.print("Ctrl-C ends it; the runs go on.", highlight=False)
        if open_browser:
            webbrowser.open(server.address)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            return
