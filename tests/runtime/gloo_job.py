"""Starts the ranks of a small real job as processes of this machine, watches them, and collects what they say."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lagom_overlap

SRC = str(Path(lagom_overlap.__file__).parents[1])
RANK = Path(__file__).with_name("gloo_rank.py")
QUICK = {"window_steps": 4, "num_pairs": 3, "max_steps": 44, "timeout_s": 20.0, "watch_steps": 6, "drift_ratio": 1e6}
"""A verdict of 24 steps after a search of about 20."""


@dataclass
class GlooJob:
    """What every rank does; `also_stock` trains without a tuner first, in the same processes."""

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
    is_in_doubt: tuple[int, int] | None = None
    """The same, but between its last word for a switch and the answer; it can connect again."""
    save: str = ""
    file_limit_bytes: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    writers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)

    def start(self) -> "GlooJob":
        """Starts the ranks; their words go to one file each."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.num_ranks):
            what = {
                "kind": self.kind,
                "steps": self.steps,
                "tuner": {**QUICK, **self.tuner, **self.per_rank.get(rank, {})},
                "also_stock": self.also_stock,
                "optimizer_steps": list(self.optimizer_steps),
                "disable_at": self.disable_at,
                "loses_store": self.loses_store,
                "is_in_doubt": self.is_in_doubt,
                "save": self.save,
                "file_limit_bytes": self.file_limit_bytes,
            }
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.num_ranks, "LOCAL_WORLD_SIZE": self.num_ranks}
            environment = {
                **os.environ,
                **{name: str(value) for name, value in world.items()},
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": SRC,
                **self.environment,
            }
            log = self.folder / f"rank{rank}.log"
            self.logs.append(log)
            with log.open("w") as file:
                process = subprocess.Popen(
                    [sys.executable, str(RANK), json.dumps(what)],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                # A limit on the rank's files is none on its log.
                self.writers.append(subprocess.Popen(["cat"], stdin=process.stdout, stdout=file))
            self.processes.append(process)
        return self

    def wait_for(self, is_true: Callable[[], bool], timeout_s: float = 100.0) -> None:
        """Until something is so."""
        deadline = time.monotonic() + timeout_s
        while not is_true():
            assert time.monotonic() < deadline, f"waited {timeout_s} s in vain\n{self.words()}"
            time.sleep(0.02)

    def wait_for_step(self, rank: int, step: int) -> None:
        """Until a rank has finished a step."""
        self.wait_for(lambda: f"rank {rank} step {step}\n" in self.logs[rank].read_text())

    def finish(self, timeout_s: float = 100.0) -> list[int]:
        """The exit codes; whoever still runs when the time is over is killed, and that is an error."""
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
