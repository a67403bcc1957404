"""Real NCCL on the emulated device beside the stand-in: the same program, the same decisions in the log.

Needs LAGOM_NCCL_LIBRARY, the path of a libnccl.so.2 that is linked to the shared CUDA runtime. It is brought from
outside, with NCCL_TOPO_FILE where the machine's own PCI tree is not the one to be seen.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lagom_overlap.cost.nccl.tables import write_tables
from lagom_overlap.hardware import load_preset

pytestmark = [pytest.mark.real_nccl, pytest.mark.timeout(600)]


@pytest.fixture
def real_library() -> Path:
    path = os.environ.get("LAGOM_NCCL_LIBRARY")
    if not path:
        pytest.skip("LAGOM_NCCL_LIBRARY is not set: no real libnccl.so.2 to compare with")
    return Path(path)


def run(function: str, library: Path, libraries: Path, folder: Path, num_ranks: int, **environment: str) -> list[str]:
    """NCCL's tuning lines of rank 0, in order."""
    folder.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LAGOM_", "CUDA_", "NCCL_"))}
    kept |= {name: os.environ[name] for name in ("NCCL_TOPO_FILE", "NCCL_CUMEM_ENABLE") if name in os.environ}
    kept |= {"LD_LIBRARY_PATH": str(libraries), "LAGOM_TEST_NCCL": str(library), "NCCL_SOCKET_IFNAME": "lo"}
    kept |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING"} | environment
    program = [sys.executable, str(Path(__file__).parent / "nccl_ranks.py"), function]
    started = [
        subprocess.Popen(
            [*program, str(rank), str(num_ranks), str(folder)], env=kept, stdout=subprocess.PIPE, text=True
        )
        for rank in range(num_ranks)
    ]
    try:
        ended = [process.communicate(timeout=500)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * num_ranks
    return re.findall(r"NCCL INFO (.*Bytes -> .*)", ended[0])


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("function", ["decisions", "comings_and_goings"])
def test_the_stand_in_decides_as_the_real_library(real_library, libraries, tmp_path, function, num_ranks):
    real = run(function, real_library, libraries, tmp_path / "real", num_ranks)
    assert real or function != "decisions"
    version = run("version", real_library, libraries, tmp_path / "version", 1)
    assert not version
    release = (tmp_path / "version" / "release").read_text()
    tables = tmp_path / "tables"
    write_tables(tables, load_preset("h100_dgx"), release)
    ours = libraries / "libnccl.so.2"
    assert real == run(function, ours, libraries, tmp_path / "ours", num_ranks, LAGOM_EMULATION_NCCL=str(tables))
