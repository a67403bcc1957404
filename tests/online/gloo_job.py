"""Starts the ranks of a small real job as processes of this machine, watches them, and collects what they say."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hosts import Network, ipv4

import lagom_overlap
from forked_python import ForkedPython
from ports import free_port

SRC = str(Path(lagom_overlap.__file__).parents[1])
RANK = Path(__file__).with_name("gloo_rank.py")
QUICK = {
    "window_steps": 4,
    "num_pairs": 3,
    "max_steps": 68,
    "timeout_s": 20.0,
    "watch_steps": 6,
    "drift_ratio": 1e6,
    "check_share": 0.0,
}
"""A verdict of at most 48 steps (three pairs of the default, then three) after a search of about 20; saved settings are
trusted, whatever they cost on this machine."""


@dataclass
class GlooJob:
    """What every rank does; `also_stock` trains without a tuner first, in the same processes.

    On a `network` every machine has two ranks; `master` is where they meet, rank 0's machine if it is not given.
    """

    folder: Path
    kind: str = "fsdp2"
    num_ranks: int = 2
    steps: int = 60
    also_stock: bool = True
    tuner: dict[str, Any] = field(default_factory=dict)
    per_rank: dict[int, dict[str, Any]] = field(default_factory=dict)
    optimizer_steps: tuple[int, ...] = (1,)
    disable_at: int | None = None
    loses_store: tuple[int, int] | None = None
    """The rank that loses its connection to the job's store, and after which step."""
    save: str = ""
    file_limit_bytes: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    network: Network | None = None
    master: str | None = None
    pauses: tuple[int, ...] = ()
    """Steps in which rank 0 waits until `release` lets it go on, and with it all others."""
    loopback_channels: bool = False
    """Our groups bind an address that only their own machine reaches."""
    release_of: dict[int, str] = field(default_factory=dict)
    """The release of this package that a rank runs, if not the true one."""
    timeout_s: float = 1800.0
    """Of the job's own calls."""
    limit_s: float = 100.0
    """Of the whole job, and of whatever is waited for in it."""
    processes: list[ForkedPython] = field(default_factory=list)
    writers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.port = free_port()

    def start(self) -> "GlooJob":
        """Starts the ranks; their words go to one file each."""
        for rank in range(self.num_ranks):
            what = {
                "kind": self.kind,
                "steps": self.steps,
                "tuner": {**QUICK, **self.tuner, **self.per_rank.get(rank, {})},
                "also_stock": self.also_stock,
                "optimizer_steps": list(self.optimizer_steps),
                "disable_at": self.disable_at,
                "loses_store": self.loses_store,
                "save": self.save,
                "file_limit_bytes": self.file_limit_bytes,
                "pauses": list(self.pauses),
                "gate": str(self.folder / "go"),
                "loopback_channels": self.loopback_channels,
                "release": self.release_of.get(rank),
                "timeout_s": self.timeout_s,
            }
            local = (rank, self.num_ranks) if self.network is None else (rank % 2, 2)
            world = {"RANK": rank, "LOCAL_RANK": local[0], "WORLD_SIZE": self.num_ranks, "LOCAL_WORLD_SIZE": local[1]}
            environment = {
                **os.environ,
                **{name: str(value) for name, value in world.items()},
                "MASTER_ADDR": self.master or ("127.0.0.1" if self.network is None else ipv4(0)),
                "MASTER_PORT": str(self.port),
                "OMP_NUM_THREADS": "1",
                **self.environment,
            }
            machine = None if self.network is None else self.network.machines[rank // 2].holder.pid
            log = self.folder / f"rank{rank}.log"
            self.logs.append(log)
            with log.open("w") as file:
                process = ForkedPython(
                    RANK,
                    [json.dumps(what)],
                    env=environment,
                    machine=machine,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
                # A limit on the rank's files is none on its log.
                self.writers.append(subprocess.Popen(["cat"], stdin=process.stdout, stdout=file))
            self.processes.append(process)
        return self

    def wait_for(self, is_true: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Until something is so."""
        timeout_s = timeout_s or self.limit_s
        deadline = time.monotonic() + timeout_s
        while not is_true():
            assert time.monotonic() < deadline, f"waited {timeout_s} s in vain\n{self.words()}"
            time.sleep(0.02)

    def wait_for_pause(self, step: int) -> None:
        """Until rank 0 waits in a step."""
        self.wait_for(lambda: f"paused in step {step}\n" in self.logs[0].read_text())

    def release(self, step: int) -> None:
        """Lets it go on."""
        (self.folder / f"go{step}").touch()

    def wait_for_step(self, rank: int, step: int) -> None:
        """Until a rank has finished a step."""
        self.wait_for(lambda: f"rank {rank} step {step}\n" in self.logs[rank].read_text())

    def finish(self, timeout_s: float | None = None) -> list[int]:
        """The exit codes; whoever still runs when the time is over is killed, and that is an error."""
        timeout_s = timeout_s or self.limit_s
        deadline = time.monotonic() + timeout_s
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"a rank still runs after {timeout_s} s\n{self.words()}") from None
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends whoever still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for writer in self.writers:
            writer.wait()

    def words(self) -> str:
        """The last words of every rank."""
        return "\n".join(f"--- {log.name}\n{log.read_text()[-12_000:]}" for log in self.logs)

    def results(self) -> list[dict[str, Any]]:
        """What each rank wrote at the end of a job that went well."""
        codes = self.finish()
        assert codes == [0] * self.num_ranks, self.words()
        lines = [log.read_text().splitlines() for log in self.logs]
        return [json.loads(next(x for x in found if x.startswith("result "))[7:]) for found in lines]
