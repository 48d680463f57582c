"""A link that counts what goes to the cloud, and can hold it up at a byte."""

import contextlib
import socket
import threading
from contextlib import contextmanager

CHUNK_BYTES = 64 << 10


class Link:
    """Forwards connections to a port. sent: bytes that went to the cloud."""

    def __init__(self, port, most=None):
        self._port, self._most = port, most
        self.sent, self.full = 0, threading.Event()
        self._ended = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self):
        """Cut every connection."""
        self._ended.set()
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(30)

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._open += [near, far]
                for of, to, count in ((near, far, self._counted), (far, near, len)):
                    self._threads.append(threading.Thread(target=self._pump, args=(of, to, count)))
                    self._threads[-1].start()

    def _pump(self, of, to, count):
        with contextlib.suppress(OSError):
            while data := of.recv(CHUNK_BYTES):
                to.sendall(data)
                count(data)
            to.shutdown(socket.SHUT_WR)

    def _counted(self, data):
        self.sent += len(data)
        if self._most is not None and self.sent >= self._most:
            self.full.set()
            self._ended.wait()


@contextmanager
def link(port, most=None):
    """A link for the block. most: bytes after which nothing more goes to the cloud."""
    made = Link(port, most)
    try:
        yield made
    finally:
        made.close()
