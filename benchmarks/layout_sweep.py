"""How fast training steps are predicted: one step of Llama-3-8B, and a sweep of layouts of it on 64 H100.

    python benchmarks/layout_sweep.py [--framework NAME] [--layouts N] [--rounds N] [--against PYTHON] [--json]

- step: Llama-3-8B under FSDP2 on 8 GPUs, from model and layout to the iteration's time, nothing kept between rounds.
- sweep: TP x PP x CP x micro-batch x ZeRO x recomputation, the first `--layouts` that fit, each predicted once.

CPU seconds. `--against` names the interpreter of another environment in which another version of the package is
installed: both run in turns, each round in a process of its own, and predictions are compared to the last bit.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice, product
from statistics import median, quantiles
from typing import Final

from lagom_overlap.cost.operators import load_framework, load_operators
from lagom_overlap.cost.profile import load_profile
from lagom_overlap.errors import LagomError
from lagom_overlap.hardware import Cluster, load_preset
from lagom_overlap.sim.training import TrainingSimulator
from lagom_overlap.workload.models import load_model
from lagom_overlap.workload.parallel import ParallelLayout, Recompute
from lagom_overlap.workload.parallel.layout_check import check_layout

TARGET_STEP_MS: Final = 50.0
SEQ_LEN: Final = 8192
NUM_GPUS: Final = 64
GLOBAL_BATCH: Final = 128


def layouts() -> Iterator[ParallelLayout]:
    """Layouts of 64 GPUs; the caller leaves out what does not fit."""
    recompute = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
    for tensor, pipeline, context, micro_batch, zero_stage, again in product(
        (1, 2, 4, 8), (1, 2, 4), (1, 2), (1, 2), (1, 2, 3), recompute
    ):
        yield ParallelLayout(
            tensor=tensor,
            pipeline=pipeline,
            context=context,
            data=NUM_GPUS // (tensor * pipeline * context),
            micro_batch=micro_batch,
            global_batch=GLOBAL_BATCH,
            zero_stage=zero_stage,
            recompute=again,
            sequence_parallel=tensor > 1,
            overlap_gradients=True,
        )


def predicted_s(layout: ParallelLayout, cluster: Cluster, framework: str) -> float:
    """The iteration.

    Raises:
        LagomError: if the layout cannot be built.
    """
    model = load_model("llama-3-8b")
    check_layout(model, layout, cluster, SEQ_LEN)
    simulator = TrainingSimulator(
        model,
        layout,
        seq_len=SEQ_LEN,
        cluster=cluster,
        operators=load_operators(cluster.gpu),
        framework=load_framework(framework),
        profile=load_profile("plausible"),
    )
    return simulator.times().iteration_s


def swept(framework: str) -> Iterator[float]:
    """The iterations of all layouts that can be built."""
    cluster = load_preset("h100_dgx", NUM_GPUS // 8)
    for layout in layouts():
        try:
            yield predicted_s(layout, cluster, framework)
        except LagomError:
            continue


def one_round(framework: str, num_layouts: int) -> dict[str, object]:
    """CPU seconds of a step and of a sweep, and what was predicted."""
    cluster, alone = load_preset("h100_dgx", 1), ParallelLayout(data=8, global_batch=24, zero_stage=3)
    step_s = []
    for _ in range(6):
        begin = time.process_time()
        step = predicted_s(alone, cluster, "fsdp2")
        step_s.append(time.process_time() - begin)
    begin = time.process_time()
    sweep = list(islice(swept(framework), num_layouts))
    sweep_s = time.process_time() - begin
    return {"first_step_s": step_s[0], "step_s": median(step_s[1:]), "sweep_s": sweep_s, "predicted_s": [step, *sweep]}


def rounds_of(pythons: Sequence[str], arguments: argparse.Namespace) -> list[list[dict[str, object]]]:
    """The rounds of every interpreter, in turns."""
    command = [__file__, "--framework", arguments.framework, "--layouts", str(arguments.layouts), "--one-round"]
    found: list[list[dict[str, object]]] = [[] for _ in pythons]
    for _ in range(arguments.rounds):
        for rounds, python in zip(found, pythons, strict=True):
            ran = subprocess.run([python, *command], check=True, capture_output=True, text=True)
            rounds.append(json.loads(ran.stdout))
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return {"median": median(values), "q25": low, "q75": high, "least": min(values)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; exit code 1 if a step misses its target or predictions differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", default="megatron")
    parser.add_argument("--layouts", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", metavar="PYTHON")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one-round", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if min(arguments.layouts, arguments.rounds) < 1:
        parser.error("--layouts and --rounds must be at least 1")
    if arguments.one_round:
        print(json.dumps(one_round(arguments.framework, arguments.layouts)))
        return 0
    pythons = [sys.executable, *([arguments.against] if arguments.against else [])]
    found = rounds_of(pythons, arguments)
    names = ("first_step_s", "step_s", "sweep_s")
    result: dict[str, object] = {
        "layouts": len(found[0][0]["predicted_s"]) - 1,  # type: ignore[arg-type]  # a list, read from JSON
        "rounds": arguments.rounds,
        "ours": {name: spread([one[name] for one in found[0]]) for name in names},  # type: ignore[misc]  # numbers
    }
    identical = all(one["predicted_s"] == found[0][0]["predicted_s"] for rounds in found for one in rounds)
    if arguments.against:
        result["against"] = {name: spread([one[name] for one in found[1]]) for name in names}  # type: ignore[misc]  # as above
        pairs = list(zip(*found, strict=True))
        result["ratio"] = {name: spread([other[name] / one[name] for one, other in pairs]) for name in names}  # type: ignore[operator]  # as above
    result["identical"] = identical
    if arguments.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key}: {value}" if not isinstance(value, dict) else key)
            for name, row in value.items() if isinstance(value, dict) else ():
                print(
                    f"  {name:14} {row['median']:8.3f}  [{row['q25']:.3f}, {row['q75']:.3f}], least {row['least']:.3f}"
                )
    met = result["ours"]["step_s"]["median"] * 1e3 <= TARGET_STEP_MS  # type: ignore[index]  # as above
    return 0 if met and identical else 1


if __name__ == "__main__":
    sys.exit(main())
