"""Online tuning on emulated clusters: what stays in force against the best there is on the same clock.

    LAGOM_CUDA_PYTHON=.venv-cuda/bin/python .venv-cuda/bin/python benchmarks/emulated_tuning/run.py [NAME ...]
        [--seeds 10] [--first-seed 0] [--noise 0.02] [--mode paper] [--toy] [--out FOLDER]

Needs an environment with PyTorch's CUDA build and this package (`make test-cuda` makes one). A run under the noise of
`[emulate]` tapes the untouched job's first steps and then tunes it once per seed, one `OnlineTuner` after another; the
tape is then run again, without noise, with each setting that stayed in force, and with every setting of the searched
spaces. With `--toy` a collective takes 6/c + c/24 of a fixed time on c channels whatever runs beside it. Prints a row
of Markdown for each job and writes all figures as JSON. Nothing here runs on a GPU.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

import msgspec

from lagom_emulate.clock import SetTimes
from lagom_emulate.launch import LaunchedJob, emulated_libraries, gpu_text, job_environment, job_folder
from lagom_emulate.nccl_tables import write_tables
from lagom_emulate.prices import CostModelPrices
from lagom_emulate.recorder import Recorder
from lagom_emulate.server import EmulationServer
from lagom_emulate.settings import EmulationSettings
from lagom_overlap.collective import CommConfig, ConfigSpace
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.cost.operators import load_framework, load_operators
from lagom_overlap.export.saved import read_saved
from lagom_overlap.hardware import Cluster, load_preset
from lagom_overlap.nccl_plugin.library import installed_library
from lagom_overlap.online.options import OnlineOptions
from lagom_overlap.record import describe_machine, package_versions
from lagom_overlap.tuners.lagom import MODES
from lagom_overlap.verbs.run import boot_folder

sys.path.insert(0, str(Path(__file__).parent))
from replay import NUM_TAPED, Decider, Place, Replay, SearchedGroup, Tape, best_of, each_alone, ran_of

HERE = Path(__file__).parent.resolve()
TOY_BYTES_PER_S = 20e9


@dataclass(frozen=True, slots=True)
class Setup:
    """Where a job runs and how large it is."""

    cluster: str
    num_ranks: int
    size: tuple[str, ...]


def _size(width: int, tokens: int, depth: int) -> tuple[str, ...]:
    return ("--width", str(width), "--tokens", str(tokens), "--depth", str(depth))


SETUPS = {
    "fsdp2": Setup("h100_dgx", 2, _size(4096, 4096, 2)),
    "ddp": Setup("a100_dgx", 2, _size(4096, 2048, 2)),
    "tp": Setup("h100_dgx", 2, _size(4096, 8192, 2)),
    "moe": Setup("a100_dgx", 2, _size(2048, 4096, 2)),
    "hsdp": Setup("h100_dgx", 4, _size(2048, 4096, 2)),
    "domino": Setup("h100_dgx", 2, _size(4096, 8192, 2)),
    "dual_batch": Setup("a100_dgx", 2, _size(2048, 4096, 2)),
}


class ToyPrices(CostModelPrices):
    """Collectives of c channels take (6/c + c/24) of their bytes at a fixed rate, and nothing slows anything down."""

    @property
    def set_times(self) -> SetTimes:
        """Every kind alone."""
        return self._toy_times

    def _toy_times(self, kinds: tuple[int, ...]) -> list[float]:
        return [self._toy_ns(kind) for kind in kinds]

    def _toy_ns(self, kind: int) -> float:
        if kind < 0:
            return super().set_times((kind,))[0]
        channels = max(1, self._costs[kind].num_channels)
        return (6 / channels + channels / 24) * self._costs[kind].wire_bytes / TOY_BYTES_PER_S * 1e9


def prices_of(setup: Setup, *, is_toy: bool) -> tuple[Cluster, CostModelPrices]:
    """As `lagom emulate` prices a job without a job file's [parallel]."""
    cluster = load_preset(setup.cluster)
    in_step = load_operators(cluster.gpu).in_training().running(load_framework("fsdp2"))
    model = ContentionModel(cluster, load_profile("plausible"), None, in_step)
    return cluster, (ToyPrices if is_toy else CostModelPrices)(model)


def emulated(
    setup: Setup, words: Sequence[str], settings: EmulationSettings, out: Path, *, is_toy: bool
) -> tuple[Tape, Recorder]:
    """Runs jobs.py as `lagom emulate -- lagom run` would, with our plug-in in NCCL's environment."""
    cluster, prices = prices_of(setup, is_toy=is_toy)
    python = os.environ.get("LAGOM_CUDA_PYTHON", sys.executable)
    library, recorder = str(installed_library()), Recorder()
    tape = Tape(prices, recorder.add, settings if settings.disturbs else None)
    plugin = {
        "NCCL_TUNER_PLUGIN": library,
        "NCCL_PROFILER_PLUGIN": library,
        "LAGOM_RECORD": str(out / "record.%r.bin"),
        "LAGOM_PROFILE": str(out / "profile.%r.bin"),
        "KINETO_LOG_LEVEL": "99",
        "OMP_NUM_THREADS": "1",
    }
    job: LaunchedJob | None = None
    with job_folder() as folder:
        folder.gpu().write_bytes(gpu_text(cluster, cluster.gpus_per_node))
        write_tables(folder.nccl, cluster)
        environment = job_environment(
            os.environ | plugin, folder, settings, libraries=emulated_libraries(), boot=boot_folder()
        )
        with EmulationServer(
            folder.socket,
            tape,
            prices,
            recorder,
            is_running=lambda: job is not None and job.is_running(),
            say=lambda line: None,
            stall_s=settings.stall_s,
        ) as server:
            launch = (sys.executable, str(HERE / "ranks.py"), str(setup.num_ranks), python, str(HERE / "jobs.py"))
            job = LaunchedJob((*launch, *words, "--out", str(out)), [environment], folder, quiet_stdout=True)
            try:
                server.serve()
                exit_code = job.exit_code
            finally:
                job.end()
    if exit_code or server.refusals:
        raise SystemExit(f"{words[0]} ended with {exit_code}: {'; '.join(server.refusals)}")
    return tape, recorder


def searched(rows: Sequence[dict[str, object]], replayed: Collection[Place]) -> list[SearchedGroup]:
    """The groups as jobs.py wrote them."""
    found = []
    for row in rows:
        places = tuple(tuple(place_of(site, replayed) for site in sites) for sites in row["sites"])  # type: ignore[attr-defined]
        spaces = tuple(msgspec.convert(space, ConfigSpace) for space in row["spaces"])  # type: ignore[attr-defined]
        found.append(SearchedGroup(str(row["name"]), places, spaces))
    return found


def place_of(site: dict[str, object], replayed: Collection[Place]) -> Place:
    """A site's place in a replay, which numbers communicators of a size by their first use, not by their creation."""
    call = site["call"]
    names = ("num_ranks", "creation_order", "kind", "num_bytes")
    place = Place(*(call[name] for name in names), site["occurrence"])  # type: ignore[arg-type, call-overload, index]
    alike = [other for other in replayed if replace(other, creation_order=place.creation_order) == place]
    return alike[0] if len(alike) == 1 else place


def figures_of(name: str, setup: Setup, arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Tapes, tunes and replays one job."""
    size = (name, *setup.size)
    numbers = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    seeds = ("--seeds", *map(str, numbers), "--mode", arguments.mode, "--tuner", arguments.tuner)
    words = (*size, "--steps", str(NUM_TAPED), *seeds)
    noisy = EmulationSettings(noise=arguments.noise, seed=1 + arguments.first_seed)
    tape, recorder = emulated(setup, words, noisy, folder, is_toy=arguments.toy)
    steps_s = recorder.step_s()
    seen = {ran_of(text) for text in tape.texts.values()}
    rows = [json.loads(line) for line in (folder / "tunings.jsonl").read_text().splitlines()]
    cluster, prices = prices_of(setup, is_toy=arguments.toy)
    replay, decider = Replay(tape, prices), Decider(cluster)
    default_s = replay.step_s({})
    groups = next((searched(row["groups"], replay.places) for row in rows if row["groups"]), [])
    best = best_of(replay, decider, groups)
    freely = best_of(replay, decider, each_alone(groups, replay.places))
    tunings = []
    for row in rows:
        in_force = {}
        if Path(row["saved"]).is_file():
            saved = read_saved(Path(row["saved"]), world_size=setup.num_ranks)
            for setting in saved.settings:
                place = place_of(msgspec.to_builtins(setting.site), replay.places)
                in_force[place] = decider.ran(place, setting.config)
        step_s = replay.step_s(in_force)
        search = steps_s[row["first_step"] : row["settled_step"] - 1]
        spread = [each / default_s for each in search]
        tunings.append(
            {
                "seed": row["seed"],
                "state": row["state"],
                "reason": row["reason"],
                "is_adopted": bool(in_force),
                "gain": default_s / step_s - 1,
                "regret": step_s / best.step_s - 1,
                "num_steps": row["settled_step"] - row["first_step"],
                "num_measured": row["num_measured"],
                "num_slower": sum(each > 1 + arguments.noise for each in spread),
                "mean_search_step": fmean(spread) if spread else None,
                "worst_step": max(spread, default=None),
                "settled_step": fmean(steps_s[row["settled_step"] : row["last_step"] - 1]) / step_s,
                "not_seen": [way for way in in_force.values() if way not in seen],
                "in_force": sorted(set(in_force.values())),
                "channels": sorted({way[2] for way in in_force.values()}),
            }
        )
    untouched = {place: decider.ran(place, CommConfig()) for place in replay.places}
    return {
        "name": name,
        "cluster": setup.cluster,
        "num_ranks": setup.num_ranks,
        "size": setup.size,
        "mode": arguments.mode,
        "tuner": arguments.tuner,
        "noise": arguments.noise,
        "default_ms": default_s * 1e3,
        "default_again": replay.step_s(untouched) / default_s - 1,
        "best_ms": best.step_s * 1e3,
        "best_settings": sorted(set(best.settings.values())),
        "freely_ms": freely.step_s * 1e3,
        "freely_gain": default_s / freely.step_s - 1,
        "best_gain": default_s / best.step_s - 1,
        "num_settings": best.num_settings,
        "num_replays": replay.num_run,
        "is_exhaustive": best.is_exhaustive,
        "groups": [(group.name, [len(space.subspaces) for space in group.spaces]) for group in groups],
        "tunings": tunings,
    }


def row_of(found: dict[str, object]) -> str:
    """One row of Markdown."""
    tunings: list[dict[str, float]] = found["tunings"]  # type: ignore[assignment]
    regrets = [100 * each["regret"] for each in tunings]
    steps, measured = (median(each[key] for each in tunings) for key in ("num_steps", "num_measured"))
    slower = median(each["num_slower"] for each in tunings)
    adopted = [each for each in tunings if each["is_adopted"]]
    false = sum(each["gain"] <= 0 for each in adopted)
    return (
        f"| {found['name']} | {found['cluster']}, {found['num_ranks']} | {found['default_ms']:.2f} | "
        f"{100 * found['best_gain']:.2f} % | {median(regrets):.2f}, {max(regrets):.2f} % | "  # type: ignore[operator]
        f"{len(adopted)} of {len(tunings)} | {false} | {measured:.0f} | {steps:.0f}, {slower:.0f} |"
    )


def main() -> None:
    """Every job that was named; all without names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SETUPS)}")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--noise", type=float, default=0.02)
    parser.add_argument("--mode", choices=MODES, default="repaired")
    parser.add_argument("--tuner", help="default: what users get; lagom for other modes, which no other one has")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.tuner = arguments.tuner or ("lagom" if arguments.mode != "repaired" else OnlineOptions().tuner)
    os.environ["NCCL_TUNER_PLUGIN"] = str(installed_library())
    print(describe_machine(), package_versions())
    print(
        "| job | cluster, ranks | step (ms) | best gain | regret: median, worst | adopted | false | measured | steps |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    toy = "toy-" if arguments.toy else ""
    for name in arguments.names or SETUPS:
        with tempfile.TemporaryDirectory(prefix="lagom-tuning-") as folder:
            found = figures_of(name, SETUPS[name], arguments, Path(folder))
            if arguments.out is not None:
                kept = arguments.out / f"journals-{toy}{name}-{arguments.tuner}-{arguments.mode}"
                shutil.copytree(folder, kept, ignore=shutil.ignore_patterns("*.bin"), dirs_exist_ok=True)
        print(row_of(found), flush=True)
        if arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / f"{toy}{name}-{arguments.tuner}-{arguments.mode}.json").write_text(
                json.dumps(found, indent=1) + "\n"
            )


if __name__ == "__main__":
    main()
