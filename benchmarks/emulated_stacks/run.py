"""Whole stacks as the package index has them, on emulated GPUs: which run, and what `lagom run` says of them.

    LAGOM_CUDA_PYTHON=.venv-cuda/bin/python python benchmarks/emulated_stacks/run.py [--mode observe] [NAME ...]

The environment that LAGOM_CUDA_PYTHON names holds PyTorch's CUDA build, this package and the stacks (torchtitan,
megatron-core, deepspeed, accelerate with transformers); one that is missing is said and left out. torchtitan also needs
`--torchtitan FOLDER` with `tests/assets` of its repository. Prints one row of Markdown for each; nothing ran on a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent.resolve()
MEGATRON = {
    "megatron": "--tensor 2 --pipeline 2",
    "megatron_interleaved": "--tensor 2 --pipeline 2 --chunks 2",
    "megatron_experts": "--experts 8 --expert 4 --pipeline 2 --chunks 2",
    "megatron_combined": "--experts 8 --expert 4 --pipeline 2 --chunks 2 --combined",
}
RANKS = {**dict.fromkeys(MEGATRON, 8), "deepspeed": 4, "trainer": 2, "torchtitan": 4, "torchtitan_8b": 8}
PACKAGES = {
    **dict.fromkeys(MEGATRON, ("megatron-core",)),
    "deepspeed": ("deepspeed",),
    "trainer": ("accelerate", "transformers"),
    "torchtitan": ("torchtitan",),
    "torchtitan_8b": ("torchtitan",),
}


def command_of(name: str, python: str, steps: int) -> list[str]:
    """The job's own command."""
    torchrun = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS[name])]
    if name in MEGATRON:
        return [*torchrun, str(HERE / "megatron_gpt.py"), *MEGATRON[name].split(), str(steps)]
    if name == "deepspeed":
        return [*torchrun, str(HERE / "deepspeed_zero3.py"), str(steps)]
    if name == "trainer":
        launch = [python, "-m", "accelerate.commands.launch", "--num_processes", str(RANKS[name]), "--multi_gpu"]
        return [*launch, str(HERE / "trainer_fsdp.py"), str(steps)]
    if name == "torchtitan_8b":
        job = ["-m", "torchtitan.train", "--module", "titan_llama", "--config", "llama3_8b"]
        return [*torchrun, *job, "--training.steps", str(steps)]
    size = ["--training.steps", str(steps), "--training.seq_len", "512"]
    job = ["-m", "torchtitan.train", "--module", "llama3", "--config", "llama3_debugmodel", *size]
    return [*torchrun, *job, "--training.disable-cuda-graphs"]


def versions(python: str, packages: tuple[str, ...]) -> str:
    """Names and releases; empty where one is missing."""
    ask = "import importlib.metadata as m, sys; print(', '.join(f'{n} {m.version(n)}' for n in sys.argv[1:]))"
    done = subprocess.run([python, "-c", ask, *packages], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def row_of(name: str, python: str, arguments: argparse.Namespace, folder: Path) -> str:
    """Runs one stack; its row."""
    found = versions(python, PACKAGES[name])
    if not found:
        return f"| {name} | - | not installed | | |"
    emulate = [python, "-m", "lagom_overlap", "emulate", "--cluster", arguments.cluster, "--json", "--"]
    lagom = [python, "-m", "lagom_overlap", "run", f"--{arguments.mode}", "--out", str(folder / name), "--"]
    command = [*emulate, *(lagom if arguments.mode != "plain" else []), *command_of(name, python, arguments.steps)]
    began_s = time.monotonic()
    where = arguments.torchtitan if name.startswith("torchtitan") else folder
    # torchtitan: four layers where nothing else is said; one thread compiles, or every rank would start one per core.
    environment = {"LAYERS": "4", "TORCHINDUCTOR_COMPILE_THREADS": "1"} | os.environ
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(command, capture_output=True, text=True, cwd=where, env=environment, check=False)
    took_s = time.monotonic() - began_s
    (folder / f"{name}.log").write_text(done.stderr)
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if "Error" in line] or ["?"]
        return f"| {found} | {RANKS[name]} | failed: {words[0][:120]} | | {took_s:.0f} s |"
    result = json.loads(done.stdout)
    said = ""
    if arguments.mode != "plain":
        states = [json.loads(line) for line in (folder / name / "events.0.jsonl").read_text().splitlines()]
        said = next((each["reason"] for each in reversed(states) if each.get("state")), "watched")
    step = f"{1e3 * result['step_s']:.2f} ms" if result["step_s"] else "no step was seen"
    return f"| {found} | {RANKS[name]} | {step} | {said} | {took_s:.0f} s |"


def main() -> int:
    """Prints a row for each stack that was named; all without names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RANKS)}")
    parser.add_argument("--mode", choices=("plain", "observe", "online"), default="plain")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--cluster", default="h100_dgx")
    parser.add_argument("--torchtitan", type=Path, help="a folder with tests/assets of torchtitan's repository")
    arguments = parser.parse_args()
    python = os.environ.get("LAGOM_CUDA_PYTHON", "")
    if not python:
        parser.error("LAGOM_CUDA_PYTHON names no Python with PyTorch's CUDA build")
    names = arguments.names or [name for name in RANKS if not name.startswith("torchtitan") or arguments.torchtitan]
    if unknown := sorted(set(names) - set(RANKS)):
        parser.error(f"no stack {unknown[0]}; there are {', '.join(RANKS)}")
    if any(name.startswith("torchtitan") for name in names) and not arguments.torchtitan:
        parser.error("torchtitan needs --torchtitan FOLDER")
    print("| stack | ranks | step | lagom run | real time |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            print(row_of(name, python, arguments, Path(folder)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
