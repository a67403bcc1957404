"""A job's step on the emulated clock again, with other settings: what it would take, and the best there is.

The job's own records (operations, order, what waits for what, when its hosts issued them) go through a fresh
coordinator with the same prices; only what a collective runs with is put in. What NCCL makes of what it is asked is
decided by the host code that the stand-in has, with our plug-in in it.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from statistics import fmean

from lagom_emulate.clock import Operation
from lagom_emulate.coordinator import Coordinator, Disturbance
from lagom_emulate.nccl_tables import shape_record, tuner_constants
from lagom_emulate.prices import CostModelPrices
from lagom_emulate.protocol import Host, Op
from lagom_emulate.recorder import Recorder
from lagom_overlap.collective import CollectiveKind, CommConfig, CommunicatorId, ConfigKey, ConfigSpace, ConfigTable
from lagom_overlap.cost.nccl.constants import NEWEST_RELEASE
from lagom_overlap.cost.nccl.machines import topology_of
from lagom_overlap.hardware import Cluster
from lagom_overlap.nccl_plugin.fake_host import FakeNccl, load_fake_library
from lagom_overlap.nccl_plugin.library import TunerPlugin, installed_library
from lagom_overlap.nccl_plugin.table_writer import ProcessCommunicator, encode_table

NUM_TAPED = 4
MOST_JOINT = 4000
"""Combinations of one group's calls that are all tried; of more, each call in turn until nothing gains."""

Ran = tuple[str, str, int, int, int]
"""Algorithm, protocol, channels, threads, chunk."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A collective of a step: `online.sites.Site` without its words."""

    num_ranks: int
    creation_order: int
    kind: str
    num_bytes: int
    occurrence: int


class Tape(Coordinator):
    """A coordinator that keeps what it was told, of each process until its first `NUM_TAPED` steps have ended."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.hellos: list[tuple[int, int, int]] = []
        self.texts: dict[tuple[int, int], bytes] = {}
        self.ops: list[tuple[int, Op]] = []
        self._num_marks: dict[int, int] = defaultdict(int)
        self._marks: set[tuple[int, int]] = set()

    def hello(self, number: int, host: int, num_queues: int = 0) -> None:
        """See `Coordinator`."""
        self.hellos.append((number, host, num_queues))
        super().hello(number, host, num_queues)

    def describe(self, number: int, desc_id: int, text: bytes) -> None:
        """See `Coordinator`."""
        self.texts[number, desc_id] = text
        if b'"step"' in text:
            self._marks.add((number, desc_id))
        super().describe(number, desc_id, text)

    def submit(self, number: int, op: Op) -> None:
        """See `Coordinator`."""
        if self._num_marks[number] < NUM_TAPED:
            self.ops.append((number, op))
            self._num_marks[number] += (number, op.desc_id) in self._marks
        super().submit(number, op)


def ran_of(text: bytes) -> Ran | None:
    """What a description says a collective runs with; None for anything else, or what no tuner is asked about."""
    found = json.loads(text).get("collective")
    if found is None or found["algorithm"] is None:
        return None
    return (found["algorithm"], found["protocol"], found["num_channels"], found["num_threads"], found["chunk_bytes"])


@dataclass
class Replay:
    """A taped job, ready to run again."""

    tape: Tape
    prices: CostModelPrices
    num_run: int = 0
    _places: dict[int, Place] = field(default_factory=dict)
    _known: dict[tuple[tuple[Place, Ran], ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        roles: dict[int, dict[str, tuple[int, int]]] = defaultdict(dict)
        counts: dict[int, dict[tuple[str, str, int], int]] = defaultdict(lambda: defaultdict(int))
        for at, (rank, op) in enumerate(self.tape.ops):
            if not op.desc_id:
                continue
            said = json.loads(self.tape.texts[rank, op.desc_id])
            if (said.get("mark") or {}).get("step"):
                counts[rank].clear()
            one = said.get("collective")
            if one is None or one["algorithm"] is None or one["num_ranks"] < 2:
                continue
            mine = roles[rank]
            if one["comm"] not in mine:
                mine[one["comm"]] = (one["num_ranks"], sum(size == one["num_ranks"] for size, _ in mine.values()))
            key = one["comm"], one["kind"], one["bytes"]
            self._places[at] = Place(*mine[one["comm"]], one["kind"], one["bytes"], counts[rank][key])
            counts[rank][key] += 1

    @property
    def places_at(self) -> Mapping[int, Place]:
        """The collectives that a tuner is asked about, by their position on the tape."""
        return self._places

    @property
    def places(self) -> set[Place]:
        """The collectives of a step that a tuner is asked about."""
        return set(self._places.values())

    def step_s(self, settings: Mapping[Place, Ran]) -> float:
        """A step with these settings, the rest as it ran: the mean of all but the first."""
        key = tuple(sorted(settings.items()))
        if key not in self._known:
            self._known[key] = self._run(settings)
            self.num_run += 1
        return self._known[key]

    def _run(self, settings: Mapping[Place, Ran]) -> float:
        recorder = Recorder()
        self.run(settings, recorder.add, None, recorder)
        return fmean(recorder.step_s()[1:])

    def run(
        self,
        settings: Mapping[Place, Ran],
        on_end: Callable[[Operation], None],
        disturbance: Disturbance | None,
        recorder: Recorder | None = None,
    ) -> None:
        """All taped steps with these settings; `on_end` hears of every operation."""
        coordinator = Coordinator(self.prices, on_end, disturbance)
        numbers: dict[tuple[int, bytes], int] = {}
        for hello in self.tape.hellos:
            coordinator.hello(*hello)
        for at, (rank, op) in enumerate(self.tape.ops):
            desc_id = 0
            if op.desc_id:
                text = self.tape.texts[rank, op.desc_id]
                place = self._places.get(at)
                if place is not None and place in settings:
                    text = rewritten(text, settings[place])
                if (rank, text) not in numbers:
                    numbers[rank, text] = len(numbers) + 1
                    coordinator.describe(rank, len(numbers), text)
                    if recorder is not None:
                        recorder.describe(rank, len(numbers), self.prices.priced(text))
                desc_id = numbers[rank, text]
            coordinator.submit(rank, op._replace(desc_id=desc_id))
        for number, *_ in self.tape.hellos:
            coordinator.host(number, Host(0, 1, 0))
        coordinator.advance()


@cache
def rewritten(text: bytes, ran: Ran) -> bytes:
    """A description with other settings."""
    said = json.loads(text)
    names = ("algorithm", "protocol", "num_channels", "num_threads", "chunk_bytes")
    said["collective"] |= dict(zip(names, ran, strict=True))
    return json.dumps(said).encode()


class Decider:
    """What NCCL runs when our plug-in asks for something; `NCCL_TUNER_PLUGIN` must name the plug-in."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._nccl = FakeNccl(load_fake_library(installed_library("libfake_nccl.so")), 23007)
        self._plugin = TunerPlugin(installed_library())
        self._comms: dict[int, object] = {}
        self._generation = 0

    def ran(self, place: Place, config: CommConfig) -> Ran:
        """The call's settings under this configuration."""
        name = CommunicatorId(description="replayed", ranks=tuple(range(place.num_ranks)), creation_order=0)
        if place.num_ranks not in self._comms:
            self._plugin.restart()
            shape = shape_record(topology_of(self._cluster, place.num_ranks), NEWEST_RELEASE)
            self._comms[place.num_ranks] = self._nccl.comm_of(
                shape.tobytes(), tuner_constants(NEWEST_RELEASE).tobytes()
            )
        kind = CollectiveKind(place.kind)
        key = ConfigKey(communicator=name, kind=kind, num_bytes=place.num_bytes, occurrence=0)
        self._generation += 1
        encoded = encode_table(
            ConfigTable({} if config.is_untouched else {key: config}),
            generation=self._generation,
            communicators=[ProcessCommunicator(name, 1)],
        )
        self._plugin.install(encoded.data)
        outcome = self._comms[place.num_ranks].run(kind, place.num_bytes)  # type: ignore[attr-defined]
        chunks = outcome.chunk_bytes
        chunk = chunks[1] if len(chunks) == 3 else chunks[0]
        return (str(outcome.algorithm), str(outcome.protocol), outcome.num_channels, outcome.num_threads, chunk)


def configs_of(space: ConfigSpace) -> list[CommConfig]:
    """Every setting of a space, and none."""
    found = [CommConfig()]
    for sub in space.subspaces:
        found += [
            CommConfig(algorithm=sub.algorithm, protocol=sub.protocol, num_channels=channels, chunk_bytes=chunk)
            for channels, chunk in itertools.product(sub.num_channels, sub.chunk_bytes)
        ]
    return found


@dataclass(frozen=True, slots=True)
class SearchedGroup:
    """An overlap group as the online search had it: the places of each of its calls, and what may be set."""

    name: str
    places: tuple[tuple[Place, ...], ...]
    spaces: tuple[ConfigSpace, ...]


def each_alone(groups: Sequence[SearchedGroup], places: Iterable[Place]) -> list[SearchedGroup]:
    """Every call of a searched kind and size by itself, also those that the search sets alike or never reached."""
    spaces = {
        (own[0].kind, own[0].num_bytes): space
        for group in groups
        for own, space in zip(group.places, group.spaces, strict=True)
    }
    found = [(place, spaces.get((place.kind, place.num_bytes))) for place in sorted(places)]
    return [SearchedGroup(str(place), ((place,),), (space,)) for place, space in found if space is not None]


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest step of all settings, and how it was looked for."""

    step_s: float
    settings: Mapping[Place, Ran]
    num_settings: int
    is_exhaustive: bool


def best_of(replay: Replay, decider: Decider, groups: Sequence[SearchedGroup]) -> Best:
    """Every group's settings with the other groups as they ran; then again with the others at their best."""
    settings: dict[Place, Ran] = {}
    is_exhaustive, num_settings = True, 0
    choices = {
        group.name: [
            list(dict.fromkeys(decider.ran(places[0], config) for config in configs_of(space)))
            for places, space in zip(group.places, group.spaces, strict=True)
        ]
        for group in groups
    }
    for _ in range(3):
        before_s = replay.step_s(settings)
        for group in groups:
            ways = choices[group.name]
            num_settings += prod(map(len, ways))
            if prod(map(len, ways)) <= MOST_JOINT:
                joint = (_placed(group, chosen) for chosen in itertools.product(*ways))
                settings = min(({**settings, **one} for one in joint), key=replay.step_s, default=settings)
                continue
            is_exhaustive = False
            for number, own in enumerate(ways):
                alone = (dict.fromkeys(group.places[number], way) for way in own)
                settings = min(({**settings, **one} for one in alone), key=replay.step_s)
        if replay.step_s(settings) >= before_s:
            break
    return Best(replay.step_s(settings), settings, num_settings, is_exhaustive)


def _placed(group: SearchedGroup, chosen: Sequence[Ran]) -> dict[Place, Ran]:
    return {place: way for places, way in zip(group.places, chosen, strict=True) for place in places}
