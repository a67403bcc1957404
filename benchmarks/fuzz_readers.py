"""Coverage-guided fuzzing of the readers of captures, plans, bundles and plug-in tables, with atheris (libFuzzer).

    pip install atheris                         # for this alone; no part of the project needs it
    python benchmarks/fuzz_readers.py capture CORPUS --seconds 3600

A reader may take an input or refuse it with a `LagomError` in one line. Anything else (another exception, a hang, more
than 2 GiB) is a find: it ends the run, and CORPUS/../crash-... holds the input. What is taken is used as the package
uses it: a capture is written and read back, a plan's rewrites are applied to a step, every line of a bundle is
replayed, a table is also given to the plug-in, which must take exactly the tables that our own reader takes.

Half of the inputs are mutated as bytes, half as what they are: a value in a JSON or TOML document, a field of a record
under a right checksum. `csrc/cover.c` and `fuzz_table.c` do the same for the plug-in's own code.
"""

import argparse
import copy
import ctypes
import json
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any, Final

import atheris
import numpy as np
import tomli_w

# atheris instruments what Python itself imports from a file, not what an editable install redirects.
sys.meta_path[:] = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
with atheris.instrument_imports(include=["lagom_overlap"]):
    from lagom_overlap.backends import recorded
    from lagom_overlap.backends.base import BackendRequest
    from lagom_overlap.capturing.file import decode_capture, encode_capture
    from lagom_overlap.collective import (
        Collective,
        CollectiveKind,
        CommConfig,
        CommunicatorId,
        ConfigKey,
        ConfigSpace,
        ConfigTable,
        Subspace,
    )
    from lagom_overlap.errors import LagomError, TableError
    from lagom_overlap.nccl_plugin import table_layout as layout
    from lagom_overlap.nccl_plugin.table_reader import decode_table
    from lagom_overlap.nccl_plugin.table_writer import encode_table, table_checksum
    from lagom_overlap.tuners.bundle import header_line
    from lagom_overlap.tuners.journal import Entry, Step, StepKind, entry_to_json
    from lagom_overlap.tuners.problem import Failure, GroupProblem, Measurement
    from lagom_overlap.verbs.plan_file import check_plan_file, read_rewrites, rewrites_toml
    from lagom_overlap.workload import (
        Attention,
        Buffer,
        CommOp,
        CompOp,
        Gather,
        Gemm,
        Iteration,
        Kernel,
        MemoryBound,
        Origin,
        OverlapGroup,
        Phase,
        Reduce,
        ShardSpec,
        TensorUse,
    )
    from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings
    from lagom_overlap.workload.issued import IssuedStep
    from lagom_overlap.workload.rewrite.steps import (
        ChainLink,
        Fuse,
        PartitionGroups,
        Reorder,
        Split,
        Substitute,
        Substitution,
    )

NUM_RANKS: Final = 4
MAX_BYTES: Final = 1 << 14
INTERESTING: Final[tuple[Any, ...]] = (
    0, 1, 2, 3, 4, -1, 1 << 31, 1 << 62, (1 << 63) - 1, 1 << 63, 10**30, 0.0, -0.0, 1e308, -1e308, 5e-324, 1.5,
    float("inf"), float("nan"), "", "sum", "all", "x" * 1001, "\0", "\ud800", True, False, None, [], {}, [0] * 9, ["a"],
)  # fmt: skip


# Documents. -----------------------------------------------------------------------------------------------------------


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    found, todo = [], [document]
    while todo:
        held = todo.pop()
        keys = list(held) if isinstance(held, dict) else range(len(held)) if isinstance(held, list) else ()
        for key in keys:
            found.append((held, key))
            todo.append(held[key])
    return found


def tweaked(document: Any, random: Random) -> Any:
    """The document with one to four values changed, left out, doubled or taken from another place."""
    document = copy.deepcopy(document)
    for _ in range(random.randint(1, 4)):
        places = _places(document)
        if not places:
            return document
        held, key = random.choice(places)
        other, its = random.choice(places)
        match random.randrange(7):
            case 0 | 1:
                held[key] = copy.deepcopy(random.choice(INTERESTING))
            case 2:
                held[key] = copy.deepcopy(other[its])
            case 3:
                del held[key]
            case 4 if isinstance(held, list):
                held.insert(random.randrange(len(held) + 1), copy.deepcopy(held[key]))
            case 5 if isinstance(held[key], int) and not isinstance(held[key], bool):
                held[key] += random.choice((-1, 1, 7, -held[key] * 2))
            case 6 if isinstance(held, dict):
                held[str(random.choice(INTERESTING))] = held[key]
            case _:
                held[key] = [held[key]]
    return document


def tweaked_json(data: bytes, random: Random) -> bytes:
    """A JSON document, or one of its lines where there are several."""
    lines = data.decode(errors="surrogateescape").splitlines() or [""]
    number = random.randrange(len(lines))
    if random.random() < 0.2:
        lines.insert(random.randrange(len(lines)), lines[number])
    else:
        lines[number] = json.dumps(tweaked(json.loads(lines[number]), random))
    return "\n".join(lines).encode(errors="surrogateescape")


def tweaked_toml(data: bytes, random: Random) -> bytes:
    """A TOML document."""
    return tomli_w.dumps(tweaked(tomllib.loads(data.decode()), random)).encode(errors="replace")


# Captures. ------------------------------------------------------------------------------------------------------------


def _step() -> IssuedStep:
    """A step with every kind of operator, in which every kind of rewrite is legal somewhere."""
    whole = ShardSpec((TensorUse("", (0,)),), (Gather(0),), (8,))
    ops = (
        CompOp(
            name="mm",
            work=Gemm(8, 8, 8, 2),
            origin=Origin(phase=Phase.FORWARD, layer=3, module="layers.3", kernel="aten.mm"),
            shards=ShardSpec((TensorUse("", (0, 1)), TensorUse("", (1, None))), (Gather(0), Reduce()), (8, 8)),
        ),
        CommOp(
            name="ag",
            collective=Collective(CollectiveKind.ALL_GATHER, 64, NUM_RANKS),
            communicator="fsdp",
            deps=("mm",),
            stream="all_gather",
            shards=ShardSpec((TensorUse("mm", (0,)),), (Gather(0),), (8,)),
        ),
        CommOp(
            name="ar",
            collective=Collective(CollectiveKind.ALL_REDUCE, 128, NUM_RANKS),
            communicator="fsdp",
            deps=("mm",),
            shards=whole,
        ),
        CommOp(
            name="ar2",
            collective=Collective(CollectiveKind.ALL_REDUCE, 128, NUM_RANKS),
            communicator="fsdp",
            deps=("mm",),
        ),
        CompOp(
            name="attention",
            work=Attention(batch=1, num_heads=2, seq_len=4, head_dim=8, causal=False, passes=2.5),
            deps=("ag",),
        ),
        CompOp(name="add", work=MemoryBound(96), deps=("ar", "ar2"), origin=Origin(microbatch=2)),
        CompOp(name="kernel", work=Kernel(num_blocks=3, blocks_per_sm=1, wave_s=1e-6, block_bytes=0.5)),
    )
    buffers = (Buffer(name="b", num_bytes=9, maker="mm", users=("ag",)), Buffer(name="kept", num_bytes=1, maker="add"))
    return IssuedStep(
        iteration=Iteration("tiny", ops, True, buffers, 123),
        num_ranks=NUM_RANKS,
        groups={"fsdp": (0, 1, 2, 3), "tp": (0, 1)},
        waits={"add": ("ag",)},
        notes=("something was left out",),
    )


STEP: Final = _step()


def read_capture(data: bytes) -> None:
    """Reads a capture; one that is taken comes back as it was."""
    capture = decode_capture(data, "fuzz")
    assert decode_capture(encode_capture(capture), "again") == capture


# Plans. ---------------------------------------------------------------------------------------------------------------


def _plan_seeds() -> list[bytes]:
    rewrites = (
        Substitute("ar", Substitution.REDUCE_SCATTER_ALL_GATHER),
        Split("ag", 0, 2),
        Split("ar", 0, 2, (ChainLink("mm", 0),), ()),
        PartitionGroups("ag", (2, 2), (0, 1), 0),
        Fuse(("ar", "ar2")),
        Reorder(tuple(op.name for op in STEP.iteration.ops)),
    )
    chains = [[rewrite] for rewrite in rewrites] + [[rewrites[0], rewrites[1]]]
    seeds = [rewrites_toml("job", chain, STEP.iteration, NUM_RANKS, planner="ours", carrier=None) for chain in chains]
    head = {"version": 2, "planner": "fsdp2", "graph": "0", "num_ranks": NUM_RANKS, "carrier": "fsdp2"}
    settings = asdict(Fsdp2Settings(units=("layers.0", "layers.1"), forward_prefetch=1, kept=("layers.0",)))
    return [*seeds, tomli_w.dumps({"plan": head, "fsdp2": settings}).encode()]


FILE: Final = Path(tempfile.mkdtemp()) / "input"


def read_plan(data: bytes) -> None:
    """Reads a plan and applies it."""
    FILE.write_bytes(data)
    check_plan_file(FILE)
    read_rewrites(FILE, STEP.iteration, NUM_RANKS, other_rows=True)


# Bundles. -------------------------------------------------------------------------------------------------------------


def _group() -> GroupProblem:
    comms = tuple(
        CommOp(name=f"c{n}", collective=Collective(kind, 1 << 20, NUM_RANKS), communicator="fsdp")
        for n, kind in enumerate((CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER))
    )
    space = ConfigSpace((Subspace(num_channels=(1, 2, 4), chunk_bytes=(1 << 19, 1 << 20)),))
    group = OverlapGroup(name="block", computations=(CompOp(name="x", work=MemoryBound(1)),), comms=comms)
    fast = (CommConfig(num_channels=4, chunk_bytes=1 << 20),) * 2
    return GroupProblem(group=group, spaces=(space, space), default=(CommConfig(),) * 2, baselines={"fixed_max": fast})


GROUP: Final = _group()


def _bundle_seed() -> bytes:
    lines = [
        header_line("job", "gloo", (GROUP,), description="words", notes=("a note",), arm_words={"default": "gloo"})
    ]
    settings = (GROUP.default, *GROUP.baselines.values())
    for number, assignment in enumerate(settings * 2):
        outcome = Measurement(
            makespan_s=1.0 + number, comp_s=0.5, comm_s=(0.1, 0.2), num_repeats=3, makespan_iqr_s=0.01
        )
        step = Step(number=number, kind=StepKind.SEARCH, assignments={"block": assignment})
        lines.append(
            entry_to_json(Entry(step=step, outcomes={"block": outcome if number < 3 else Failure("no")}), (GROUP,))
        )
    return "\n".join(lines).encode()


def read_bundle(data: bytes) -> None:
    """Reads a bundle and replays all of it."""
    FILE.write_bytes(data)
    held = recorded.open_backend(BackendRequest(job_fingerprint="job", bundle=FILE, seed=0))
    problem = held.problem(GROUP.group)
    for assignment in held.visits(GROUP.group):
        held.measure(GROUP.group, assignment)
    for space in problem.spaces:
        assert space.subspaces


# Tables. --------------------------------------------------------------------------------------------------------------


def _table_seed() -> bytes:
    worlds = (CommunicatorId(description="fsdp", ranks=(0, 1, 2, 3)), CommunicatorId(description="tp", ranks=(0, 1)))
    rows = {
        ConfigKey(communicator=world, kind=kind, num_bytes=4096 << n, occurrence=n): CommConfig(
            num_channels=n + 1, chunk_bytes=131072 if n else None
        )
        for world in worlds
        for kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER)
        for n in range(3)
    }
    return encode_table(ConfigTable(rows), generation=1).data


def tweaked_table(data: bytes, random: Random) -> bytes:
    """Fields of records changed under a right header and checksum."""
    header = np.frombuffer(data, layout.HEADER, 1).copy()
    body = bytearray(data[layout.HEADER.itemsize :])
    num_names = min(int(header["num_communicators"][0]), len(body) // layout.COMMUNICATOR.itemsize)
    at = num_names * layout.COMMUNICATOR.itemsize
    num_rows = (len(body) - at) // layout.DECISION.itemsize
    for _ in range(random.randint(1, 4)):
        kind, number, start = (
            (layout.COMMUNICATOR, num_names, 0) if random.random() < 0.4 else (layout.DECISION, num_rows, at)
        )
        if not number:
            continue
        place = start + random.randrange(number) * kind.itemsize
        record = np.frombuffer(bytes(body[place : place + kind.itemsize]), kind).copy()
        field = random.choice(kind.names or ())
        width = record[field].dtype.itemsize
        if random.random() < 0.3 and number > 1:
            other = start + random.randrange(number) * kind.itemsize
            record[field] = np.frombuffer(bytes(body[other : other + kind.itemsize]), kind)[field]
        else:
            raw = random.choice(
                (0, 1, 2, 4, 63, 64, 65, 4096, 1 << 31, (1 << 8 * width) - 1, random.getrandbits(8 * width))
            )
            record[field] = np.frombuffer((raw % (1 << 8 * width)).to_bytes(width, "little"), record[field].dtype)
        body[place : place + kind.itemsize] = record.tobytes()
    if random.random() < 0.1 and num_rows:
        body += body[-layout.DECISION.itemsize :]
        num_rows += 1
    header["num_decisions"], header["file_bytes"] = num_rows, layout.HEADER.itemsize + len(body)
    header["checksum"] = table_checksum(header.tobytes() + bytes(body))
    return header.tobytes() + bytes(body)


def _plugin() -> ctypes.CDLL:
    from lagom_overlap import nccl_plugin  # noqa: PLC0415 - where the library lies is known to the package alone

    found = [*Path(nccl_plugin.__file__).parents[1].glob("lib/liblagom_tuner.so")]
    for folder in map(Path, sys.path):
        found += folder.glob("lagom_overlap/lib/liblagom_tuner.so")
    plugin = ctypes.CDLL(str(found[0]))
    plugin.lagom_install.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64]
    plugin.lagom_error_text.restype = ctypes.c_char_p
    return plugin


PLUGIN: Final[list[ctypes.CDLL]] = []


def read_table(data: bytes) -> None:
    """Reads a table here and in the plug-in: both take it, or both refuse it."""
    if not PLUGIN:
        PLUGIN.append(_plugin())
    buffer = ctypes.create_string_buffer(data, max(1, len(data)))
    error = PLUGIN[0].lagom_install(buffer, len(data), 0)
    refusal: TableError | None = None
    try:
        decode_table(data)
    except TableError as found:
        refusal = found
    words = PLUGIN[0].lagom_error_text(error).decode()
    assert bool(error) == (refusal is not None), f"the plug-in: it {words}; our reader: {refusal or 'takes it'}"
    if refusal is not None:
        raise refusal


# The run. -------------------------------------------------------------------------------------------------------------

Mutation = Callable[[bytes, Random], bytes]
READERS: Final[dict[str, tuple[Callable[[bytes], None], Callable[[], list[bytes]], Mutation]]] = {
    "capture": (read_capture, lambda: [encode_capture(STEP)], tweaked_json),
    "plan": (read_plan, _plan_seeds, tweaked_toml),
    "bundle": (read_bundle, lambda: [_bundle_seed()], tweaked_json),
    "table": (read_table, lambda: [_table_seed()], tweaked_table),
}


def main() -> None:
    """Fuzzes one reader."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reader", choices=READERS)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    read, seeds, mutate = READERS[chosen.reader]
    chosen.corpus.mkdir(parents=True, exist_ok=True)
    counts = {"taken": 0, "refused": 0}
    for number, seed in enumerate(seeds()):
        (chosen.corpus / f"seed{number}").write_bytes(seed)
        try:
            read(seed)
        except LagomError as error:
            print(f"seed {number} is refused: {error}")
    began = time.monotonic()

    def one_input(data: bytes) -> None:
        try:
            read(data)
            counts["taken"] += 1
        except LagomError:
            counts["refused"] += 1
        total = sum(counts.values())
        if total % 20_000 == 0:
            print(f"{chosen.reader}: {total} inputs in {time.monotonic() - began:.0f} s: {counts}", flush=True)

    def mutated(data: bytes, max_size: int, seed: int) -> bytes:
        random = Random(seed)
        if random.random() < 0.5:
            try:
                found = mutate(data, random)
                if len(found) <= max_size:
                    return found
            except (ValueError, TypeError, KeyError, RecursionError, AttributeError):
                pass  # what is no document any more is mutated as bytes
        return atheris.Mutate(data, max_size)

    argv = [sys.argv[0], str(chosen.corpus), f"-max_total_time={chosen.seconds}", f"-seed={chosen.seed}"]
    argv += [f"-max_len={MAX_BYTES}", "-rss_limit_mb=2048", "-timeout=20", f"-artifact_prefix={chosen.corpus}-"]
    atheris.Setup([*argv, "-print_final_stats=1"], one_input, custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
