"""A rank that runs programs drawn at random: python fuzz_rank.py RANK WORLD PORT FIRST NUMBER DEFECT [KIND].

DEFECT is one that this project once had, put back to see that it is found; "" for none.
"""

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "online"))  # adapter_programs

import torch
from random_programs import run
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lagom_overlap.online.adapters.ddp import DdpHook
from lagom_overlap.online.adapters.fsdp2 import Fsdp2Adapter
from lagom_overlap.online.routes.gloo_work import RunWork


def prefetch_in_order_of_registration() -> None:
    """D1: what is gathered ahead, and not used next, is used later under other weights."""
    attach = Fsdp2Adapter.attach

    def attach_and_prefetch(self: Fsdp2Adapter, model: nn.Module, route: Any) -> Callable[[], None]:
        modules = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
        for one, after in pairwise(modules):
            one.register_forward_hook(partial(gather, after))
        return attach(self, model, route)

    def gather(module: FSDPModule, *_: Any) -> None:
        module.unshard()

    Fsdp2Adapter.attach = attach_and_prefetch  # type: ignore[method-assign]


def divide() -> None:
    """D3: DDP multiplies by 1/n."""
    DdpHook._scale = lambda self, buffer, num_ranks: buffer.div_(num_ranks)  # type: ignore[method-assign, assignment]


def without_futures() -> None:
    """D4: handles that lack what torch's have."""
    del RunWork.get_future


DEFECTS = {"": lambda: None, "D1": prefetch_in_order_of_registration, "D3": divide, "D4": without_futures}


def main() -> None:
    rank, world, port, first, number = (int(word) for word in sys.argv[1:6])
    kind = sys.argv[7] if len(sys.argv) > 7 else None
    DEFECTS[sys.argv[6]]()
    logging.basicConfig(level=logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    for seed in range(first, first + number):
        try:
            found = run(seed, kind)
        except Exception as error:
            found = {"name": str(seed), "equal": False, "stock": "", "ours": f"{type(error).__name__}: {error}"}
        sys.stdout.write(f"{json.dumps(found)}\n")
        sys.stdout.flush()
        if not found["equal"]:  # what a failed program leaves behind is no start for another one
            break
    os._exit(0)


if __name__ == "__main__":
    main()
