"""A rank of a job that runs one program and ends as jobs end: python fresh_rank.py RANK WORLD PORT WAY PROGRAM OUT.

WAY is "stock", "observe" or "online" (the hooks of `lagom run` are armed as its sitecustomize arms them), "config" (the
same with settings of an earlier job), "tuner" (`OnlineTuner`), "route" or "learn", which writes such settings.
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

sys.path.insert(0, str(Path(__file__).parent))


def arm(way: str, folder: Path, rank: str) -> None:
    """What `lagom run` puts into the environment, and what its sitecustomize then does."""
    from lagom_overlap.online import launch_hooks

    os.environ |= {"LAGOM_RUN_FOLDER": str(folder), "RANK": rank}
    os.environ["LAGOM_RUN_MODE"] = "observe" if way == "observe" else "online"
    if way == "config":
        os.environ["LAGOM_RUN_CONFIG"] = str(folder / "settings.json")
    launch_hooks.arm()


def main() -> None:
    rank, world, port = (int(word) for word in sys.argv[1:4])
    way, out = sys.argv[4], Path(sys.argv[6])
    logging.basicConfig(level=logging.ERROR)
    warnings.filterwarnings("ignore")
    if way in {"observe", "online", "config"}:
        arm(way, out.parent, str(rank))

    import torch
    from programs import program_of
    from torch import distributed as dist

    torch.set_num_threads(1)
    import jobs

    program = program_of(sys.argv[5])
    if way != "stock":
        import watches

        from lagom_overlap.online import launch_session
        from lagom_overlap.online.tuner import OnlineTuner

        watches.make_small()
        launch_session.OnlineTuner = partial(OnlineTuner, **watches.ONLINE, deterministic=True)  # type: ignore[misc, assignment]
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
    watch: jobs.Watch = _Alone()
    if way in {"tuner", "route", "learn"}:
        watch = watches.Tuned(program) if way == "tuner" else watches.Route(program)
    records: list[jobs.Record] = []
    try:
        jobs.run(program, watch, catches=False, records=records)
    finally:
        out.write_text(json.dumps(records))
    if way == "learn":
        watches.save_settings(out.parent / "settings.json", program, watch.keys)  # type: ignore[attr-defined]
    dist.destroy_process_group()
    time.sleep(0.1)  # gloo's threads drop the last call's tensors and need Python for it (PyTorch issue 190489)


class _Alone:
    def on_model(self, model: object, optimizer: object) -> None:
        pass

    def step(self, number: int) -> object:
        import contextlib

        return contextlib.nullcontext()

    def close(self) -> None:
        pass


if __name__ == "__main__":
    main()
