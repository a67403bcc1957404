"""Choices among settings that somebody measured, and raw lists of iterations: how that machine's times vary.

Per topology, size and run of the file one choice: NCCL's own against every algorithm and protocol that was forced, or
every channel count that was swept, under NCCL's own algorithm and under forced ones. A sweep has no default in its
run: there the default is NCCL's own algorithm on the most channels swept, an assumption (*from the most*). The truth of
a choice is its steady parts where the file has them for all of its settings, else the medians, else the means: one
statistic for all, since means hold a ramp of 13 % that steady parts do not. A raw list with a number in a column
`nodes` serves the choices on as many nodes only; without one it serves all.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, CommConfig, ConfigSpace, Protocol, Subspace
from lagom_overlap.tuners.problem import GroupProblem
from lagom_overlap.units import MS
from lagom_overlap.workload import CommOp, CompOp, Kernel, OverlapGroup
from measured_limits import check_possible, collective_floor_s
from measured_rows import (
    TIME_MS,
    BadFileError,
    BadRowError,
    Named,
    NotModelledError,
    Row,
    decimal,
    read,
    report_named,
    tried,
)

CHOICE_COLUMNS: Final = ("run", "nodes", "gpus", "collective", "bytes", "algorithm", "protocol", "mode")
NOISE_COLUMNS: Final = ("steady_median_ms", "iterations_ms")
FEWEST_SETTINGS: Final = 3
FEWEST_ITERATIONS: Final = 2
ROUNDING: Final = 1e-3
MOST_SPREAD: Final = 1e3
"""How far an iteration may lie from the steady part; the longest stall that was recorded is of 9 times."""
STATISTICS: Final = ("steady_ms", "median_ms", "mean_ms")
"""The first that all settings of a choice have is their truth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One choice: its settings, their true seconds, and the default."""

    name: str
    num_nodes: int
    num_ranks: int
    num_bytes: int
    true_s: Mapping[CommConfig, float]
    default: CommConfig

    @property
    def one_node(self) -> bool:
        """Whether no network is between the ranks."""
        return self.num_nodes == 1

    @property
    def kind(self) -> str:
        """What is chosen, and where."""
        what = "channels, from the most" if self.default.num_channels else "algorithms"
        return f"{'one node' if self.one_node else 'several nodes'}, {what}"

    @property
    def best_s(self) -> float:
        """The shortest of all settings."""
        return min(self.true_s.values())

    def problem(self) -> GroupProblem:
        """What a tuner is told: a product and an all-reduce, and the settings."""
        ways: dict[CommConfig, list[int | None]] = defaultdict(list)
        for config in sorted(self.true_s, key=lambda each: each.algorithm is None):
            ways[CommConfig(algorithm=config.algorithm, protocol=config.protocol)].append(config.num_channels)
        spaces = []
        for way, channels in ways.items():
            if swept := tuple(sorted(num for num in channels if num is not None)):
                spaces.append(_subspace(way, swept))
            if None in channels:
                spaces.append(_subspace(way, (None,)))
        kernel = Kernel(num_blocks=1024, blocks_per_sm=1, wave_s=7e-3 / 10, block_bytes=1e6)
        group = OverlapGroup(
            name=self.name,
            computations=(CompOp(name="product", work=kernel),),
            comms=(
                CommOp(name="comm", collective=Collective(CollectiveKind.ALL_REDUCE, self.num_bytes, self.num_ranks)),
            ),
        )
        return GroupProblem(group=group, spaces=(ConfigSpace(tuple(spaces)),), default=(self.default,))


def _subspace(config: CommConfig, channels: tuple[int | None, ...]) -> Subspace:
    return Subspace(
        algorithm=config.algorithm,
        protocol=config.protocol,
        num_channels=channels,
        num_threads=(None,),
        chunk_bytes=(None,),
    )


@dataclass(frozen=True, slots=True)
class Noise:
    """Raw lists over their steady parts, by the nodes that they are from; None: the file does not say."""

    lists: Mapping[int | None, Sequence[Sequence[float]]]

    def of(self, num_nodes: int) -> Sequence[Sequence[float]]:
        """Those of as many nodes, else those that do not say, else all."""
        every = [one for lists in self.lists.values() for one in lists]
        return self.lists.get(num_nodes) or self.lists.get(None) or every


def read_noise(path: Path) -> tuple[Noise, list[Named]]:
    """Every raw list over its own steady median, and the lines that hold none.

    Raises:
        BadFileError: if the file is no such table, or none of its lists can be used.
    """
    _, rows, bad = read(path, NOISE_COLUMNS)
    lists: dict[int | None, list[list[float]]] = defaultdict(list)
    for row in rows:
        found = tried(row, _ratios)
        if isinstance(found, Named):
            bad.append(found)
        else:
            lists[found[0]].append(found[1])
    if not lists:
        report_named(path, bad, num_judged=0)
    return Noise(lists), bad


def _ratios(row: Row) -> tuple[int | None, list[float]]:
    """The nodes of a raw list, and its iterations over its steady median.

    Raises:
        BadRowError: if it is none, or the median of a part of it lies outside of it.
    """
    steady_ms, texts = row.needed("steady_median_ms"), row.text("iterations_ms").split()
    if len(texts) < FEWEST_ITERATIONS:
        raise BadRowError(f"iterations_ms has {len(texts)} iterations, must have at least {FEWEST_ITERATIONS}")
    times_ms = [decimal(text, f"iteration {place} of iterations_ms", TIME_MS) for place, text in enumerate(texts, 1)]
    if not min(times_ms) <= steady_ms * (1 + ROUNDING) or not steady_ms * (1 - ROUNDING) <= max(times_ms):
        raise BadRowError(
            f"steady_median_ms is {steady_ms:g}, must lie among its iterations: {min(times_ms):g} to {max(times_ms):g}"
        )
    if max(times_ms) > MOST_SPREAD * steady_ms or steady_ms > MOST_SPREAD * min(times_ms):
        raise BadRowError(
            f"iterations_ms spans {min(times_ms):g} to {max(times_ms):g}, must stay within {MOST_SPREAD:g} times "
            f"of its steady median {steady_ms:g}"
        )
    return row.count("nodes"), [time_ms / steady_ms for time_ms in times_ms]


def read_choices(path: Path) -> tuple[list[Choice], list[Named]]:
    """Every choice of at least three settings with a default among them, and the lines that belong to none.

    Raises:
        BadFileError: if the file is no such table, or holds no choice.
    """
    held: dict[tuple[str | int, ...], dict[CommConfig, list[tuple[Row, int]]]]
    held = defaultdict(lambda: defaultdict(list))
    _, rows, named = read(path, CHOICE_COLUMNS)
    for row in rows:
        told = tried(row, _told)
        if isinstance(told, Named):
            named.append(told)
        else:
            held[told[0]][told[1]].append((row, row.line))
    choices = []
    for key, found in held.items():
        run, nodes, gpus, num_bytes, kernel, mode = key
        default = _default_of(found)
        if default is None or len(found) < FEWEST_SETTINGS:
            why = f"no choice: {len(found)} settings{'' if default else ' without a default'} in its run"
            named += [Named(line, why, is_wrong=False) for times in found.values() for _, line in times]
            continue
        seconds = {config: [_statistics(row) for row, _ in times] for config, times in found.items()}
        common = [name for name in STATISTICS if all(name in each for times in seconds.values() for each in times)]
        if not common:
            why = f"no choice: its settings have none of {', '.join(STATISTICS)} in common"
            named += [Named(line, why, is_wrong=False) for times in found.values() for _, line in times]
            continue
        choices.append(
            Choice(
                name=" ".join(
                    (str(run), f"{nodes}x{int(gpus) // int(nodes)}", str(num_bytes), str(kernel)[-14:], str(mode))
                ),
                num_nodes=int(nodes),
                num_ranks=int(gpus),
                num_bytes=int(num_bytes),
                true_s={config: median(each[common[0]] for each in times) for config, times in seconds.items()},
                default=default,
            )
        )
    if not choices:
        first = min(named, key=lambda one: (not one.is_wrong, one.line))
        raise BadFileError(
            f"{str(path)!r} has no choice between {FEWEST_SETTINGS} settings, NCCL's own among them; "
            f"{path}:{first.line}: {first.why}"
        )
    return choices, sorted(named, key=lambda one: one.line)


def _default_of(settings: Collection[CommConfig]) -> CommConfig | None:
    """NCCL's own; of a sweep its own algorithm with the most channels."""
    if CommConfig() in settings:
        return CommConfig()
    swept = [config for config in settings if config.algorithm is None]
    return max(swept, key=lambda config: config.num_channels or 0, default=None)


def _told(row: Row) -> tuple[tuple[str | int, ...], CommConfig]:
    """The choice that a row belongs to, and its setting.

    Raises:
        BadRowError: if the row is wrong.
        NotModelledError: if nothing is chosen there.
    """
    mode, kind = row.text("mode"), row.text("collective")
    if mode not in ("overlap", "sequential"):
        raise NotModelledError(f"mode is {mode[:40]!r}: choices are made in overlap and sequential")
    if kind != CollectiveKind.ALL_REDUCE:
        raise NotModelledError(f"collective is {kind[:40]!r}: its halves come from different clusters")
    nodes, gpus = row.needed_count("nodes"), row.needed_count("gpus")
    if gpus % nodes or gpus < 2:
        raise BadRowError(f"{gpus} GPUs on {nodes} nodes, must be at least 2 and the same number on each")
    num_bytes, config = row.needed_count("bytes"), _config(row)
    for name, seconds in _statistics(row).items():
        check_possible(name, seconds, collective_floor_s(num_bytes, gpus), kind)
    return (row.text("run"), nodes, gpus, num_bytes, row.text("compute_kernel"), mode), config


def _config(row: Row) -> CommConfig:
    algorithm, protocol, channels = (row.text(name) for name in ("algorithm", "protocol", "channels"))
    swept = None if channels in ("", "default") else row.needed_count("channels")
    if algorithm in ("", "auto"):
        return CommConfig(num_channels=swept)
    try:
        return CommConfig(algorithm=Algorithm(algorithm), protocol=Protocol(protocol), num_channels=swept)
    except ValueError:  # CollNet, and what is none of NCCL's
        raise NotModelledError(f"{algorithm[:20]} with {protocol[:20]} is none of NCCL's here") from None


def _statistics(row: Row) -> dict[str, float]:
    """Its seconds by statistic.

    Raises:
        BadRowError: if it has none, or one is wrong.
        NotModelledError: if the run failed.
    """
    found = {}
    for name in STATISTICS:
        if text := row.text(name):
            if text.isascii() and not text.strip("0."):
                raise NotModelledError("the run failed: its time is 0")
            found[name] = row.needed(name) * MS
    if not found:
        raise BadRowError(f"{', '.join(STATISTICS)} are empty")
    return found
