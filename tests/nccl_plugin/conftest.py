import ctypes
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lagom_overlap.nccl_plugin.library import TunerPlugin
from lagom_overlap.nccl_plugin.table_writer import write_table

sys.path.insert(0, str(Path(__file__).parent))  # the helpers next to the tests

import own_rings
from c_build import build_libraries
from tuner_rows import Rows, encode_rows

from lagom_overlap.nccl_plugin.fake_host import FakeNccl, load_fake_library


@pytest.fixture(scope="session")
def plugin_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_libraries(tmp_path_factory)[0]


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return load_fake_library(build_libraries(tmp_path_factory)[1])


@pytest.fixture
def plugin_path(plugin_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the plug-in: another file is another instance, so no test sees another's state."""
    for name in ("LAGOM_TABLE", "LAGOM_RECORD", "LAGOM_RECORD_ENTRIES", "LAGOM_DISABLE", "NCCL_NET_PLUGIN", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LAGOM_CHAIN_TUNER", "none")
    path = tmp_path / "liblagom_tuner.so"
    shutil.copy(plugin_library, path)
    monkeypatch.setenv("NCCL_TUNER_PLUGIN", str(path))
    own_rings.LIBRARY[:] = [path]
    return path


@pytest.fixture
def plugin(plugin_path: Path) -> TunerPlugin:
    return TunerPlugin(plugin_path)


@pytest.fixture
def open_nccl(fake_library: ctypes.CDLL, plugin_path: Path) -> Iterator[Callable[[str], FakeNccl]]:
    hosts: list[FakeNccl] = []

    def open_release(release: str) -> FakeNccl:
        hosts.append(FakeNccl(fake_library, release))
        return hosts[-1]

    yield open_release
    for host in hosts:
        host.__exit__(None, None, None)


@pytest.fixture
def use_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    def write_rows(rows: Rows, **options: object) -> Path:
        path = tmp_path / "table.bin"
        write_table(path, encode_rows(rows, **options))  # type: ignore[arg-type]  # passed on by name
        monkeypatch.setenv("LAGOM_TABLE", str(path))
        return path

    return write_rows
