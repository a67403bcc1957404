"""Compiles the C sources for the tests, apart from the wheel's own build."""

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
PLUGIN = [*sorted(CSRC.glob("lagom_tuner*.c")), *sorted(CSRC.glob("lagom_profiler*.c"))]
NCCL_HOST = [CSRC / "nccl" / f"nccl_host{part}.c" for part in ("", "_schedule", "_timing")]
FLAGS = ["-std=c11", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
LINK = ["-ldl", "-lm", "-lpthread"]


def compile_c(output: Path, *sources: Path, shared: bool = True, link: tuple[str, ...] = ()) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    flags = [*FLAGS, f"-I{CSRC}", *(["-shared"] if shared else [])]
    subprocess.run([compiler, *flags, "-o", str(output), *map(str, sources), *link, *LINK], check=True)
    return output


def build_libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The plug-in and the fake NCCL host, compiled once per session."""
    if not _built:
        folder = tmp_path_factory.mktemp("csrc")
        _built["plugin"] = compile_c(folder / "liblagom_tuner.so", *PLUGIN, link=("-Wl,-z,nodelete",))
        _built["fake"] = compile_c(folder / "libfake_nccl.so", *NCCL_HOST)
    return _built["plugin"], _built["fake"]


_built: dict[str, Path] = {}
