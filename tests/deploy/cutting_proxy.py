"""A proxy on loopback that cuts the connections that go through it."""

import socket
import struct
import threading

from fsl_sage.deploy.processes import HOST


class CuttingProxy:
    """Forwards to a port, and resets a connection whenever so many bytes have come down, so many times in all."""

    def __init__(self, port: int, every: int, times: int) -> None:
        self.every, self.left = every, times
        self.came = self.cuts = 0
        self._target = port
        self._lock = threading.Lock()
        self._listener = socket.create_server((HOST, 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """No new connections."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection((HOST, self._target))
            threading.Thread(target=self._carry, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._carry, args=(far, near, True), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, down: bool) -> None:
        try:
            while content := source.recv(2**16):
                sink.sendall(content)
                if down and self._is_due(len(content)):
                    break
        except OSError:
            pass
        for end in (source, sink):
            # An end that is closed so sends a reset at once, as a router does that has forgotten the connection.
            try:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RD)
                end.close()
            except OSError:
                pass

    def _is_due(self, count: int) -> bool:
        with self._lock:
            self.came += count
            if not self.left or self.came < (self.cuts + 1) * self.every:
                return False
            self.left -= 1
            self.cuts += 1
            return True
