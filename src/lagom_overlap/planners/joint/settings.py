"""Settings for one order: all calls of a class alike, then runs of calls apart, each by descent on simulated makespans.

classes    along the channels, then along the chunks, class by class, until nothing helps; every other setting is
           looked at before the descent ends
calls      a class's calls in order of issue, cut in halves, quarters ... single calls: each run is moved to
           settings near its own (spec, planners section 5.8, step 3)
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from lagom_overlap.collective import CommConfig
from lagom_overlap.cost import ContentionModel
from lagom_overlap.errors import SpaceError
from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.joint.contended import CommClass, Contended, Issued, Settings
from lagom_overlap.units import KIB, MIB

CHANNELS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of channels that are tried of each call; growing by 4/3 to 2. Chosen."""
CHUNKS: Final = (128 * KIB, 512 * KIB, 2 * MIB)
"""Chunks that are tried: a small, a middle one, and the largest that `tune` offers. Chosen, for the planner's time."""
LEAST_GAIN: Final = 1e-6
"""A smaller relative gain is none."""
REACH: Final = 2
"""A run of calls is moved this many places along the channels at most."""

Choices = Mapping[CommClass, Sequence[CommConfig]]
"""What may be chosen for each class; the first is the default."""


def choices_of(contended: Contended) -> Choices:
    """The default of each class, and variants of it by channels and chunk that the model allows."""
    return {kind: _variants(kind, contended.model) for kind in contended.classes()}


def _variants(kind: CommClass, model: ContentionModel) -> tuple[CommConfig, ...]:
    default = model.default_config(kind.collective)
    chunks = dict.fromkeys((default.chunk_bytes, *CHUNKS))
    varied = (replace(default, num_channels=number, chunk_bytes=size) for size in chunks for number in CHANNELS)
    return tuple(dict.fromkeys(config for config in (default, *varied) if _runs(kind, config, model)))


def _runs(kind: CommClass, config: CommConfig, model: ContentionModel) -> bool:
    try:
        model.collective(kind.collective, config)
    except SpaceError:
        return False
    return True


def tuned_settings(issued: Issued, choices: Choices, start: Settings, deadline: Deadline) -> tuple[Settings, float]:
    """The settings that no change of one class improves, and the makespan (s); the best so far at the deadline."""
    descent = _Descent(issued, choices, start, deadline)
    improved = True
    while improved and deadline.left_s > 0:
        improved = False
        for kind, configs in choices.items():
            for alike in (_same_chunk, _same_channels):
                improved |= descent.step((kind,), kind, alike(configs, descent.of(kind)))
        if not improved:
            for kind, configs in choices.items():
                improved |= descent.step((kind,), kind, configs)
    return descent.settings, descent.best_s


def nearby_settings(issued: Issued, choices: Choices, start: Settings, deadline: Deadline) -> tuple[Settings, float]:
    """Settings a few places from `start`, class by class once, and the makespan (s): what an order may be worth."""
    descent = _Descent(issued, choices, start, deadline)
    for kind, configs in choices.items():
        descent.step((kind,), kind, _near(configs, descent.of(kind)))
    return descent.settings, descent.best_s


def tuned_calls(issued: Issued, choices: Choices, start: Settings, deadline: Deadline) -> tuple[Settings, float]:
    """Settings of runs of calls, shorter and shorter ones, and the makespan (s); the best so far at the deadline."""
    descent = _Descent(issued, choices, start, deadline)
    calls: dict[CommClass, list[str]] = defaultdict(list)
    for name, kind in issued.classes_of_calls.items():
        calls[kind].append(name)
    num_runs, most = 2, max((len(names) for names in calls.values()), default=0)
    while num_runs < 2 * most:
        for kind, names in calls.items():
            for run in _runs_of(names, num_runs):
                if deadline.left_s <= 0:
                    return descent.settings, descent.best_s
                descent.step(run, kind, _near(choices[kind], descent.of(kind, run[0])))
        num_runs *= 2
    return descent.settings, descent.best_s


class _Descent:
    """The best settings so far."""

    def __init__(self, issued: Issued, choices: Choices, start: Settings, deadline: Deadline) -> None:
        self._issued, self._choices, self._deadline = issued, choices, deadline
        self.settings: dict[CommClass | str, CommConfig] = dict(start)
        self.best_s = issued.makespan_s(self.settings)

    def of(self, kind: CommClass, call: str | None = None) -> CommConfig:
        """What a class runs with, or one call of it."""
        own = None if call is None else self.settings.get(call)
        return own or self.settings.get(kind, self._choices[kind][0])

    def step(self, keys: Sequence[CommClass | str], kind: CommClass, configs: Sequence[CommConfig]) -> bool:
        """Tries configurations for all keys, of one class, alike; keeps the best; whether one helped."""
        improved, now = False, self.of(kind, keys[0] if isinstance(keys[0], str) else None)
        for config in configs:
            if self._deadline.left_s <= 0:
                break
            if config == now:
                continue
            tried = {**self.settings, **dict.fromkeys(keys, config)}
            tried_s = self._issued.makespan_s(tried)
            if tried_s < self.best_s * (1 - LEAST_GAIN):
                self.settings, self.best_s, improved = tried, tried_s, True
        return improved


def _same_chunk(configs: Sequence[CommConfig], now: CommConfig) -> list[CommConfig]:
    return [config for config in configs if config.chunk_bytes == now.chunk_bytes]


def _same_channels(configs: Sequence[CommConfig], now: CommConfig) -> list[CommConfig]:
    return [config for config in configs if config.num_channels == now.num_channels]


def _near(configs: Sequence[CommConfig], now: CommConfig) -> list[CommConfig]:
    """A few places up and down the channels, and the other chunks."""
    line = sorted(_same_chunk(configs, now), key=lambda config: config.num_channels or 0)
    at = line.index(now)
    return line[max(0, at - REACH) : at + REACH + 1] + _same_channels(configs, now)


def _runs_of(names: Sequence[str], num_runs: int) -> Iterator[list[str]]:
    """The names cut into that many runs, or as many as there are; nothing where that is the same as with half of it."""
    count = len(names)
    if 2 * count <= num_runs:
        return
    num_runs = min(num_runs, count)
    for number in range(num_runs):
        yield list(names[number * count // num_runs : (number + 1) * count // num_runs])
