"""Numbers of a job file and of saved settings that nobody means: refused in a line, or done with as many operations.

Each is read in this process, in so much of its processor's time and of memory: what sizes a loop or an allocation and
has no bound uses up either, on any machine.
"""

import contextlib
import copy
import json
import os
import re
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lagom_overlap.cli import main
from lagom_overlap.errors import BundleError, LagomError
from lagom_overlap.export.saved import FORMAT, VERSION, read_saved
from lagom_overlap.jobfile import memory, step
from lagom_overlap.jobfile.job import Job, limits_of
from lagom_overlap.jobfile.online_settings import read_online_deployment
from lagom_overlap.jobfile.reading import parse_job
from lagom_overlap.nccl_plugin.table_writer import encode_table
from lagom_overlap.toml_tables import parse_toml
from lagom_overlap.workload.parallel import ParallelLayout

MOST_CPU_S = 20
"""Of one file; the slowest takes a twentieth."""
MOST_BYTES = 2 << 30
"""That reading may add to what the process has mapped; the largest adds a hundredth of it."""
EXTREMES = [
    *(0, -1, 2, 3, 97, 4096, 10**6, 1 << 20, 99_999_999_999, (1 << 47) + 1, 1 << 48, 1 << 63, 1 << 64, 10**30),
    *(float("inf"), float("nan"), 1e308, 5e-324, -1.5),
]
FSDP = """
[job]
name = "a"
[model]
name = "llama-3.2-1b"
seq_len = 512
[cluster]
preset = "h100_dgx"
nodes = 1
gpus_per_node = 8
[parallel]
fsdp = 8
replicate = 1
micro_batch = 1
global_batch = 8
forward_prefetch = 2
backward_prefetch = 2
kept_units = 2
reduce_buffers = 2
zero_stage = 3
[tune]
pairs = 3
seed = 1
[plan]
prefetch = 3
rounds = 3
budget_s = 1.0
"""
MEGATRON = """
[job]
name = "a"
[model]
name = "mixtral-8x7b"
seq_len = 512
[cluster]
preset = "h100_dgx"
[parallel]
data = 4
tensor = 2
pipeline = 2
expert = 2
context = 1
chunks = 1
micro_batch = 1
global_batch = 16
bucket_bytes = 160000000
prefetch = 1
zero_stage = 1
"""
GROUPS = """
[job]
name = "a"
ranks = 8
timeout_s = 60.0
[cost]
noise = 0.1
sm_carveout = 4
rank_skew_s = 0.1
[[group]]
name = "g"
count = 1
comm = [{ name = "a", kind = "all_gather", bytes = 67108864, starts_after = 1 }]
block = { seq_len = 512, hidden = 512, heads = 8, ffn = 1024, batch = 1, repeat = 2 }
[[group]]
name = "h"
op = [{ name = "m", gemm = [8, 8, 8] }, { name = "n", attention = [1, 8, 512, 64] }, { name = "o", memory = 1048576 }]
comm = [{ name = "b", kind = "all_reduce", bytes = 67108864 }]
[tune]
space = { num_channels = [1, 2], num_threads = [128], chunk_bytes = [262144], sm_carveout = [4] }
budget = { measurements = 4, seconds = 10.0 }
"""
CALL = {"description": "fsdp", "num_ranks": 2, "creation_order": 0, "kind": "all_gather", "num_bytes": 1 << 20}
CONFIG = {"algorithm": None, "protocol": None, "transport": None}
SAVED = {
    "format": FORMAT,
    "version": VERSION,
    "world_size": 2,
    "route": "plugin",
    "is_adopted": True,
    "settings": [
        {
            "site": {"call": CALL, "occurrence": 1},
            "config": CONFIG | {"num_channels": 4, "num_threads": 512, "chunk_bytes": 1 << 19},
            "launch": {"sm_carveout": 4, "order": None, "priority": None},
        }
    ],
    "cycles": [{"description": "fsdp", "num_ranks": 2, "creation_order": 0, "calls": [["all_gather", 1 << 20]] * 2}],
    "size_octaves": 1,
    "engine": "",
    "verdict": "",
    "date": "",
}


class _TooMuch(BaseException):
    pass


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Ends what takes more of the processor or of memory."""

    def end(*_: object) -> None:
        raise _TooMuch(f"more than {MOST_CPU_S} s of a processor")

    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, limits = signal.signal(signal.SIGVTALRM, end), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MOST_BYTES, limits[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.fixture
def no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that a verb becomes would take pytest's place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("the command was run"))


def numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a document has numbers."""
    if isinstance(value, dict | list):
        for key, held in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers(held, (*path, key))
    elif type(value) in (int, float):
        yield path


def mutants(document: Any) -> Iterator[tuple[str, Any]]:
    """The document with one number in the place of another, all of them in all places; and which."""
    for path in numbers(document):
        for extreme in EXTREMES:
            changed = copy.deepcopy(document)
            held = changed
            for key in path[:-1]:
                held = held[key]
            held[path[-1]] = extreme
            yield f"{'.'.join(map(str, path))} = {extreme}", changed


def count_refused(document: Any, read: Callable[[Any], object]) -> tuple[int, int]:
    """(how many mutants are refused, how many are read); anything but a refusal of one line is an error."""
    refused = done = 0
    for words, changed in mutants(document):
        try:
            with bounded():
                read(changed)
            done, said = done + 1, ""
        except LagomError as error:
            said = str(error)
            refused += 1
        except BaseException as error:
            raise AssertionError(f"{words}: {error!r}") from None  # pytest cannot show where a signal came
        assert "\n" not in said, words
    return refused, done


def _built(raw: dict[str, Any]) -> None:
    """What every verb makes of a job before it runs anything of it."""
    spec = parse_job(raw, "job.toml")
    limits_of(spec.tune.space)
    asked = Job(spec)
    job = asked.step
    if job is None:
        _ = asked.groups
        return
    memory.check_memory(job)
    if job.is_whole and max(job.layout.num_micro_batches, job.layout.prefetch) > 2:  # the others build one and the same
        _ = job.issued


def _read(content: dict[str, Any]) -> None:
    path = Path("settings.json")
    path.write_text(json.dumps(content))
    read_saved(path)
    encode_table(read_online_deployment(path)[0].table, generation=1)


@pytest.mark.parametrize("text", [FSDP, MEGATRON, GROUPS], ids=["fsdp", "megatron", "groups"])
def test_no_number_of_a_job_file_is_gone_around_without_end(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "MAX_PASSES", 64)  # as many as it allows take longer than the rest of this test
    document = parse_toml(text.encode())
    _built(document)
    refused, done = count_refused(document, _built)
    assert refused > 100
    assert done > 20


def test_no_number_of_saved_settings_fills_a_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _read(SAVED)
    refused, done = count_refused(SAVED, _read)
    assert refused > 150
    assert done > 10


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_ranks", 10**8, "settings[0]: num_ranks is 100000000, must be 2 to 2"),
        ("num_channels", 10**9, "settings[0]: num_channels is 1000000000, must be 1 to 64"),
        ("chunk_bytes", 1, "settings[0]: chunk_bytes is 1, must be 16 to 1073741824"),
        ("world_size", 10**8, "world_size is 100000000, must be 1 to 1048576"),
    ],
)
@pytest.mark.usefixtures("no_command")
def test_every_verb_says_what_a_number_of_saved_settings_may_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: int, words: str
) -> None:
    path = tmp_path / "s.json"
    path.write_text(re.sub(rf'("{key}"): \d+', rf"\1: {value}", json.dumps(SAVED)))
    for verb in (
        ["run", "--config", str(path), "--", "true"],
        ["run", "--online", "--config", str(path), "--", "true"],
        ["export", str(path), "--format", "plugin"],
    ):
        with bounded():
            assert main(verb) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line


@pytest.mark.parametrize(
    ("num_settings", "num_calls", "order"),
    [(1000, 1, 0), (1, 16_000, 0), (1, 1, 1000)],
    ids=["settings", "calls", "order"],
)
def test_settings_of_more_ranks_than_can_be_listed_are_refused(
    tmp_path: Path, num_settings: int, num_calls: int, order: int
) -> None:
    """Each setting, call and place of a communicator lists its ranks: 1,000 lists of a million took 2 minutes."""
    role = {"description": "fsdp", "num_ranks": 1 << 20, "creation_order": order}
    site = {"call": role | {"kind": "all_gather", "num_bytes": 1 << 20}}
    (setting,) = copy.deepcopy(SAVED["settings"])
    settings = [setting | {"site": site | {"occurrence": number}} for number in range(num_settings)]
    cycles = [role | {"calls": [["all_gather", 1 << 20]] * num_calls}]
    path = tmp_path / "s.json"
    path.write_text(json.dumps(SAVED | {"world_size": 1 << 20, "settings": settings, "cycles": cycles}))
    with bounded(), pytest.raises(BundleError, match="ranks in all, at most 33554432 are read"):
        read_saved(path)


@pytest.mark.parametrize("size", [1, 7, 1 << 20, 999_983, 1_000_000])
def test_a_smaller_micro_batch_is_its_largest_divisor_or_one(size: int) -> None:
    layout = ParallelLayout(micro_batch=size, global_batch=size)
    job = Job(parse_job(parse_toml(FSDP.encode()), "job.toml")).step
    assert job is not None
    offered = [change["micro_batch"] for change in memory._settings(job, layout) if "micro_batch" in change]
    divisors = [part for part in range(1, size) if size % part == 0]
    assert offered == list(dict.fromkeys(divisors[-1:] + divisors[:1]))
