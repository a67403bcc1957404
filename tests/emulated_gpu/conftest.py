import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import lagom_overlap

sys.path.insert(0, str(Path(__file__).parents[1] / "nccl_plugin"))  # c_build, which compiles a tuner


@pytest.fixture(scope="session")
def libraries() -> Path:
    """The folder of the emulated device's libraries."""
    for folder in lagom_overlap.__path__:
        path = Path(folder) / "emulated_gpu"
        if (path / "libcuda.so.1").is_file():
            return path
    pytest.fail("the emulated device is not built; run: pip install -e .")


@pytest.fixture
def on_device(libraries: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python code in a process that loads the emulated libraries: their state lives as long as it."""

    def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("LAGOM_", "CUDA_"))}
        here = str(Path(__file__).parent)
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=clean | {"LD_LIBRARY_PATH": str(libraries), "PYTHONPATH": here} | environment,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def sources() -> Path:
    return Path(__file__).parents[2] / "csrc" / "emulated_gpu"


@pytest.fixture(scope="session")
def c_compiler() -> Callable[..., None]:
    """Runs the C compiler on the device's sources."""

    def compile_with(*arguments: str) -> None:
        flags = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-fvisibility=hidden"]
        subprocess.run([os.environ.get("CC", "cc"), *flags, *arguments, "-ldl", "-lpthread"], check=True, timeout=300)

    return compile_with
