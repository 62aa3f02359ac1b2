"""A proxy on loopback that cuts the connections that go through it."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from fsl_sage.deploy.processes import HOST


class CuttingProxy:
    """Forwards to a port, and resets a connection whenever so many bytes have come down, so many times in all."""

    def __init__(self, port: int, every: int, times: int) -> None:
        self.every, self.left = every, times
        self.came = self.cuts = 0
        self._target = port
        self._lock = threading.Lock()
        self._ends: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server((HOST, 0))
        self.port = int(self._listener.getsockname()[1])
        self._start(self._accept)

    def close(self) -> None:
        """Cut what is left, and take no new connections."""
        _cut(self._listener)
        with self._lock:
            left = list(self._ends)
        for end in left:
            _cut(end)
        for thread in self._threads:
            thread.join()

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection((HOST, self._target))
            except OSError:
                near.close()
                continue
            with self._lock:
                self._ends |= {near, far}
            self._start(self._carry, near, far, False)
            self._start(self._carry, far, near, True)

    def _carry(self, source: socket.socket, sink: socket.socket, down: bool) -> None:
        try:
            while content := source.recv(2**16):
                sink.sendall(content)
                if down and self._is_due(len(content)):
                    break
        except OSError:
            pass
        for end in (source, sink):
            _cut(end)
        with self._lock:
            self._ends -= {source, sink}

    def _is_due(self, count: int) -> bool:
        with self._lock:
            self.came += count
            if not self.left or self.came < (self.cuts + 1) * self.every:
                return False
            self.left -= 1
            self.cuts += 1
            return True


def _cut(end: socket.socket) -> None:
    """Close a socket so that the other end gets a reset at once, as from a router that has forgotten the connection."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
    end.close()
