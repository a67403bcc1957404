"""Real NCCL on the emulated device beside the stand-in: the same programs, the same decisions in the log.

Needs LAGOM_NCCL_LIBRARY, the path of a libnccl.so.2 that is linked to the shared CUDA runtime, and is brought from
outside; NCCL_TOPO_FILE where the machine's own PCI tree is not that of eight H100 behind NVSwitches.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from types import MappingProxyType

import pytest
from c_build import compile_c

from lagom_emulate.nccl_tables import encode_tables, write_tables
from lagom_overlap.cost.nccl.derived_graphs import nvswitch_topology
from lagom_overlap.hardware import load_preset
from lagom_overlap.nccl_plugin.library import installed_library

sys.path.insert(0, str(Path(__file__).parent))
from nccl_golden import H100
from nccl_ranks import ASKED_CHANNELS, ASKED_CHUNKS, ASKED_POWERS, WAYS

pytestmark = [pytest.mark.real_nccl, pytest.mark.timeout(900)]
ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS")
PROTOCOLS = ("LL", "LL128", "SIMPLE")


@pytest.fixture(scope="module")
def real_library() -> Path:
    path = os.environ.get("LAGOM_NCCL_LIBRARY")
    if not path:
        pytest.skip(
            "LAGOM_NCCL_LIBRARY is not set: it names a real libnccl.so.2 that is linked to the shared CUDA runtime "
            "(ldd shows libcudart), to compare the stand-in with; NCCL_TOPO_FILE describes eight H100 where the "
            "machine has none"
        )
    return Path(path)


@dataclass(frozen=True)
class Both:
    """Runs a function of nccl_ranks.py on both libraries; NCCL's tuning lines of rank 0, in order."""

    real: Path
    libraries: Path
    folder: Path
    release: str

    def lines(
        self, function: str, num_ranks: int, *, tables: bytes | None = None, num_hosts: int = 1, **environment: str
    ) -> tuple[list[str], list[str]]:
        model = self.folder / f"{function}-{num_ranks}.tables"
        if tables is None:
            write_tables(model, load_preset("h100_dgx"), self.release)
        else:
            model.write_bytes(tables)
        ours = environment | {"LAGOM_EMULATION_NCCL": str(model)}
        found = []
        for name, library, given in (("real", self.real, environment), ("ours", self.libraries / "libnccl.so.2", ours)):
            folder = Path(mkdtemp(prefix=f"{function}-{num_ranks}-{name}-", dir=self.folder))
            found.append(
                _run(function, library, self.libraries, folder, num_ranks, num_hosts=num_hosts, environment=given)
            )
        return found[0], found[1]


@pytest.fixture(scope="module")
def both(real_library, libraries, tmp_path_factory) -> Both:
    folder = tmp_path_factory.mktemp("real_nccl")
    (folder / "version").mkdir()
    assert not _run("version", real_library, libraries, folder / "version", 1)
    return Both(real_library, libraries, folder, (folder / "version" / "release").read_text())


@pytest.fixture(scope="module")
def asking_tuner(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("tuner") / "libnccl-tuner-asking.so"
    compile_c(path, Path(__file__).parent / "asking_tuner.c")
    return path


def _run(
    function: str,
    library: Path,
    libraries: Path,
    folder: Path,
    num_ranks: int,
    *,
    num_hosts: int = 1,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LAGOM_", "CUDA_", "NCCL_"))}
    kept |= {name: os.environ[name] for name in ("NCCL_TOPO_FILE", "NCCL_CUMEM_ENABLE") if os.environ.get(name)}
    kept |= {"LD_LIBRARY_PATH": str(libraries), "LAGOM_TEST_NCCL": str(library), "NCCL_SOCKET_IFNAME": "lo"}
    kept |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING", **environment}
    program = [sys.executable, str(Path(__file__).parent / "nccl_ranks.py"), function]
    local = num_ranks // num_hosts
    hosts = []
    for host in range(num_hosts):
        gpu = folder / f"gpu{host}.json"
        fields = '"name": "NVIDIA H100", "num_devices": 8, "link": "nvswitch", "num_nvlinks": 18'
        gpu.write_text(f'{{{fields}, "host_index": {host}}}')
        hosts.append({"LAGOM_EMULATION_GPU": str(gpu), "NCCL_HOSTID": f"host{host}", "LAGOM_TEST_GPUS": str(local)})
    started = [
        subprocess.Popen(
            [*program, str(rank), str(num_ranks), str(folder)],
            env=kept | (hosts[rank // local] if num_hosts > 1 else {}),
            stdout=subprocess.DEVNULL if rank else subprocess.PIPE,  # nobody reads a second pipe in time
            text=True,
        )
        for rank in range(num_ranks)
    ]
    limit_s = 800 + 4 * int(environment.get("LAGOM_TEST_COMINGS", 0))
    try:
        ended = [process.communicate(timeout=limit_s)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * num_ranks
    return re.findall(r"NCCL INFO (.*Bytes -> .*)", ended[0])


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("function", ["decisions", "grouped"])
def test_the_stand_in_decides_as_the_real_library_alone_in_splits_and_in_groups(both, function, num_ranks):
    real, ours = both.lines(function, num_ranks)
    assert real
    assert real == ours


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_what_a_tuner_asks_for_runs_alike(both, asking_tuner, num_ranks):
    """The whole matrix; NCCL obeys what it offers, with fewer channels where a call is small."""
    real, ours = both.lines("asked", num_ranks, NCCL_TUNER_PLUGIN=str(asking_tuner))
    assert len(real) == len(ASKED_CHANNELS) * len(ASKED_CHUNKS) * len(ASKED_POWERS) * sum(map(len, WAYS.values()))
    assert real == ours
    assert obeyed(real) > 0.8


@pytest.mark.parametrize(
    "environment",
    [
        {"NCCL_MAX_NCHANNELS": "3"},
        {"NCCL_MIN_NCHANNELS": "28"},
        {"NCCL_MAX_CTAS": "5"},
        {"NCCL_MIN_CTAS": "20", "NCCL_MAX_NCHANNELS": "6"},
        {"NCCL_PROTO": "^LL128"},
        {"NCCL_ALGO": "^nvls;allreduce:Tree,NVLS", "NCCL_PROTO": "simple"},
    ],
    ids=str,
)
def test_what_a_job_sets_in_its_environment_counts_alike(both, environment):
    real, ours = both.lines("decisions", 4, **environment)
    assert real
    assert real == ours


def obeyed(lines: Sequence[str]) -> float:
    """The share of calls that ran with the asked algorithm and protocol, and with no more channels than asked."""
    wanted = [
        (way, channels)
        for ways in WAYS.values()
        for way in ways
        for channels in ASKED_CHANNELS
        for _ in ASKED_CHUNKS
        for _ in ASKED_POWERS
    ]
    count = 0
    for (way, channels), line in zip(wanted, lines, strict=True):
        match = re.search(r"Algo (\S+) proto (\S+) channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}", line)
        assert match is not None, line
        algorithm, protocol, low, high = match.groups()
        ran = int(high) - int(low) + 1
        same = (algorithm, protocol) == (ALGORITHMS[way[0]], PROTOCOLS[way[1]])
        count += same and (not channels or ran <= channels)
    return count / len(wanted)


def test_two_hosts_decide_alike(both):
    """Over sockets, where this NCCL offers no NVLS."""
    shapes = [(local, nodes) for nodes in (1, 2) for local in (1, 2, 4) if local * nodes > 1]
    topologies = [replace(nvswitch_topology(H100, local * nodes, nodes), nvls=None) for local, nodes in shapes]
    tables = encode_tables(topologies, both.release)
    real, ours = both.lines("several_hosts", 8, tables=tables, num_hosts=2)
    assert real
    assert real == ours


def test_tables_swapped_under_traffic_take_effect_at_their_step(both):
    real, ours = both.lines("swaps", 2, NCCL_TUNER_PLUGIN=str(installed_library()))
    grids = [int(line.rpartition("..")[2].rstrip("} ")) + 1 for line in real]
    assert real == ours
    assert grids == [grid for step in range(200) for grid in 3 * [1 + step % 16 if step % 17 else 24]]


@pytest.mark.timeout(10_000)
@pytest.mark.parametrize(("num_ranks", "num_times"), [(2, 100), (8, 20)])
def test_communicators_come_and_go_and_leave_nothing_open(both, num_ranks, num_times):
    """With our plug-in as tuner and profiler. LAGOM_TEST_COMINGS=1000 takes as many on two ranks: a quarter of an hour
    for each library. Two channels: connecting 24 takes two seconds, most of which the ranks wait for each other.
    """
    num_times = int(os.environ.get("LAGOM_TEST_COMINGS", num_times)) if num_ranks == 2 else num_times
    given = {"NCCL_MAX_NCHANNELS": "2", "LAGOM_TEST_COMINGS": str(num_times)}
    given |= dict.fromkeys(("NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN"), str(installed_library()))
    real, ours = both.lines("comings_and_goings", num_ranks, **given)
    assert real == ours
    assert len(real) == num_times
