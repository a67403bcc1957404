"""The rank process: `python -m lagom_overlap.engines.gloo_worker --rank R --ranks N --parent PID ...`.

Spawned by a controller on this machine: stdin brings commands and its end is the controller's end, stdout carries
replies (rank 0), anything else that is printed goes to stderr. A spawned rank dies with its parent: the kernel kills it
(PR_SET_PDEATHSIG), and the end of stdin does where that is not enough. SIGINT and SIGTERM are ignored: the controller
decides.

Exit codes: 0 ended on command, `PEER_LOST` when another rank or the controller went away, 1 for any other error.
"""

import argparse
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib import import_module, metadata
from queue import SimpleQueue
from threading import Event, Thread
from time import monotonic
from typing import Any, Final, Protocol, cast

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.rendezvous import rendezvous

from lagom_overlap.engines.base import Engine
from lagom_overlap.engines.bounded import BoundedCalls
from lagom_overlap.engines.fx.commands import (
    PlanRun,
    Profiled,
    ProfileProgram,
    Refused,
    RunPlan,
    RunSettings,
    Traced,
    TraceSteps,
)
from lagom_overlap.engines.gloo_engine import GlooEngine
from lagom_overlap.engines.gloo_group import NEVER, PrefixStore, Store, TCPStore, device_like, open_group
from lagom_overlap.engines.gloo_rank import Control, RankSession
from lagom_overlap.engines.interfaces import interface_to_bind
from lagom_overlap.engines.messages import (
    PEER_LOST,
    Join,
    Listening,
    Measure,
    Ready,
    Stop,
    decode_command,
    encode,
)
from lagom_overlap.errors import first_line
from lagom_overlap.interrupts import SIGNALS

BEAT_S: Final = 1.0
"""Seconds between heartbeats: short against `SILENCE_S`, long against a store's round trip. Chosen, not measured."""
SILENCE_S: Final = 120.0
"""Equal to the time that ranks may take to meet (`MEETING_TIMEOUT`)."""
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
    """One rank's heartbeat and its watch over the others' of several machines; `end` is called once, with the reason.

    Collectives wait without a limit here, because a live controller may take as long as it likes. What ends the wait is
    the launcher's store, not the group, which may be what failed: every rank writes heartbeats, rank 0 watches all
    others and they watch rank 0. A rank that fails writes that; a rank without heartbeats for `SILENCE_S`, or a store
    that does not answer, ends the process. So all ranks of a run end on every machine, whatever happened to one of
    them.
    """

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
            why = f"the launcher's store is gone: {first_line(error)}"
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


ENGINES: Final = "lagom_overlap.engines"
"""Entry points of further engines, each for ranks on one machine: `(store, *, rank, num_ranks, host) -> Engine`."""
LOOPBACK: Final = "127.0.0.1"
MEETING_TIMEOUT: Final = timedelta(seconds=120)
"""How long ranks may take to meet: importing torch is slow on a busy machine. Chosen, not measured."""
AGENT_TIMEOUT: Final = timedelta(seconds=15)
"""torchrun's agent opens its store before it starts ranks, so a rank that cannot reach it came after the job's end."""
_PR_SET_PDEATHSIG: Final = 1
"""PR_SET_PDEATHSIG of linux/prctl.h."""
ProgramCommand = ProfileProgram | RunPlan | TraceSteps | RunSettings


def pin_to_core(rank: int, num_ranks: int) -> int:
    """Pins this process to the rank-th core that it may use; -1, and no pinning, if there are fewer cores than ranks.

    Every thread of a rank then shares one core, as computation and communication share the SMs of a GPU.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < num_ranks:
        return -1
    os.sched_setaffinity(0, {cores[rank]})
    return cores[rank]


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(PEER_LOST)


class CommandLines:
    """Lines from the controller; when they end, the process ends at once, whatever it is doing."""

    def __init__(self) -> None:
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        Thread(target=self._read, name="commands", daemon=True).start()

    def get(self) -> bytes:
        """The next line."""
        return self._lines.get()

    def _read(self) -> None:
        for line in sys.stdin.buffer:
            self._lines.put(line)
        os._exit(PEER_LOST)


def claim_stdout() -> Callable[[bytes], None]:
    """A writer to what was stdout; from now on prints of any library go to stderr."""
    reply_fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(line: bytes) -> None:
        view = memoryview(line)
        while view:
            view = view[os.write(reply_fd, view) :]

    return write


def open_engine(name: str, store: Store, *, rank: int, num_ranks: int, is_one_machine: bool) -> Engine:
    """The engine that is measured: `gloo`, or where all ranks are on this machine one that is registered."""
    if name == "gloo":
        make_device = partial(device_like, _get_default_group())
        return GlooEngine(store=store, rank=rank, num_ranks=num_ranks, make_device=make_device)
    for entry in metadata.entry_points(group=ENGINES, name=name) if is_one_machine else ():
        engine: Engine = entry.load()(store, rank=rank, num_ranks=num_ranks, host=LOOPBACK)
        return engine
    raise ValueError(f"no engine {name!r} here")


def open_session(
    *, rank: int, num_ranks: int, store: Store, is_one_machine: bool, engine: str = "gloo"
) -> tuple[RankSession, Control]:
    """Meets the other ranks: the default group (native calls), the control group, the engine."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if interface := "lo" if is_one_machine else interface_to_bind(store):
        os.environ["GLOO_SOCKET_IFNAME"] = interface  # what the default group binds, and all others as it does
    default_store = PrefixStore("default", store)
    dist.init_process_group("gloo", store=default_store, rank=rank, world_size=num_ranks, timeout=NEVER)
    control_device = device_like(_get_default_group())
    control = Control(open_group(PrefixStore("control", store), rank, num_ranks, control_device), num_ranks)
    opened = open_engine(
        engine, PrefixStore("engine", store), rank=rank, num_ranks=num_ranks, is_one_machine=is_one_machine
    )
    control.barrier()
    gc.collect()
    gc.freeze()  # torch's own objects need no visit by the collection before each measurement
    return RankSession(rank=rank, num_ranks=num_ranks, engine=opened, control=control), control


class ProgramSession:
    """Executes what is asked about programs; what that needs is imported when the first one comes."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._sessions: dict[str, Any] = {}

    def execute(self, command: ProgramCommand) -> Profiled | PlanRun | Traced | Refused:
        """The answer, or why there is none."""
        answer: Profiled | PlanRun | Traced | Refused
        match command:
            case ProfileProgram():
                answer = self._session("program_session", "PlannedSession").profile(command)
            case RunPlan():
                answer = self._session("program_session", "PlannedSession").run(command)
            case TraceSteps():
                answer = self._session("training_session", "TrainingSession").trace(command)
            case RunSettings():
                answer = self._session("training_session", "TrainingSession").run(command)
        return answer

    def _session(self, module: str, name: str) -> Any:
        if name not in self._sessions:
            session_module = import_module(
                f"lagom_overlap.engines.fx.{module}"
            )  # tracing takes half a second to import
            self._sessions[name] = getattr(session_module, name)(self._control)
        return self._sessions[name]


def lead(
    session: RankSession, control: Control, next_line: Callable[[], bytes], reply: Callable[[bytes], None]
) -> None:
    """Rank 0: passes each command on, executes it, answers; returns after `Stop`."""
    programs = ProgramSession(control)
    while True:
        line = next_line()
        command = decode_command(line)
        control.broadcast(line)
        match command:
            case Stop():
                return
            case Measure():
                reply(encode(session.measure(command)))
            case ProfileProgram() | RunPlan() | TraceSteps() | RunSettings():
                reply(encode(programs.execute(command)))
            case Join():
                raise ValueError("rank 0 does not join: it is where the others join")


def follow(session: RankSession, control: Control) -> None:
    """Every other rank: executes what rank 0 passes on; returns after `Stop`."""
    programs = ProgramSession(control)
    while True:
        match decode_command(control.broadcast(None)):
            case Stop():
                return
            case Measure() as command:
                session.measure(command)
            case ProfileProgram() | RunPlan() | TraceSteps() | RunSettings() as command:
                programs.execute(command)
            case Join():
                raise ValueError("the ranks have joined already")


def _run_spawned(rank: int, num_ranks: int, *, joined: bool, engine: str) -> None:
    lines = CommandLines()
    reply = claim_stdout()
    presence: SignOfLife | None = None
    if joined:
        core, store, is_one_machine, presence = _meet_under_launcher(end=exit_with(1))
    else:
        core, is_one_machine = pin_to_core(rank, num_ranks), True
        if rank == 0:
            store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=MEETING_TIMEOUT)
            reply(encode(Listening(store.port)))
        else:
            command = decode_command(lines.get())
            if not isinstance(command, Join):
                raise ValueError(f"expected to be told where to join, got {command}")
            store = TCPStore(LOOPBACK, command.port, is_master=False, timeout=MEETING_TIMEOUT)
    with _announced(presence):
        session, control = open_session(
            rank=rank, num_ranks=num_ranks, store=store, is_one_machine=is_one_machine, engine=engine
        )
        cores = control.gather(core)
        if rank == 0:
            reply(encode(Ready(str(torch.__version__), cores)))
            lead(session, control, lines.get, reply)
        else:
            follow(session, control)
    control.barrier()  # nobody closes a connection that another rank still reads from


@contextmanager
def _announced(presence: SignOfLife | None) -> Iterator[None]:
    """The others, on whatever machine, hear of an error in here; on the way out they may end."""
    try:
        yield
    except Exception as error:
        if presence is not None:
            presence.fail(f"failed: {first_line(error)}")
        raise
    if presence is not None:
        presence.close()


def _meet_under_launcher(end: Callable[[str], None]) -> tuple[int, Store, bool, SignOfLife]:
    """This rank's core, the launcher's store, whether all ranks are on this machine, and how the ranks hear of them."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    core = pin_to_core(int(os.environ.get("LOCAL_RANK", rank)), local_ranks)
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store, _, _ = next(rendezvous("env://", timeout=AGENT_TIMEOUT if is_agents else MEETING_TIMEOUT))
    store.set_timeout(MEETING_TIMEOUT)

    def connect() -> BeatStore:
        return cast("BeatStore", PrefixStore("lagom/presence", store.clone()))

    presence = SignOfLife(connect, rank=rank, num_ranks=num_ranks, end=end)
    ours = PrefixStore("lagom", store)
    if rank == 0:
        ours.set("leader", socket.gethostname())
    elif os.environ.get("LOCAL_RANK") == "0":
        words = "%s: ranks of this machine are measured for rank 0 on %s, which writes the run folder there"
        _log.warning(words, socket.gethostname(), ours.get("leader").decode(errors="replace"))
    return core, ours, local_ranks == num_ranks, presence


def run_joined() -> int:
    """The life of a rank other than 0 under torchrun, in the launched process itself; its exit code."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        core, store, is_one_machine, presence = _meet_under_launcher(end=exit_with(PEER_LOST))
        with _announced(presence):
            session, control = open_session(rank=rank, num_ranks=num_ranks, store=store, is_one_machine=is_one_machine)
            control.gather(core)
            follow(session, control)
        control.barrier()
    except RuntimeError as error:
        _log.error("rank %d: rank 0 or another rank went away: %s", rank, error)
        return PEER_LOST
    return 0


def main() -> None:
    """Lives until told to stop, or until the controller or another rank goes away."""
    parser = argparse.ArgumentParser(
        description="One rank of lagom's gloo or workers backend; started by it, not by hand."
    )
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--joined", action="store_true")
    parser.add_argument("--engine", choices=("gloo", "workers"), default="gloo")
    arguments = parser.parse_args()
    for each in SIGNALS:  # Slurm sends SIGTERM to all processes of a step
        signal.signal(each, signal.SIG_IGN)
    die_with_parent(arguments.parent)
    try:
        _run_spawned(arguments.rank, arguments.ranks, joined=arguments.joined, engine=arguments.engine)
        code = 0
    except RuntimeError:  # torch's errors when a connection breaks are of this kind
        _log.exception("rank %d lost another rank", arguments.rank)
        code = PEER_LOST
    except Exception:
        _log.exception("rank %d failed", arguments.rank)
        code = 1
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)  # process groups with calls in flight would wait for each other on the way out


if __name__ == "__main__":
    main()
