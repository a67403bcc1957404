"""Heartbeats of launched ranks on several machines, through the launcher's store.

Collectives wait without a limit here, because a live controller may take as long as it likes. What ends the wait is the
store, not the group, which may be what failed: every rank writes heartbeats, rank 0 watches all others and they watch
rank 0. A rank that fails writes that; a rank without heartbeats for `SILENCE_S`, or a store that does not answer, ends
the process. So all ranks of a run end on every machine, whatever happened to one of them.
"""

import logging
import os
from collections.abc import Callable
from threading import Event, Thread
from time import monotonic
from typing import Final, Protocol

from lagom_overlap.engines.bounded import BoundedCalls

BEAT_S: Final = 1.0
"""Seconds between heartbeats: short against `SILENCE_S`, long against a store's round trip. Chosen, not measured."""
SILENCE_S: Final = 120.0
"""Equal to the time that ranks may take to meet (`gloo_worker.MEETING_TIMEOUT`)."""
_FAILED: Final = "failed"

_log = logging.getLogger(__name__)


class BeatStore(Protocol):
    """The part of a `torch.distributed.Store` that is used."""

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter and returns the sum."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there; does not wait."""

    def get(self, key: str) -> bytes:
        """Reads."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Writes if the value is the expected one."""


class SignOfLife:
    """One rank's heartbeat and its watch over the others'; `end` is called once, with the reason."""

    def __init__(
        self,
        connect: Callable[[], BeatStore],
        *,
        rank: int,
        num_ranks: int,
        end: Callable[[str], None],
        beat_s: float = BEAT_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._connect = connect
        self._rank = rank
        self._heard = range(1, num_ranks) if rank == 0 else range(1)
        self._end = end
        self._beat_s, self._silence_s = beat_s, silence_s
        self._is_over = Event()
        self._calls = BoundedCalls("lagom-presence-store")
        Thread(target=self._live, name="lagom-presence", daemon=True).start()

    def fail(self, why: str) -> None:
        """Tells the others that this rank ends, and why; returns soon, also without a store."""
        self.close()
        words = f"rank {self._rank} {why}"
        try:
            self._calls.call(lambda: self._connect().compare_set(_FAILED, "", words), self._beat_s * 5)
        except Exception as error:  # nobody to tell
            _log.debug("could not tell the others: %s", error)

    def close(self) -> None:
        """From now on the others may end."""
        self._is_over.set()

    def _live(self) -> None:
        try:
            store = self._calls.call(self._connect, self._silence_s)
            last_beats = dict.fromkeys(self._heard, (0, monotonic()))
            while not self._is_over.wait(self._beat_s):
                why = self._calls.call(lambda: self._beat(store, last_beats), self._silence_s)
                if why:
                    break
            else:
                return
        except Exception as error:  # torch's are RuntimeErrors; whatever it is, the store is gone
            why = f"the launcher's store is gone: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        if not self._is_over.is_set():
            self._end(why)

    def _beat(self, store: BeatStore, last_beats: dict[int, tuple[int, float]]) -> str:
        """Says that this rank lives; why the run is over, if it is."""
        store.add(f"beat/{self._rank}", 1)
        if store.check([_FAILED]):
            return store.get(_FAILED).decode(errors="replace")
        now = monotonic()
        for rank, (last, when) in last_beats.items():
            beats = store.add(f"beat/{rank}", 0)
            if beats != last:
                last_beats[rank] = (beats, now)
            elif now - when > self._silence_s:
                return f"rank {rank} was not heard for {self._silence_s:g} s"
        return ""


def exit_with(code: int) -> Callable[[str], None]:
    """Ends the process at once with one line: its other threads may wait for what never comes."""

    def end(why: str) -> None:
        _log.error("%s", why)
        logging.shutdown()
        os._exit(code)

    return end
