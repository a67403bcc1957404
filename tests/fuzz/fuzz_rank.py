"""A rank that runs the programs that it reads from its standard input: python fuzz_rank.py RANK WORLD PORT [MUTANT].

Each line is a program; each answer is a line, too. MUTANT is a defect put into our sources as they are imported
(`mutants`), to see that it is found.
"""

import contextlib
import faulthandler
import gc
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import mutants

if len(sys.argv) > 4 and sys.argv[4]:
    mutants.put_in(sys.argv[4])

import torch
from jobs import Stock, run
from programs import Program, program_of
from torch import distributed as dist
from torch.profiler import ProfilerActivity, profile
from watches import Launched, Route, Siblings, Tuned, make_small, save_settings


def census() -> dict[str, int]:
    """What a process holds that outlives a job within it."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(entry.readlink()))
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "sockets": sum(link.startswith("socket:") for link in links),
        "files": sum(not link.startswith(("socket:", "pipe:", "anon_inode:")) for link in links),
        "pipes": sum(link.startswith(("pipe:", "anon_inode:")) for link in links),
        "children": len(children),
        "shared memory": len(list(Path("/dev/shm").glob(f"*_{os.getpid()}_*"))),
    }


def settled(least: dict[str, int]) -> dict[str, int]:
    """What is left over `least` when all that is on its way out has gone.

    Threads take a moment; connections to a store that this rank holds go when the other ranks are here too, and one
    that waits for its data loader's workers comes 10 s later: up to 30 s.
    """
    for attempt in range(175):
        now = census()
        left = {name: number - least[name] for name, number in now.items() if number > least[name]}
        if not left:
            break
        if attempt in {3, 20}:
            gc.collect()
        time.sleep(0.002 * attempt)
    if "threads" in left:
        left["named"] = sorted(  # type: ignore[assignment]
            [thread.name for thread in threading.enumerate()]
            + [(entry / "comm").read_text().strip() for entry in Path("/proc/self/task").iterdir()]
        )
    return left


class Runner:
    """Runs programs and compares."""

    def __init__(self) -> None:
        self.num_run = 0

    def run(self, program: Program) -> dict[str, Any]:
        """What came of it."""
        found: dict[str, Any] = {"seed": program.seed, "mode": program.mode, "equal": True, "left": {}, "stats": {}}
        began, began_s = time.process_time(), time.monotonic()
        stock = run(program, Stock())
        stock_s = time.monotonic() - began_s
        say({"seed": program.seed, "phase": "with us", "stock_s": stock_s})
        found["raised"] = next((value for label, value in stock if label == "raised"), None)
        found["num_records"] = len(stock)
        gc.collect()
        before = census()
        folder = Path(tempfile.mkdtemp(prefix="fuzz"))
        try:
            for name, watch in self._watches(program, folder, found):
                ours = run(program if name != "learning" else program.equal(2), watch)
                found["stats"][name] = watch.stats
                difference = None if name == "learning" else first_difference(stock, ours)
                if difference is not None and found["equal"]:
                    found |= {"equal": False, "in": name, "difference": difference}
            del watch, ours
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        gc.collect()
        found["stats"]["seconds"] = [round(stock_s, 2), round(time.monotonic() - began_s - stock_s, 2)]
        found["left"] = settled(before)
        found["cpu_s"] = round(time.process_time() - began, 3)
        self.num_run += 1
        if self.num_run == 5:
            gc.freeze()
        return found

    def _watches(self, program: Program, folder: Path, found: dict[str, Any]) -> Any:
        if dist.get_world_size() == 1 and program.mode in {"route", "sibling"}:
            yield "online", Tuned(program)
            return
        match program.mode:
            case "stock":
                yield "stock", Stock()
            case "route":
                yield "route", Route(program)
            case "saved" | "relaunched":
                learning = Route(program)
                yield "learning", learning
                path = folder / "settings.json"
                found["stats"]["num_saved"] = save_settings(path, program, learning.calls)
                if program.mode == "saved":
                    yield "saved", Tuned(program, path)
                else:
                    yield "relaunched", Launched(program, "online", folder, path)
            case "online":
                yield "online", Tuned(program)
            case "launched":
                yield "launched", Launched(program, "online", folder)
            case "observe":
                yield "observe", Launched(program, "observe", folder)
            case _:
                yield "sibling", Siblings(program)


def first_difference(stock: list[Any], ours: list[Any]) -> str | None:
    raised = [value for label, value in ours if label == "raised"]
    for one, other in zip(stock, ours, strict=False):
        if one != other:
            return f"{one[0]}: {str(one[1])[:300]} with us {other[0]}: {str(other[1])[:300]}, raised: {raised}"
    if len(stock) != len(ours):
        return f"{len(stock)} records, with us {len(ours)}: {str((stock + ours)[-1])[:300]}"
    return None


def say(what: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(what)}\n")
    sys.stdout.flush()


def main() -> None:
    rank, world, port = (int(word) for word in sys.argv[1:4])
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    make_small()
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=600),  # whoever started us says how long a program may take
    )
    with profile(activities=[ProfilerActivity.CPU]):  # its first use leaves a thread of PyTorch's
        dist.barrier()
    runner = Runner()
    for line in sys.stdin:
        program = program_of(line)
        try:
            found = runner.run(program)
        except BaseException as error:
            logging.exception("the fuzzer failed")
            found = {"seed": program.seed, "mode": program.mode, "equal": False, "left": {}, "stats": {}}
            found |= {"in": "fuzzer", "difference": f"{type(error).__name__}: {error}"}
        say(found)
    os._exit(0)  # gloo's threads drop the last call's tensors and need Python for it (PyTorch issue 190489)


if __name__ == "__main__":
    main()
