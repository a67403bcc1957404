"""Ports of this machine that no test's connection may take between being found and being listened on."""

import os
import socket
from itertools import count
from typing import Final

_FIRST, _NUM_PORTS = 10_000, 20_000
"""Below those that Linux gives to connections (32,768 on): a port of theirs may be gone before a rank listens on it."""
_COUNTER: Final = count(os.getpid() * 101)


def free_port() -> int:
    """A port of this machine on which nobody listens, and which this process has not given before."""
    for number in _COUNTER:
        port = _FIRST + number % _NUM_PORTS
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError
