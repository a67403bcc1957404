"""The differential fuzzer of training jobs, long: random programs with us and without, by seeds, shards and time.

python benchmarks/fuzz_jobs.py run FOLDER --persistent 10000        programs in ranks that go on, finds written down
python benchmarks/fuzz_jobs.py run FOLDER --fresh 300               programs each in processes of its own
python benchmarks/fuzz_jobs.py emulated FOLDER --seconds 600        on emulated GPUs, in LAGOM_CUDA_PYTHON's environment
python benchmarks/fuzz_jobs.py count FOLDER                         what ran, by mode and family
python benchmarks/fuzz_jobs.py replay [--fresh 1] 'PROGRAM'         one program again, as a find's line gives it
python benchmarks/fuzz_jobs.py shrink 'PROGRAM'                     the smallest program that still is a find
python benchmarks/fuzz_jobs.py mutants [NAME ...]                   defects put in: when is each found?

FOLDER keeps one line for each program; a run goes on after the last seed there, which `--first` begins with. `--shard
1/4` takes every fourth seed, `--seconds` ends a run before its number is reached. A program is a find, too, if it takes
`--allowed` seconds longer with us than six times what stock took.
"""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "fuzz"), str(TESTS)]

from fresh import compared  # noqa: E402
from fuzzing import ALLOWED_S, Ranks, Result, is_stocks_own, minimised  # noqa: E402
from mutants import MUTANTS  # noqa: E402
from programs import Program, drawn, drawn_fresh, program_of  # noqa: E402

FRESH_MODES = ("launched", "route", "saved", "launched", "observe", "online")
"""Ways of fresh jobs with us, in turn."""
GENERATOR = 11
"""Counts of programs are told apart by what drew them."""

Line = dict[str, Any]
Run = Callable[[argparse.Namespace, int], tuple[Program, Line, str]]


def run(arguments: argparse.Namespace) -> int:
    """Programs in persistent ranks, then in fresh processes; the number of finds."""
    if not (arguments.persistent or arguments.fresh):
        sys.exit("how many programs? give --persistent N, --fresh N, or both")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    num_finds = 0
    if arguments.persistent:
        with Ranks(arguments.ranks, allowed_s=arguments.allowed) as ranks:
            num_finds += _each(arguments, f"ranks{arguments.ranks}", arguments.persistent, partial(_persistent, ranks))
    if arguments.fresh:
        num_finds += _each(arguments, "fresh", arguments.fresh, _fresh)
    return num_finds


def _each(arguments: argparse.Namespace, name: str, number: int, one: Run) -> int:
    """Runs programs of the next seeds until so many are in the log, or the time is over; the number of finds."""
    shard, num_shards = (int(part) for part in arguments.shard.split("/"))
    log = arguments.folder / f"{name}_{shard}of{num_shards}_{arguments.first}.jsonl"
    done = [json.loads(line)["seed"] for line in log.read_text().splitlines()] if log.exists() else []
    first = arguments.first + shard
    seeds = range(max(done, default=first - num_shards) + num_shards, first + number * num_shards, num_shards)
    print(f"{name}: {len(seeds)} programs, seeds from {seeds.start} in steps of {num_shards}", flush=True)
    give_up, num_finds = time.monotonic() + arguments.seconds, 0
    with log.open("a") as file:
        for seed in seeds:
            if time.monotonic() > give_up:
                break
            program, line, why = one(arguments, seed)
            line = {
                "seed": seed,
                "generator": GENERATOR,
                "mode": program.mode,
                "family": program.family,
                "ranks": program.num_ranks,
                "features": sorted({feature[0] for feature in program.features}),
            } | line
            if why:
                num_finds += 1
                line["program"] = asdict(program)
                alone = ["replay", *(["--fresh", "1"] if name == "fresh" else []), program.text()]
                print(f"{why}\n    python benchmarks/fuzz_jobs.py {shlex.join(alone)}", flush=True)
            file.write(f"{json.dumps(line)}\n")
            file.flush()
    return num_finds


def _persistent(ranks: Ranks, arguments: argparse.Namespace, seed: int) -> tuple[Program, Line, str]:
    """A program, its line, and why it is a find."""
    result = ranks.run(drawn(seed, arguments.ranks, mode=arguments.mode, family=arguments.family))
    line = {
        "kind": result.kind,
        "phase": result.phase,
        "raised": result.raised,
        "stats": result.stats,
        "cpu_s": result.cpu_s,
    }
    if not result.is_find:
        return result.program, line, ""
    if result.phase == "stock" or (result.kind == "differs" and is_stocks_own(ranks, result.program)):
        return result.program, line | {"kind": "stock's own", "program": asdict(result.program)}, ""
    return result.program, line | {"why": result.why[:20000]}, result.line()[:600]


def _fresh(arguments: argparse.Namespace, seed: int) -> tuple[Program, Line, str]:
    """The same of fresh processes."""
    num_ranks = (2, 2, 3, 2, 4, 1)[seed % 6]
    mode = arguments.mode or FRESH_MODES[seed // 6 % len(FRESH_MODES)]
    program = drawn_fresh(seed, num_ranks, mode, arguments.family)
    line = compared(program, allowed_s=arguments.allowed)
    why = "" if line["equal"] else f"differs  {program.features} {str(line)[:1500]}"
    return program, line, why


def count(arguments: argparse.Namespace) -> int:
    """What ran, in total and by mode, family and ranks."""
    lines = [
        json.loads(line) for log in sorted(arguments.folder.glob("*.jsonl")) for line in log.read_text().splitlines()
    ]
    for line in lines:  # fresh processes say equal or not
        line.setdefault("kind", "equal" if line.get("equal") else "differs")
    for what in ("generator", "ranks", "mode", "family", "kind"):
        print(f"{what}: {dict(Counter(str(line[what]) for line in lines).most_common())}")
    print(f"features: {dict(Counter(name for line in lines for name in line.get('features', ())).most_common())}")
    raised = Counter(line["raised"][0] for line in lines if line.get("raised"))
    sets = sum(any(isinstance(s, dict) and s.get("used") for s in line.get("stats", {}).values()) for line in lines)
    states = Counter(
        s for line in lines for w in line.get("stats", {}).values() if isinstance(w, dict) for s in w.get("states", [])
    )
    print(f"programs: {len(lines)}, with settings in force: {sets}")
    print(f"ended by an exception: {dict(raised)}, states: {dict(states)}")
    print(f"CPU seconds: {sum(line.get('cpu_s', 0) for line in lines):.0f}")
    timed = sorted((line["stats"]["seconds"], line["seed"]) for line in lines if "seconds" in line.get("stats", {}))
    slowest = sorted(timed, key=lambda each: each[0][1] - 6 * each[0][0])[-5:]
    print(f"longest with us, seconds (stock, with us) and seed: {slowest}")
    for line in lines:
        if line["kind"] != "equal":
            print(json.dumps({k: str(v)[:300] for k, v in line.items() if k != "program"}))
    return 0


def emulated(arguments: argparse.Namespace) -> int:
    """Programs under the tuner's route of NCCL, one after another in one emulated job; FOLDER/rank*.jsonl has them."""
    python = os.environ["LAGOM_CUDA_PYTHON"]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    asked = [python, "-c", "from lagom_overlap.nccl_plugin import installed_library; print(installed_library())"]
    plugin = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    ours = {"NCCL_TUNER_PLUGIN": plugin, "NCCL_PROFILER_PLUGIN": plugin}
    for name in ("TABLE", "RECORD", "PROFILE"):
        ours[f"LAGOM_{name}"] = str(arguments.folder.absolute() / f"{name.lower()}.%r.bin")
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.ranks)]
    job = [
        str(TESTS / "fuzz" / "emulated_rank.py"),
        str(arguments.folder),
        str(arguments.first),
        str(arguments.seconds),
    ]
    emulate = [python, "-m", "lagom_overlap", "emulate", "--cluster", "h100_dgx", "--", *torchrun, *job]
    code = subprocess.run(emulate, check=False, env=os.environ | ours).returncode
    lines = [json.loads(line) for line in (arguments.folder / "rank0.jsonl").read_text().splitlines()]
    finds = [line for line in lines if line["difference"]]
    for line in finds:
        print(line["seed"], line.get("family"), line.get("features"), line["difference"])
    print(f"{len(lines)} programs, {len(finds)} differ")
    return code or bool(finds)


def replay(arguments: argparse.Namespace) -> int:
    """A program again."""
    program = program_of(arguments.program)
    if arguments.fresh:
        found = [compared(program, allowed_s=arguments.allowed) for _ in range(arguments.times)]
        print(*found, sep="\n")
        return not all(each["equal"] for each in found)
    with Ranks(program.num_ranks, mutant=arguments.mutant, allowed_s=arguments.allowed) as ranks:
        results = [ranks.run(program) for _ in range(arguments.times)]
        for result in results:
            print(result.line())
            print(result.raised, result.stats, result.cpu_s)
        if arguments.errors:
            print(ranks.errors())
        if results[-1].is_find:
            print(f"stock alone differs from itself: {is_stocks_own(ranks, program)}")
    return any(result.is_find for result in results)


def shrink(arguments: argparse.Namespace) -> int:
    """A find made small."""
    program = program_of(arguments.program)
    with Ranks(program.num_ranks, mutant=arguments.mutant, allowed_s=arguments.allowed) as ranks:
        result = ranks.run(program)
        if not result.is_find:
            print("no find")
            return 0
        small = minimised(ranks, result, limit_s=arguments.seconds, tries=arguments.times)
    print(small.line())
    print(small.program.text())
    return 1


def mutants(arguments: argparse.Namespace) -> int:
    """Whether each defect is found, after how many programs, and how small the program gets."""
    missed = 0
    for name in arguments.names or MUTANTS:
        began, num_run, found = time.monotonic(), 0, None
        with Ranks(arguments.ranks, mutant=name, allowed_s=arguments.allowed) as ranks:
            while found is None and time.monotonic() < began + arguments.seconds:
                result: Result = ranks.run(drawn(arguments.first + num_run, arguments.ranks))
                num_run += 1
                found = result if result.is_find else None
            small = None if found is None else minimised(ranks, found, limit_s=arguments.seconds / 4)
        missed += found is None
        words = (
            f"not found in {num_run} programs" if small is None else f"found by program {num_run}: {small.line()[:500]}"
        )
        print(f"{name} ({MUTANTS[name].what}), {arguments.ranks} ranks: {words}", flush=True)
    return missed


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    for verb, name in (
        (run, "run"),
        (emulated, "emulated"),
        (count, "count"),
        (replay, "replay"),
        (shrink, "shrink"),
        (mutants, "mutants"),
    ):
        one = verbs.add_parser(name)
        one.set_defaults(verb=verb)
        if name in {"run", "emulated", "count"}:
            one.add_argument("folder", type=Path)
        if name in {"replay", "shrink"}:
            one.add_argument("program")
            one.add_argument("--mutant", default="")
            one.add_argument("--times", type=int, default=1)
        if name == "replay":
            one.add_argument("--errors", action="store_true")
        if name == "mutants":
            one.add_argument("names", nargs="*")
        if name in {"run", "replay"}:
            one.add_argument("--fresh", type=int, default=0)
        if name == "run":
            one.add_argument("--persistent", type=int, default=0)
            one.add_argument("--seconds", type=float, default=math.inf)
        else:
            one.add_argument("--seconds", type=float, default=120.0)
        one.add_argument("--ranks", type=int, default=2)
        one.add_argument("--first", type=int, default=0)
        one.add_argument("--shard", default="0/1")
        one.add_argument("--allowed", type=float, default=ALLOWED_S)
        one.add_argument("--mode")
        one.add_argument("--family")
    arguments = parser.parse_args()
    return int(arguments.verb(arguments))


if __name__ == "__main__":
    sys.exit(main())
