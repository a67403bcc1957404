"""A rank that runs random programs on an emulated GPU: torchrun ... emulated_rank.py FOLDER FIRST SECONDS.

Each program runs alone and under `OnlineTuner`, which our plug-in in NCCL serves. The device computes small tensors,
and a program has no others; so all is compared that is compared on gloo. A line of FOLDER/rank{R}.jsonl for each
program: its seed, and what differed. A rank that waits in vain is told so by the device, and the exception differs.
"""

import contextlib
import gc
import json
import logging
import os
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from fuzz_rank import first_difference
from jobs import Stock, run
from programs import FAMILIES, Program, drawn
from torch import distributed as dist
from watches import LEAST_BYTES, Tuned, make_small

from lagom_overlap.online.routes import nccl, plugin, plugin_timer

NOT_HERE = frozenset({"fork", "loader"})
"""CUDA allows no fork, and a loader draws its seed on the default device."""


def program_of(seed: int, num_ranks: int) -> Program:
    """The program of a number, without what cannot be on a GPU."""
    program = drawn(seed, num_ranks, mode="online", family=FAMILIES[seed % len(FAMILIES)])
    return replace(program, features=tuple(one for one in program.features if one[0] not in NOT_HERE))


def outcome(program: Program) -> dict[str, Any]:
    """What came of a program, alone and with us."""
    stock = run(program, Stock())
    gc.collect()
    watch = Tuned(program)
    ours = run(program, watch)
    gc.collect()
    return {
        "seed": program.seed,
        "family": program.family,
        "features": program.features,
        "difference": first_difference(stock, ours),
        "raised": next((value for label, value in stock if label == "raised"), None),
        "num_records": len(stock),
        "stats": watch.stats,
    }


def main() -> None:
    folder, first, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    logging.basicConfig(level=logging.WARNING)
    warnings.filterwarnings("ignore")
    make_small()
    for module in (nccl, plugin, plugin_timer):
        module.LEAST_BYTES = LEAST_BYTES  # type: ignore[misc, assignment, attr-defined]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.set_default_device(device)
    dist.init_process_group("nccl")
    torch.ones(2).nonzero()  # a size decided by values: from here on the device waits for all that small operators need
    num_ranks, give_up = dist.get_world_size(), time.monotonic() + seconds
    with (folder / f"rank{dist.get_rank()}.jsonl").open("a") as out:
        for seed in range(first, first + 1_000_000):
            goes_on = torch.tensor(int(time.monotonic() < give_up))
            dist.broadcast(goes_on, 0)
            if not goes_on.item():
                break
            with contextlib.suppress(OSError):
                (folder / f"now{dist.get_rank()}").write_text(str(seed))
            try:
                found = outcome(program_of(seed, num_ranks))
            except BaseException as error:
                logging.exception("the fuzzer failed")
                found = {"seed": seed, "difference": f"the fuzzer failed: {type(error).__name__}: {error}"}
            out.write(f"{json.dumps(found)}\n")
            out.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
