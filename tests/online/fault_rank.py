"""One rank of the jobs of `fault_matrix`; not started by hand. Its only argument is JSON.

The rank trains by exchanging messages that it checks byte by byte, under a tuner or without. One rank of the job, the
victim, has a fault when it first comes to a point of the switching protocol.
"""

import atexit
import contextlib
import ctypes
import json
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import distributed as dist
from torch import nn

from lagom_overlap import OnlineTuner
from lagom_overlap.errors import LagomError
from lagom_overlap.online.ranks import exchange as exchange_module
from lagom_overlap.online.ranks import leader as leader_module
from lagom_overlap.online.ranks import member as member_module
from lagom_overlap.online.ranks.exchange import Exchange
from lagom_overlap.online.ranks.messages import Report
from lagom_overlap.online.routes.gloo import GlooRoute
from lagom_overlap.online.window import Observer

NUMBERS = 3 << 17
"""1.5 MiB, which 2, 3 and 4 ranks share evenly."""
NEWNS, MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 1, 32, 4096, 16384, 1 << 18


class LostStore:
    """A connection that is gone."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Connection reset by peer")


class MuteStore:
    """A store that neither answers nor breaks."""

    def __getattr__(self, name: str) -> Any:
        def call(*words: object) -> None:
            threading.Event().wait()

        return call


class Victim:
    """Has its fault at a point, once."""

    def __init__(self, what: dict[str, Any], *, is_here: bool) -> None:
        self.what = what
        self.tuner: OnlineTuner | None = None
        self.exchange: Exchange | None = None
        self.is_done = not is_here

    def at(self, point: str) -> None:
        """The rank comes to a point."""
        if self.is_done or point != self.what["point"]:
            return
        self.is_done = True
        say(f"fault {self.what['fault']} at {point}")
        getattr(self, self.what["fault"])()

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def term(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def interrupt(self) -> None:
        signal.raise_signal(signal.SIGINT)

    def exception(self) -> None:
        raise ValueError("a fault")

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)  # the driver lets it go on

    stop_long = stop

    def lost(self) -> None:
        """The connection breaks; a new one can be made."""
        self._set_store(LostStore())

    def lost_for_good(self) -> None:
        self._set_store(LostStore())

        def reopen() -> Any:
            raise RuntimeError("Connection refused")

        if self.exchange is not None:
            self.exchange._reopen = reopen

    def mute(self) -> None:
        self._set_store(MuteStore())

    def _set_store(self, store: Any) -> None:
        if self.exchange is not None:
            self.exchange._store = store

    def disk(self) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    def read_only(self) -> None:
        folder = self.what["folder"].encode()
        self._mounted(
            (folder, folder, None, MS_BIND, None), (None, folder, None, MS_REMOUNT | MS_BIND | MS_RDONLY, None)
        )

    def shm(self) -> None:
        self._mounted((b"none", b"/dev/shm", b"tmpfs", 0, b"size=4k"))
        with contextlib.suppress(OSError):
            Path("/dev/shm/full").write_bytes(bytes(1 << 20))

    @staticmethod
    def _mounted(*mounts: tuple[Any, ...]) -> None:
        """Mounts what this thread alone then sees; where that is not allowed, nothing happens."""
        libc = ctypes.CDLL(None, use_errno=True)
        done = libc.unshare(NEWNS) == 0 and libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
        for words in mounts:
            done = done and libc.mount(*words) == 0
        say("mounted" if done else "not mounted")

    def clock(self) -> None:
        """The wall's clock goes back an hour, the others go on an hour, as after a machine slept."""
        wall, steady, precise = time.time, time.monotonic, time.perf_counter
        time.time = lambda: wall() - 3600
        for module in (exchange_module, member_module):
            for name, clock in (("monotonic", steady), ("perf_counter", precise)):
                if hasattr(module, name):
                    setattr(module, name, lambda clock=clock: clock() + 3600)
        if self.tuner is not None and self.tuner._member is not None:
            later = lambda: precise() + 3600  # noqa: E731
            self.tuner._member._clock = later
            self.tuner._member._steps._clock = later

    def stdio(self) -> None:
        for descriptor in (1, 2):
            os.close(descriptor)

    def fork(self) -> None:
        """A child that ends as any Python process does."""
        child = os.fork()
        if child == 0:
            atexit._run_exitfuncs()
            os._exit(0)
        os.waitpid(child, 0)

    def disabled(self) -> None:
        os.environ["LAGOM_DISABLE"] = "1"

    def bug(self) -> None:
        """Something of ours fails."""
        raise RuntimeError("a bug of ours")

    def twin(self) -> None:
        """A rank of another job with the same files is here, too."""
        meet(Path(self.what["folder"]), "twin", self.what["number"], 2)


def meet(folder: Path, name: str, number: int, num_all: int) -> None:
    """Returns once all have come."""
    (folder / f"{name}-{number}").touch()
    while not all((folder / f"{name}-{other}").exists() for other in range(num_all)):
        time.sleep(0.01)


def say(words: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.write(f"{words}\n")
        sys.stdout.flush()


def around(owner: type, name: str, before: Callable[..., None], after: Callable[..., None]) -> None:
    """Calls both with the method's own arguments."""
    original = getattr(owner, name)

    def call(self: Any, *words: Any, **more: Any) -> Any:
        before(self, *words)
        found = original(self, *words, **more)
        after(self, *words)
        return found

    setattr(owner, name, call)


def watch(victim: Victim) -> None:
    """The points of the protocol, by the calls that the runtime makes."""

    def nothing(*_: Any) -> None:
        pass

    def note(self: Exchange, *_: Any) -> None:
        victim.exchange = self
        victim.at("greet")

    def at(point: str) -> Callable[..., None]:
        return lambda *_: victim.at(point)

    def last_word(self: Exchange, keys: Any, *_: Any) -> None:
        key = keys[0] if isinstance(keys, list) else keys
        if key.startswith("go/"):
            victim.at("after the last word")

    around(Exchange, "greet", note, nothing)
    around(Exchange, "report", at("before the report"), at("after the report"))
    around(Exchange, "propose", at("before the decision"), at("after the decision"))
    around(Exchange, "plan", at("before the plan"), at("after the plan"))
    around(GlooRoute, "prepare", at("getting ready"), nothing)
    around(Exchange, "_meet", at("ready"), at("before the last word"))
    around(Exchange, "_why_missing", last_word, nothing)
    around(Exchange, "_settle", last_word, nothing)
    around(GlooRoute, "commit", at("before the switch"), at("after the switch"))


def freeze_once() -> None:
    """The first report says that calls differ; the freeze is short."""
    leader_module.FROZEN_STEPS, leader_module.WATCHED_STEPS = 8, 4
    summary = Observer._summary

    def disagreeing(self: Observer, *words: Any) -> Report:
        Observer._summary = summary
        return msgspec.structs.replace(summary(self, *words), disagreement="as told")

    Observer._summary = disagreeing


def train(what: dict[str, Any], victim: Victim) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    tuner = None
    if what["tuner"] is not None:
        tuner = OnlineTuner(nn.Linear(1, 1), adapters=["calls"], **what["tuner"])
        victim.tuner = tuner
        if victim.exchange is None and tuner._member is not None:
            victim.exchange = tuner._member._exchange
    part = torch.arange(NUMBERS // size, dtype=torch.float32)
    sent = torch.cat([part + 10.0 * rank + to for to in range(size)])
    expected = torch.cat([part + 10.0 * origin + rank for origin in range(size)])
    wrong, states = 0, []
    for step in range(what["steps"]):
        if what["freezes_at"] == step and tuner is not None:
            tuner.freeze()
        with tuner.step() if tuner is not None else contextlib.nullcontext():
            arrived, summed = torch.empty(NUMBERS), torch.full((NUMBERS,), float(rank + 1))
            work = dist.all_to_all_single(arrived, sent, async_op=True)
            state = str(tuner.state) if tuner is not None else "stock"
            is_set = tuner is not None and (bool(tuner.settings) or state not in ("search", "watch", "check", "done"))
            if (tuner is None and step == 6) or is_set:
                victim.at(f"a step of {state}")
            work.wait()
            dist.all_reduce(summed)
            is_right = torch.equal(arrived, expected) and bool((summed == size * (size + 1) / 2).all())
            wrong += not is_right
        states.append(state)
    out = {"wrong": wrong, "states": states, "settings": len(tuner.settings) if tuner else 0}
    if what["point"] == "before the end":  # of all: how a rank ends in the middle of another's last call is chance
        meet(Path(what["folder"]), f"ended-{what['number']}", rank, size)
        victim.at("before the end")
    if tuner is not None:
        with contextlib.suppress(LagomError):
            tuner.save(what["save"])
        tuner.close()
        out["reason"] = tuner.reason
    return out


def main() -> None:
    what = json.loads(sys.argv[1])
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    is_victim = dist.get_rank() == what["victim"]
    victim = Victim(what, is_here=is_victim)
    if is_victim:
        watch(victim)
    if what["disagrees"] and dist.get_rank() == 1:
        freeze_once()
    found = train(what, victim)
    os.write(0, json.dumps(found).encode())  # a pipe: neither a full disk nor a closed stream keeps it from the driver
    dist.destroy_process_group()
    time.sleep(0.1)  # gloo's threads drop the last call's tensors and need Python for it (PyTorch issue 190489)


if __name__ == "__main__":
    main()
