"""A rank's connections along the tree (`tree`): to its parent and its children, at most 33.

Of two neighbours the one that starts first listens, and leaves its address in the store (compare-and-set); the other
finds it there and connects. So nobody waits for a rank that never starts, and the store is asked once for each
neighbour. Whoever connects shows a nonce that stood in the store, and is shown another one. A message is JSON behind
its length in four bytes; whatever else comes ends its connection.

A child that the job forks closes its copies at once: else a parent that was killed would seem to live on in its data
loaders. No torch.
"""

import logging
import os
import secrets
import socket
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from threading import RLock
from time import monotonic
from typing import Annotated, Any, Final, Protocol

import msgspec

from lagom_overlap.engines.interfaces import is_loopback, route_to
from lagom_overlap.online.ranks.exchange import Store
from lagom_overlap.online.ranks.tree import post_of

_log = logging.getLogger(__name__)

MOST_BYTES: Final = 1 << 16
"""Of a message."""
MOST_UNSENT_BYTES: Final = 1 << 22
"""A neighbour that reads nothing (its process is stopped) is sent no more: a wait takes a few hundred bytes."""
MOST_STRANGERS: Final = 64
"""Connections that have not said who they are: more than the 32 children, who may all come at once."""
HELLO_S: Final = 30.0
"""A connection is closed that is not established by then: long, because a busy process answers late."""
_OPTIONS: Final = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    # A machine that vanished is noticed 14 s after its last word, idle (keepalive) or not (user timeout, in ms).
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 14_000),
)
Natural = Annotated[int, msgspec.Meta(ge=0)]
Word = Annotated[str, msgspec.Meta(max_length=64)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """What goes over a connection; each kind is a class of its own."""


class Greeting(Message, frozen=True):
    """Who connects."""

    rank: Natural
    nonce: Word


class Welcome(Message, frozen=True):
    """The answer to it."""

    nonce: Word


_HANDSHAKE: Final = msgspec.json.Decoder(Greeting | Welcome)


class Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a rank listens, as it stands in the store; `host` is empty for the machine that the store is on.

    That machine may know itself by a loopback address alone ("127.0.1.1 node0" in /etc/hosts); others know it by the
    one at which they reach the store.
    """

    host: str
    port: Annotated[int, msgspec.Meta(gt=0, lt=1 << 16)]
    hello: Word
    welcome: Word


class Hearer(Protocol):
    """Whom connections tell what they bring."""

    def hear(self, rank: int, message: Any) -> None:
        """A neighbour says something, of the kinds that the connections were made for."""

    def lose(self, rank: int) -> None:
        """The connection to a neighbour has ended."""

    def catch_up(self) -> Iterable[Message]:
        """What a neighbour has to be told that is here only now."""


@dataclass(slots=True, eq=False)
class _Link:
    """A connection; `rank` is -1 until its other end has said who it is, `welcome` is what that end has to say."""

    socket: socket.socket
    rank: int
    welcome: str
    until_s: float
    is_up: bool = False
    unread: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


class Links:
    """The connections; `kinds` is the union of the messages' classes. One thread works it; any may `rouse` that."""

    def __init__(self, store: Store, hearer: Hearer, *, kinds: Any, rank: int, num_ranks: int) -> None:
        self._store = store
        self._hearer = hearer
        self._decoder = msgspec.json.Decoder(kinds)
        self._rank = rank
        self._num_ranks = num_ranks
        self._post = post_of(rank, num_ranks)
        self._hello, self._welcome = secrets.token_hex(16), secrets.token_hex(16)
        self._expected: set[int] = set()
        self._links: list[_Link] = []
        self._listener: socket.socket | None = None
        # So that no byte goes to a number that is closed and has become a file's; a signal's handler may come again.
        self._waking = RLock()
        self._wake, woken = socket.socketpair()
        self._selector = DefaultSelector()
        self._selector.register(woken, EVENT_READ, lambda _: woken.recv(MOST_BYTES))
        _OPEN.add(self)

    def rouse(self) -> None:
        """Ends a `work` under way."""
        with self._waking, suppress(OSError):  # closed; or full, because the thread is busy elsewhere
            self._wake.send(b"\0", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def meet(self) -> None:
        """Listens, and connects to those neighbours that listen already.

        Raises:
            OSError, RuntimeError: if there is no way to the store's host, no socket, or no store.
        """
        host, store_at = route_to(_host_of(self._store))
        bound = host
        if is_loopback(host):
            is_one_machine = os.environ.get("LOCAL_WORLD_SIZE", str(self._num_ranks)) == str(self._num_ranks)
            host, bound = "", store_at if is_one_machine else "::"
        self._listener = socket.create_server(
            (bound, 0),
            family=socket.AF_INET6 if ":" in bound else socket.AF_INET,
            backlog=MOST_STRANGERS,
            dualstack_ipv6=bound == "::",
        )
        self._listener.setblocking(False)
        self._selector.register(self._listener, EVENT_READ, self._accept)
        own = Address(host, self._listener.getsockname()[1], self._hello, self._welcome)
        text = msgspec.json.encode(own).decode()
        for other in (self._post.parent, *self._post.children):
            if other < 0:
                continue
            # A key for each edge of the tree, named after its lower end.
            answer = self._store.compare_set(f"presence/{max(other, self._rank)}", "", text)
            if answer == text.encode():
                self._expected.add(other)
                continue
            with suppress(OSError, msgspec.MsgspecError):  # there is no connection to that one
                self._connect(other, msgspec.json.decode(answer, type=Address), store_at)
        self._stop_listening_when_all_came()

    def work(self, timeout_s: float | None) -> None:
        """Takes what comes within the time, None for any, until there is something or somebody rouses it."""
        pending = [link for link in self._links if not link.is_up]
        now = monotonic()
        for link in pending:
            if now >= link.until_s:
                self._drop(link)
            else:
                timeout_s = min(link.until_s - now, HELLO_S if timeout_s is None else timeout_s)
        for key, events in self._selector.select(timeout_s):
            key.data(events)

    def tell(self, *messages: Message) -> None:
        """Says it to every neighbour that is here."""
        for message in messages:
            for link in self._links:
                if link.rank >= 0:
                    self._send(link, message)

    def close(self) -> None:
        """Ends all of it; sent is what the system has taken."""
        with self._waking:
            self._wake.close()
        for key in [*(self._selector.get_map() or {}).values()]:
            key.fileobj.close()  # type: ignore[union-attr]  # they are sockets
        self._selector.close()

    def close_copies(self) -> None:
        """In a forked child: to its parent it means nothing, because nothing is unregistered or shut down."""
        self._waking = RLock()  # a thread that the child has not may hold it
        self.close()

    def _accept(self, _: int) -> None:
        if self._listener is None:
            return
        try:
            connection, _address = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # it is gone again
            return
        except OSError as error:  # no descriptor is left, which would be said again and again
            _log.debug("rank %d listens no longer: %s", self._rank, error)
            self._stop_listening()
            return
        if sum(link.rank < 0 for link in self._links) >= MOST_STRANGERS:
            connection.close()
        else:
            self._link(connection, -1, "")

    def _connect(self, rank: int, address: Address, store_at: str) -> None:
        where = address.host or store_at, address.port
        family, *_, numbers = socket.getaddrinfo(*where, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        connection.connect_ex(numbers)  # reading tells how it ended
        link = self._link(connection, rank, address.welcome)
        for message in (Greeting(self._rank, address.hello), *self._hearer.catch_up()):
            self._send(link, message)

    def _link(self, connection: socket.socket, rank: int, welcome: str) -> _Link:
        connection.setblocking(False)
        for option in _OPTIONS:
            with suppress(OSError):  # not every system has each
                connection.setsockopt(*option)
        link = _Link(connection, rank, welcome, monotonic() + HELLO_S)
        self._links.append(link)
        self._selector.register(connection, EVENT_READ, partial(self._attend, link))
        return link

    def _attend(self, link: _Link, events: int) -> None:
        try:
            if events & EVENT_WRITE:
                self._write(link)
            if events & EVENT_READ:
                self._read(link)
        except Exception as error:  # the connection's end, or what no rank says
            _log.debug("rank %d drops the connection to rank %d: %s", self._rank, link.rank, error)
            self._drop(link)

    def _read(self, link: _Link) -> None:
        try:
            data = link.socket.recv(MOST_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionError("it ended")
        link.unread += data
        while len(link.unread) >= 4:
            end = 4 + int.from_bytes(link.unread[:4])
            if end > 4 + MOST_BYTES:
                raise ValueError(f"a message of {end - 4} bytes")
            if len(link.unread) < end:
                return
            text = bytes(link.unread[4:end])
            del link.unread[:end]
            if link.is_up:
                self._hearer.hear(link.rank, self._decoder.decode(text))
            else:
                self._shake_hands(link, _HANDSHAKE.decode(text))

    def _shake_hands(self, link: _Link, message: Greeting | Welcome) -> None:
        """From then on the connection's end means something."""
        is_hello = link.rank < 0
        if isinstance(message, Greeting) is not is_hello:
            raise ValueError("the wrong end says so")
        if not secrets.compare_digest(message.nonce, self._hello if is_hello else link.welcome):
            raise ValueError("a wrong nonce")
        if isinstance(message, Greeting):
            self._expected.remove(message.rank)  # or that is an error
            link.rank = message.rank
            for word in (Welcome(self._welcome), *self._hearer.catch_up()):
                self._send(link, word)
            self._stop_listening_when_all_came()
        link.is_up = True

    def _send(self, link: _Link, message: Message) -> None:
        data = msgspec.json.encode(message)
        if len(link.unsent) < MOST_UNSENT_BYTES:
            link.unsent += len(data).to_bytes(4) + data
            self._write(link)

    def _write(self, link: _Link) -> None:
        """Sends what the system takes now."""
        try:
            del link.unsent[: link.socket.send(link.unsent, socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            pass
        except OSError:  # it broke, but may still bring a goodbye: reading tells its end
            link.unsent.clear()
        events = EVENT_READ | (EVENT_WRITE if link.unsent else 0)
        if self._selector.get_key(link.socket).events != events:
            self._selector.modify(link.socket, events, partial(self._attend, link))

    def _drop(self, link: _Link) -> None:
        self._links.remove(link)
        self._selector.unregister(link.socket)
        link.socket.close()
        if link.is_up:
            self._hearer.lose(link.rank)

    def _stop_listening_when_all_came(self) -> None:
        if not self._expected:
            self._stop_listening()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None


_OPEN: "weakref.WeakSet[Links]" = weakref.WeakSet()


def _close_copies() -> None:
    """In a forked child."""
    for links in [*_OPEN]:
        with suppress(Exception):
            links.close_copies()


os.register_at_fork(after_in_child=_close_copies)


def _host_of(store: object) -> str:
    """The host of the store's process; for a store that has none, such as a file, that of MASTER_ADDR."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return getattr(store, "host", "") or os.environ.get("MASTER_ADDR", "") or "localhost"
