"""Measure how much a computation slows down during an injector: the contention surface of one GPU.

Stages: `spin` (SMs lost, no traffic), `paced` (traffic varied at 8 and 32 blocks), `unpaced` (channels x chunk x
threads), `nccl` (real collectives between two ranks on this GPU). Per point: solo and overlapped batches alternate,
median and quartiles over the repeats, SM clock read, cover verified. `--dry-run` runs the same loop without a GPU on
closed-form times, marks the file so, and checks that the loop returns those times.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import NUM_SMS, Bench, ClosedForm

from lagom_overlap.cost.measured_surface import ContentionSurface, InjectorSetting, Point, Provenance, TimeSpread
from lagom_overlap.errors import LagomError

COPY_BYTES_PER_S = 4.3e12  # achieved device copy of one H200
CHANNELS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
NCCL_CHANNELS = (1, 2, 4, 8, 16, 24, 32)
CHUNKS = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20)
THREADS = (128, 512)
# fractions of the copy rate; eight SMs alone cannot reach the upper ones, so they get 32
PACED = ((8, (0.02, 0.05, 0.1, 0.15)), (32, (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)))
NCCL_CHUNKS = (128 << 10, 512 << 10, 2 << 20)
MESSAGE_BYTES = 256 << 20
NUM_DENSE_VICTIMS = 3  # all stages in full
NUM_NCCL_VICTIMS = 7  # real collectives: these only; the remaining GEMM shapes see the spinner
STAGES = ("spin", "paced", "unpaced", "nccl")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def settings_of(stage: str, *, dense: bool) -> Iterator[InjectorSetting]:
    """Injector settings of a stage, for a victim of the dense sweeps or another."""
    if stage == "spin":
        yield from (InjectorSetting(injector="spin", num_channels=channels, num_threads=512) for channels in CHANNELS)
    elif stage == "nccl":
        yield from nccl_settings(dense=dense)
    elif dense:
        yield from paced_settings() if stage == "paced" else unpaced_settings()


def paced_settings() -> Iterator[InjectorSetting]:
    """Traffic varied while the SMs lost stay the same."""
    for channels, fractions in PACED:
        for fraction in fractions:
            yield InjectorSetting(
                injector="paced",
                num_channels=channels,
                num_threads=512,
                chunk_bytes=256 << 10,
                target_bytes_per_s=fraction * COPY_BYTES_PER_S,
            )


def unpaced_settings() -> Iterator[InjectorSetting]:
    """Channels x chunk x threads, as fast as they go."""
    for channels, chunk, threads in itertools.product(CHANNELS, CHUNKS, THREADS):
        yield InjectorSetting(injector="unpaced", num_channels=channels, chunk_bytes=chunk, num_threads=threads)


def nccl_settings(*, dense: bool) -> Iterator[InjectorSetting]:
    """Channels of each collective at NCCL's own chunk; for a dense victim also chunks at eight channels."""
    for kind in COLLECTIVES:
        pairs: list[tuple[int, int | None]] = [(channels, None) for channels in NCCL_CHANNELS]
        pairs += [(8, chunk) for chunk in NCCL_CHUNKS] if dense else []
        for channels, chunk in pairs:
            yield InjectorSetting(
                injector=kind, num_channels=channels, num_ranks=2, chunk_bytes=chunk, message_bytes=MESSAGE_BYTES
            )


def plan(stages: Sequence[str], victims: Sequence[str]) -> Iterator[tuple[str, str, InjectorSetting]]:
    """All (stage, victim, setting) in order: by stage, then by setting, so that a communicator is made once."""
    for stage in stages:
        others = victims[NUM_DENSE_VICTIMS : NUM_NCCL_VICTIMS if stage == "nccl" else None]
        for dense, group in ((True, victims[:NUM_DENSE_VICTIMS]), (False, others)):
            for setting in settings_of(stage, dense=dense):
                for victim in group:
                    yield stage, victim, setting


def measure(bench: Bench, stage: str, victim: str, setting: InjectorSetting, num_repeats: int) -> Point:
    """One row: `num_repeats` solo and as many overlapped batches, alternating, after one unrecorded of each."""
    num_launches = bench.prepare(victim, setting)
    bench.solo(), bench.during()
    solo, readings = [], []
    for _ in range(num_repeats):
        solo.append(bench.solo())
        readings.append(bench.during())
    rates = [r.injector_bytes_per_s for r in readings if r.injector_bytes_per_s is not None]
    held = [r.num_held_sms for r in readings if r.num_held_sms is not None]
    return Point.build(
        stage,
        victim,
        setting,
        during=TimeSpread.of([r.during_s for r in readings]),
        solo=TimeSpread.of(solo),
        covered=all(r.covered for r in readings),
        num_held_sms=min(held) if held else None,
        injector_bytes_per_s=sorted(rates)[len(rates) // 2] if rates else None,
        num_repeats=num_repeats,
        num_launches=num_launches,
        sm_clock_hz=bench.sm_clock_hz(),
    )


def sweep(
    bench: Bench, work: Sequence[tuple[str, str, InjectorSetting]], num_repeats: int, budget_s: float
) -> list[Point]:
    """Measure all points until the time is spent; a point that fails becomes a row with its error."""
    end, rows = time.monotonic() + budget_s, []
    for stage, victim, setting in work:
        if time.monotonic() > end:
            rows.append(Point.failed(stage, victim, setting, "not run: time budget spent"))
            continue
        try:
            rows.append(measure(bench, stage, victim, setting, num_repeats))
        except (LagomError, RuntimeError, ValueError, OSError) as error:
            rows.append(Point.failed(stage, victim, setting, f"{type(error).__name__}: {error}"))
        print(line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def line(point: Point) -> str:
    """One row for people."""
    what = f"{point.stage:8}{point.victim:28}{point.injector:15}NC {point.num_channels:3} C {point.chunk_bytes or '-'}"
    if point.slowdown is None or point.median_s is None:
        return f"{what}  FAILED {point.error}"
    return f"{what}  {point.median_s * 1e6:9.1f} us  x{point.slowdown:.3f}{'' if point.covered else '  NOT COVERED'}"


def check_dry_run(rows: Sequence[Point]) -> None:
    """Raise unless every row of a dry run gives the closed form back."""
    for row in rows:
        expected = NUM_SMS / (NUM_SMS - row.num_blocks)
        if row.slowdown is None or abs(row.slowdown / expected - 1) > 1e-9:
            raise AssertionError(f"dry run: expected {expected:.4f}, got {row.slowdown} for {row}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--num-victims", type=int, help="only this many victims, the first (a smoke run)")
    parser.add_argument("--num-repeats", type=int, default=20)
    parser.add_argument("--budget-s", type=float, default=420.0, help="start no point after this many seconds")
    parser.add_argument("--nccl-library", type=Path, help="libnccl.so.2 >= 2.30.3 (stage nccl)")
    parser.add_argument("--out", type=Path, default=Path("contention"), help="folder for surface.json and surface.csv")
    parser.add_argument("--json", action="store_true", help="a summary object on stdout")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: closed-form times through the same loop")
    options = parser.parse_args(arguments)
    if "nccl" in options.stages and not options.dry_run and options.nccl_library is None:
        parser.error("stage nccl needs --nccl-library")
    return options


def open_bench(
    options: argparse.Namespace,
) -> tuple[Bench, list[str], dict[str, str], dict[str, dict[str, str]]]:
    """The bench, its victims' names, its machine, and facts about each victim."""
    if options.dry_run:
        from victims import all_specs  # noqa: PLC0415 - torch, not needed for --help

        return ClosedForm(), [spec.name for spec in all_specs()][: options.num_victims], {"note": "no GPU"}, {}
    from gpu_bench import GpuBench  # noqa: PLC0415 - needs the GPU machine

    bench = GpuBench(options.out, options.nccl_library, options.num_victims)
    return bench, bench.names, bench.machine(), bench.victim_facts()


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    options = parse(arguments)
    bench, names, machine, victims = open_bench(options)
    rows = sweep(bench, list(plan(options.stages, names)), options.num_repeats, options.budget_s)
    if options.dry_run:
        check_dry_run(rows)
    surface = ContentionSurface(
        provenance=Provenance.DRY_RUN if options.dry_run else Provenance.MEASURED,
        machine=machine,
        protocol={
            "repeats": str(options.num_repeats),
            "order": "solo and overlapped batches alternate",
            "streams": "injector high priority, resident before the victim starts",
            "timing": "CUDA events around a graph of back-to-back launches",
        },
        victims=victims,
        points=tuple(rows),
    )
    surface.write(options.out, "surface")
    num_failed = sum(row.error is not None for row in rows)
    num_uncovered = sum(row.error is None and not row.covered for row in rows)
    summary = {"num_points": len(rows), "num_failed": num_failed, "num_not_covered": num_uncovered}
    print(json.dumps(summary) if options.json else summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
