"""A rank of a job that runs one program and ends as jobs end: python fresh_rank.py RANK WORLD PORT WAY PROGRAM OUT.

RANK is the rank; "env" where a launcher says it and WORLD and PORT; or "spawn" in a process that spawns all ranks.

WAY is "stock", "observe" or "online" (the hooks of `lagom run` are armed as its sitecustomize arms them, unless it was
run and has armed them), "config" (the same with settings of an earlier job), "tuner" (`OnlineTuner`), "route" or
"learn", which writes such settings.
"""

import json
import logging
import os
import sys
import time
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

HOOKED = {"observe", "online", "config"}


def arm(way: str, folder: Path, rank: str) -> None:
    """What `lagom run` puts into the environment, and what its sitecustomize then does."""
    os.environ |= {"LAGOM_RUN_FOLDER": str(folder), "RANK": rank}
    os.environ["LAGOM_RUN_MODE"] = "observe" if way == "observe" else "online"
    if way == "config":
        os.environ["LAGOM_RUN_CONFIG"] = str(folder / "settings.json")
    if os.environ.get("LAGOM_DISABLE"):
        return
    from lagom_overlap.online import launch_hooks

    launch_hooks.arm()


def main(number: str, words: list[str]) -> None:
    """One rank."""
    way, out = words[2], Path(words[4])
    logging.basicConfig(level=logging.ERROR)
    warnings.filterwarnings("ignore")
    from programs import program_of

    program = program_of(words[3])
    way, rank = _way_of(program, way, number), int(os.environ["RANK"] if number == "env" else number)
    if way in HOOKED and "LAGOM_RUN_MODE" not in os.environ:
        arm(way, out.parent, str(rank))

    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    import jobs
    import models

    if way != "stock":
        import watches

        from lagom_overlap.online import launch_session
        from lagom_overlap.online.tuner import OnlineTuner

        watches.make_small()
        launch_session.OnlineTuner = partial(OnlineTuner, **watches.options_of(program))  # type: ignore[misc, assignment]
    for life in range(2 if program.has("again") else 1):
        join(program, number, rank, words, life)
        watch: jobs.Watch = jobs.Stock()
        if way in {"tuner", "route", "learn"}:
            watch = watches.Tuned(program) if way == "tuner" else watches.Route(program)
        records: list[jobs.Record] = []
        try:
            jobs.run(program.equal(2) if way == "learn" else program, watch, catches=False, records=records)
        finally:
            with out.with_name(f"{out.name}{rank}").open("a") as file:
                file.write(f"{json.dumps(records)}\n")
        if way == "learn":
            watches.save_settings(out.parent / "settings.json", program, watch.calls)  # type: ignore[attr-defined]
        dist.destroy_process_group()
        models.mesh_of.cache_clear()
    time.sleep(0.1)  # gloo's threads drop the last call's tensors and need Python for it (PyTorch issue 190489)


def _way_of(program: Any, way: str, number: str) -> str:
    """A rank may be run in another way than the others."""
    without = program.get("without")
    if without is None or way == "stock" or number != str(min(without[0], program.num_ranks - 1)):
        return way
    if without[1] == "LAGOM_DISABLE":
        os.environ["LAGOM_DISABLE"] = "1"
        return way
    return str(without[1])


def join(program: Any, number: str, rank: int, words: list[str], life: int) -> None:
    """The process group; its second life begins with a store of its own, as does a job's that starts anew."""
    from torch import distributed as dist

    where: dict[str, Any] = {}
    if number != "env":
        where = {"init_method": f"tcp://127.0.0.1:{int(words[1])}", "rank": rank, "world_size": int(words[0])}
    backend = None if program.has("no_backend") else "gloo"
    if life:  # the port may be in use by the first one's connections
        where |= {"init_method": f"file://{Path(words[4]).parent / 'tmp' / 'job meets'}"}
    # By the name that hooks wrap even where the process that forked this one had imported torch before.
    dist.distributed_c10d.init_process_group(backend, timeout=timedelta(seconds=120), **where)


def spawned(number: int, words: list[str]) -> None:
    """A rank whose number only this function is told."""
    main(str(number), words)


if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        from torch import multiprocessing

        multiprocessing.spawn(spawned, (sys.argv[2:],), nprocs=int(sys.argv[2]))
    else:
        main(sys.argv[1], sys.argv[2:])
