"""The server of the page: this machine's own requests alone, three addresses, and nothing that is named by a path."""

import json
import secrets
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

from fsl_sage.errors import InputError
from fsl_sage.watch.folder import Watched

LOOPBACK = "127.0.0.1"
MOST = 2**16 - 1
"""The greatest port."""
PAGE = "page.html"
NONCE = "$nonce"
"""Stands in the page where the word goes without which the browser runs no script of it."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_POLICY = (
    "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Server(ThreadingHTTPServer):
    """Listens on loopback. `serve_forever` serves; `address` is for the browser."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file: give a run's directory, or a folder with runs in it.")
        self.watched = Watched(folder)
        self.page = (files("fsl_sage.watch") / PAGE).read_text("utf-8")
        if not 0 <= port <= MOST:
            raise InputError(
                f"--port {port} cannot be used: give one from 1 to {MOST}, or leave it out for a free one."
            )
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise InputError(
                f"--port {port} cannot be used: {error.strerror or error}. Leave it out for a free one."
            ) from None

    def server_bind(self) -> None:
        """Bind, without asking the network for this machine's name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = LOOPBACK, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is no error."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{LOOPBACK}:{self.server_port}/"

    @property
    def own_hosts(self) -> set[str]:
        """What a browser that was pointed here says. A name that an attacker's DNS has turned to here says another."""
        names = {LOOPBACK, "localhost"}
        return {f"{name}:{self.server_port}" for name in names} | (names if self.server_port == 80 else set())


def _split(address: str) -> SplitResult | None:
    """The parts of an address; None if it is none, such as one with half a bracket."""
    try:
        return urlsplit(address)
    except ValueError:
        return None


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version = "fsl-sage"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        """The page, the state of the runs, or the rounds of one."""
        if (refusal := self._refusal()) is not None:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", refusal)
            return
        asked = _split(self.path)
        if asked is None:
            self._send(HTTPStatus.BAD_REQUEST, "text/plain", "This is no address.")
        elif asked.path == "/":
            self._send_page()
        elif asked.path == "/state":
            self._send_json(self.server.watched.state())
        elif asked.path == "/rounds":
            self._send_json(self._rounds(asked.query))
        else:
            self._send_json(None)

    def _refusal(self) -> str | None:
        """Why a request is not answered: it is another site's, or for another host."""
        if self.headers.get("Host") not in self.server.own_hosts:
            return f"Ask for {self.server.address} itself: this host is not answered for."
        if self.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            return "The page of another site may not ask."
        origin = self.headers.get("Origin")
        if origin is not None and ((page := _split(origin)) is None or page.netloc not in self.server.own_hosts):
            return "The page of another site may not ask."
        return None

    def _rounds(self, query: str) -> dict[str, Any] | None:
        values = parse_qs(query, keep_blank_values=True)
        asked = [values.get(name, [""])[0] for name in ("run", "from")]
        if not all(each.isascii() and each.isdigit() and len(each) < 10 for each in asked):
            return None
        return self.server.watched.rounds(*map(int, asked))

    def _send_page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        page = self.server.page.replace(NONCE, nonce)
        self._send(HTTPStatus.OK, "text/html", page, {"Content-Security-Policy": _POLICY.format(nonce)})

    def _send_json(self, value: Any) -> None:
        if value is None:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "There is no such thing here.")
            return
        self._send(HTTPStatus.OK, "application/json", json.dumps(value, allow_nan=False, separators=(",", ":")))

    def _send(self, status: HTTPStatus, kind: str, text: str, more: dict[str, str] | None = None) -> None:
        body = text.encode(errors="replace")
        self.send_response(status)
        for name, value in {**_HEADERS, **(more or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal belongs to who started the command."""
