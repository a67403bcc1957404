"""Settings off and on: what `simulate` predicts of a whole iteration, against the same job on emulated GPUs.

    LAGOM_CUDA_PYTHON=.venv-cuda/bin/python python benchmarks/emulated_settings.py [--predict] [NAME ...]

Each row is a job of `benchmarks/emulated_stacks` with one setting off and on. FSDP2's need PyTorch's CUDA build in the
environment that LAGOM_CUDA_PYTHON names, Megatron's jobs megatron-core too. The last of three steps counts. Kernels
have one cost model on both sides: this judges what frameworks issue with a setting and what that does to the iteration,
not what a GPU takes. Prints a table in Markdown; "difference" is the emulated gain less the predicted one, in points
of the iteration without the setting. Nothing here is fitted.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from lagom_overlap import simulate

HERE = Path(__file__).parent.resolve()
STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One run: `parallel` is what the job file says of it, the rest what the script is told."""

    parallel: Mapping[str, object]
    environment: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A setting off and on."""

    name: str
    setting: str
    cluster: str
    ranks: int
    model: Mapping[str, object]
    seq_len: int
    is_megatron: bool = False
    parallel: Mapping[str, object]
    off: Side
    on: Side


LLAMA = {
    "name": "llama", "num_layers": 4, "hidden": 4096, "ffn": 11008, "num_heads": 32, "num_kv_heads": 32,
    "head_dim": 128, "vocab": 32000, "gated": True,
}  # fmt: skip
GPT = {
    "name": "gpt", "num_layers": 4, "hidden": 2048, "ffn": 8192, "num_heads": 16, "num_kv_heads": 16,
    "head_dim": 128, "vocab": 32000, "gated": False,
}  # fmt: skip
FSDP2 = {"framework": "fsdp2", "data": 2, "zero_stage": 3, "micro_batch": 1}
MEGATRON = {"framework": "megatron", "micro_batch": 1, "zero_stage": 1}
NONE, GRADIENTS, BOTH = (
    Side(parallel={"overlap_gradients": gradients, "overlap_parameters": parameters}, flags=("--overlap", word))
    for word, gradients, parameters in (("none", False, False), ("gradients", True, False), ("both", True, True))
)


def _fsdp2(name: str, setting: str, off: Side, on: Side, *, seq_len: int, micro_batches: int = 1) -> Pair:
    return Pair(
        name=name,
        setting=setting,
        cluster="a40_pcie",
        ranks=2,
        model=LLAMA,
        seq_len=seq_len,
        parallel=FSDP2 | {"global_batch": 2 * micro_batches},
        off=off,
        on=on,
    )


def _megatron(name: str, setting: str, off: Side, on: Side, *, cluster: str, ranks: int = 2, pipeline: int = 1) -> Pair:
    data, layers = ranks // pipeline, max(4, 2 * pipeline)
    return Pair(
        name=name,
        setting=setting,
        cluster=cluster,
        ranks=ranks,
        model=GPT | {"num_layers": layers},
        seq_len=2048,
        is_megatron=True,
        parallel=MEGATRON | {"data": data, "global_batch": 4 * data, "pipeline": pipeline},
        off=off,
        on=on,
    )


SHARDED, WHOLE = Side(parallel={}), Side(parallel={"zero_stage": 2}, environment={"RESHARD": "0"})
TWO_AHEAD = Side(parallel={"prefetch": 2}, environment={"PREFETCH": "2"})


def _stages(num: int) -> tuple[Side, Side, Side]:
    """Stages of one model chunk; of two, whose transfers are waited for; of two that go on meanwhile."""
    plain = Side(parallel=BOTH.parallel, flags=(*BOTH.flags, "--pipeline", str(num)))
    interleaved = {**BOTH.parallel, "schedule": "interleaved", "chunks": 2}
    waits = Side(parallel=interleaved, flags=(*plain.flags, "--chunks", "2", "--no-overlap-p2p-communication"))
    return plain, waits, Side(parallel={**interleaved, "overlap_p2p": True}, flags=(*plain.flags, "--chunks", "2"))


PLAIN, _, CHUNKS = _stages(2)
PLAIN_4, WAITS_4, CHUNKS_4 = _stages(4)
PAIRS = (
    _fsdp2("whole", "reshard_after_forward=False", SHARDED, WHOLE, seq_len=2048),
    _fsdp2("whole_4", "reshard_after_forward=False, 4 micro-batches", SHARDED, WHOLE, seq_len=2048, micro_batches=4),
    _fsdp2("ahead", "prefetch of 2 units", SHARDED, TWO_AHEAD, seq_len=1024),
    _megatron("gradients", "--overlap-grad-reduce", NONE, GRADIENTS, cluster="a40_pcie"),
    _megatron("parameters", "--overlap-param-gather", GRADIENTS, BOTH, cluster="a40_pcie"),
    _megatron("gradients_h100", "--overlap-grad-reduce", NONE, GRADIENTS, cluster="h100_dgx"),
    _megatron("parameters_h100", "--overlap-param-gather", GRADIENTS, BOTH, cluster="h100_dgx"),
    _megatron("chunks_h100", "2 model chunks a stage", PLAIN, CHUNKS, cluster="h100_dgx", pipeline=2),
    _megatron("chunks", "2 model chunks a stage", PLAIN, CHUNKS, cluster="a40_nvlink", pipeline=2),
    _megatron("chunks_4", "2 model chunks a stage", PLAIN_4, CHUNKS_4, cluster="h100_dgx", ranks=4, pipeline=4),
    _megatron(
        "goes_on", "without --no-overlap-p2p-communication", WAITS_4, CHUNKS_4, cluster="h100_dgx", ranks=4, pipeline=4
    ),
)


def emulated_s(pair: Pair, side: Side, python: str) -> float:
    """The last step on emulated GPUs."""
    model, parallel = pair.model, pair.parallel
    torchrun = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(pair.ranks)]
    environment = dict(os.environ)
    if pair.is_megatron:
        sizes = ["--hidden", str(model["hidden"]), "--layers", str(model["num_layers"])]
        job = ["megatron_gpt.py", *sizes, "--sequence", str(pair.seq_len), *side.flags, str(STEPS)]
    else:
        shape = ("hidden", "ffn", "num_heads", "num_kv_heads", "head_dim", "vocab")
        micro_batches = int(str(parallel["global_batch"])) // pair.ranks
        environment |= {
            "JOINT": "1", "SHAPE": ",".join(str(model[size]) for size in shape), "SEQUENCE": str(pair.seq_len),
            "MICRO_BATCHES": str(micro_batches), **side.environment,
        }  # fmt: skip
        job = ["llama_fsdp2.py", str(model["num_layers"]), str(STEPS)]
    emulate = [python, "-m", "lagom_overlap", "emulate", "--cluster", pair.cluster, "--json", "--"]
    command = (*emulate, *torchrun, str(HERE / "emulated_stacks" / job[0]), *job[1:])
    return _last_step_s(command, tuple(environment.items()))


@cache
def _last_step_s(command: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> float:
    """Of a command, which runs once; two rows may share a side."""
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    steps_s: list[float] = json.loads(done.stdout)["steps_s"]
    return steps_s[-1]


def predicted_s(pair: Pair, side: Side) -> float:
    """The iteration that `simulate` predicts."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.toml").write_text(_toml(pair.model))
        tables: dict[str, Mapping[str, object]] = {
            "job": {"name": pair.name, "backend": "simulated"},
            "model": {"name": "model.toml", "seq_len": pair.seq_len},
            "cluster": {"preset": pair.cluster},
            "parallel": {**pair.parallel, **side.parallel},
        }
        path = Path(folder) / "job.toml"
        path.write_text("\n".join(f"[{name}]\n{_toml(table)}" for name, table in tables.items()))
        return simulate(path).iteration_s


def _toml(table: Mapping[str, object]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())


def row_of(pair: Pair, python: str) -> str:
    """Runs both sides; their row."""
    predicted = [predicted_s(pair, side) for side in (pair.off, pair.on)]
    cells = [f"{1e3 * predicted[0]:.2f} -> {1e3 * predicted[1]:.2f} ms", _gain(predicted)]
    if python:
        emulated = [emulated_s(pair, side, python) for side in (pair.off, pair.on)]
        points = 100 * ((1 - emulated[1] / emulated[0]) - (1 - predicted[1] / predicted[0]))
        cells = [f"{1e3 * emulated[0]:.2f} -> {1e3 * emulated[1]:.2f} ms", _gain(emulated), *cells, f"{points:+.2f}"]
    framework = "Megatron-Core" if pair.is_megatron else "FSDP2"
    return "| " + " | ".join([framework, f"{pair.setting}, {pair.ranks} GPUs, {pair.cluster}", *cells]) + " |"


def _gain(times_s: list[float]) -> str:
    return f"{100 * (1 - times_s[1] / times_s[0]):+.2f} %"


def main() -> int:
    """Prints a row for each pair that was named; all without names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(pair.name for pair in PAIRS)}")
    parser.add_argument("--predict", action="store_true", help="print the predictions alone; nothing is run")
    arguments = parser.parse_args()
    python = "" if arguments.predict else os.environ.get("LAGOM_CUDA_PYTHON", "")
    if not (python or arguments.predict):
        parser.error("LAGOM_CUDA_PYTHON names no Python with PyTorch's CUDA build; --predict needs none")
    if unknown := sorted(set(arguments.names) - {pair.name for pair in PAIRS}):
        parser.error(f"no job {unknown[0]}; there are {', '.join(pair.name for pair in PAIRS)}")
    heads = [
        "framework",
        "setting, off -> on",
        *([] if arguments.predict else ["emulated", "gain"]),
        "predicted",
        "gain",
    ]
    heads += [] if arguments.predict else ["difference, points"]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|", flush=True)
    for pair in PAIRS:
        if not arguments.names or pair.name in arguments.names:
            print(row_of(pair, python), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
