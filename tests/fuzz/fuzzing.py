"""Persistent ranks to which random programs are given one after another, and what became of each.

Results are data: `kind` is "equal", "differs", "left" (something stayed behind), "hung" or "died", `phase` where a rank
was: a job that hangs or dies before it ran with us is stock PyTorch's or the fuzzer's own.
"""

import contextlib
import json
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from programs import Program, smaller  # noqa: E402

from forked_python import ForkedPython  # noqa: E402
from ports import free_port  # noqa: E402

RANK = Path(__file__).with_name("fuzz_rank.py")
os.environ["FORKED_PYTHON_PRELOADS"] = (
    "torch.distributed.pipelining torch.distributed.checkpoint.state_dict "
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook torch.distributed.tensor.parallel"
)


STOCK_LIMIT_S = 150.0
STOCK_APART_S = 40.0
"""By so much may ranks end their stock run apart: where one has failed, the others wait for it for ever."""
ALLOWED_S = 25.0
"""What a program may take longer with us than six times what stock took here: far less than a stall of a minute."""


def limit_s(stock_s: float, allowed_s: float = ALLOWED_S) -> float:
    """How long a program may take with us, which is up to two runs and what reaches agreement."""
    return 6 * stock_s + allowed_s


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a program."""

    program: Program
    kind: str
    phase: str = ""
    why: str = ""
    raised: Any = None
    stats: dict[str, Any] = field(default_factory=dict)
    cpu_s: float = 0.0

    @property
    def is_find(self) -> bool:
        return self.kind != "equal"

    def line(self) -> str:
        """For people."""
        program = self.program
        return (
            f"{self.kind:8} seed {program.seed} ranks {program.num_ranks} {program.mode} {program.family} "
            f"{' '.join(map(str, program.features))}: {self.why}"
        )


class Ranks:
    """Some ranks and their conversation; started anew after each program that they did not come through unharmed."""

    def __init__(self, num_ranks: int, *, mutant: str = "", allowed_s: float = ALLOWED_S, programs: int = 150) -> None:
        self._num_ranks, self._mutant, self._allowed_s, self._programs = num_ranks, mutant, allowed_s, programs
        self._folder = Path(tempfile.mkdtemp(prefix="fuzzranks"))
        self._processes: list[ForkedPython] = []
        self._buffers: list[bytes] = []
        self._num_run = 0

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self.stop()
        port = free_port()
        environment = os.environ | {"TMPDIR": str(self._folder), "KINETO_LOG_LEVEL": "6"}
        for rank in range(self._num_ranks):
            with (self._folder / f"err{rank}").open("w") as err:
                arguments = [str(rank), str(self._num_ranks), str(port), self._mutant]
                self._processes.append(
                    ForkedPython(RANK, arguments, env=environment, stdin=-1, stdout=-1, stderr=err, text=False)
                )
        self._buffers = [b""] * self._num_ranks
        self._num_run = 0

    def stop(self) -> None:
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            process.kill()
            if process.stdout is not None:
                process.stdout.close()
        for process in self._processes:
            process.wait(30)
        self._processes.clear()

    def errors(self) -> str:
        return "\n".join((self._folder / f"err{rank}").read_text()[-6000:] for rank in range(self._num_ranks))

    def run(self, program: Program) -> Result:
        """Runs a program, and starts the ranks anew if it harmed them."""
        if not self._processes or self._num_run >= self._programs:
            self.start()
        self._num_run += 1
        answers: dict[int, dict[str, Any]] = {}
        phases = ["stock"] * self._num_ranks
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.write(f"{program.text()}\n".encode())
                process.stdin.flush()
        give_up = time.monotonic() + STOCK_LIMIT_S
        died: list[int] = []
        while len(answers) < self._num_ranks and time.monotonic() < give_up and not died:
            for rank, line in self._lines(1.0):
                if "phase" in line:
                    phases[rank] = line["phase"]
                    is_over = "stock" not in phases
                    give_up = time.monotonic() + (
                        limit_s(line["stock_s"], self._allowed_s) if is_over else STOCK_APART_S
                    )
                else:
                    answers[rank] = line
            died = [
                rank
                for rank, process in enumerate(self._processes)
                if rank not in answers and process.poll() is not None
            ]
        result = self._result(program, answers, phases, died)
        if result.is_find:
            self.stop()
        return result

    def _lines(self, timeout_s: float) -> Iterator[tuple[int, dict[str, Any]]]:
        outs = {process.stdout: rank for rank, process in enumerate(self._processes) if process.stdout is not None}
        for out in select.select(list(outs), [], [], timeout_s)[0]:
            rank = outs[out]
            self._buffers[rank] += os.read(out.fileno(), 1 << 16)
            *lines, self._buffers[rank] = self._buffers[rank].split(b"\n")
            for line in lines:
                yield rank, json.loads(line)
        if not outs:
            time.sleep(timeout_s)

    def _result(
        self, program: Program, answers: dict[int, dict[str, Any]], phases: list[str], died: list[int]
    ) -> Result:
        if len(answers) < self._num_ranks:
            kind = "died" if died else "hung"
            if not died:
                for process in self._processes:
                    process.send_signal(signal.SIGUSR1)
                time.sleep(1)
            codes = [process.poll() for process in self._processes]
            phase = "stock" if "stock" in phases else "with us"
            return Result(program=program, kind=kind, phase=phase, why=f"{phases} {codes}\n{self.errors()}")
        every = [answers[rank] for rank in range(self._num_ranks)]
        common: dict[str, Any] = {
            "program": program,
            "raised": every[0].get("raised"),
            "stats": every[0]["stats"],
            "cpu_s": sum(one.get("cpu_s", 0.0) for one in every),
        }
        for rank, one in enumerate(every):
            if not one["equal"]:
                why = f"rank {rank}, {one['in']}: {one['difference']}"
                why += f"\n{self.errors()}" if one["in"] == "fuzzer" else ""
                return Result(kind="differs", phase="with us", why=why, **common)
        for rank, one in enumerate(every):
            if one["left"]:
                return Result(kind="left", phase="with us", why=f"rank {rank}: {one['left']}", **common)
        return Result(kind="equal", **common)


def is_stocks_own(ranks: Ranks, program: Program, *, times: int = 3) -> bool:
    """Whether stock PyTorch alone does not do the same twice."""
    return any(ranks.run(replace(program, mode="stock")).is_find for _ in range(times))


def minimised(ranks: Ranks, result: Result, *, limit_s: float = 240.0, tries: int = 1) -> Result:
    """The smallest program found that still is a find of the same kind; each is tried so many times."""
    give_up = time.monotonic() + limit_s
    best = result
    others: dict[int, Ranks] = {result.program.num_ranks: ranks}
    try:
        is_smaller = True
        while is_smaller and time.monotonic() < give_up:
            is_smaller = False
            for program in smaller(best.program):
                if time.monotonic() > give_up:
                    break
                if program.num_ranks not in others:
                    others[program.num_ranks] = Ranks(
                        program.num_ranks, mutant=ranks._mutant, allowed_s=ranks._allowed_s
                    )
                found = next(
                    (
                        r
                        for r in (others[program.num_ranks].run(program) for _ in range(tries))
                        if r.kind == best.kind and r.phase == best.phase
                    ),
                    None,
                )
                if found is not None:
                    best, is_smaller = found, True
                    break
    finally:
        for number, other in others.items():
            if number != result.program.num_ranks:
                other.stop()
    return best
