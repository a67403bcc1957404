import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from lagom_emulate.launch import emulated_libraries

sys.path.insert(0, str(Path(__file__).parents[1] / "nccl_plugin"))  # c_build, which compiles a tuner


@pytest.fixture(scope="session")
def libraries() -> Path:
    """The folder of the emulated device's libraries."""
    return emulated_libraries()


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
    return Path(__file__).parents[2] / "emulate" / "csrc"


@pytest.fixture(scope="session")
def c_compiler() -> Callable[..., None]:
    """Runs the C compiler on the device's sources."""

    def compile_with(*arguments: str) -> None:
        flags = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-fvisibility=hidden"]
        subprocess.run([os.environ.get("CC", "cc"), *flags, *arguments, "-ldl", "-lpthread"], check=True, timeout=300)

    return compile_with


@pytest.fixture
def on_ranks(libraries: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Runs a function of nccl_ranks.py, or of another `program`, on so many ranks; what each wrote to stdout."""

    def run(function: str, num_ranks: int, program: str = "nccl_ranks.py", **environment: str) -> list[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("LAGOM_", "CUDA_", "NCCL_"))}
        given = {"LD_LIBRARY_PATH": str(libraries), "LAGOM_NCCL_TIMEOUT_S": "40"}
        here = Path(__file__).parent
        started = [
            subprocess.Popen(
                [sys.executable, str(here / program), function, str(rank), str(num_ranks), str(tmp_path)],
                env=clean | given | {"RANK": str(rank)} | environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        try:
            ended = [process.communicate(timeout=50) for process in started]
        finally:
            for process in started:
                process.kill()
        failed = [(out, err) for process, (out, err) in zip(started, ended, strict=True) if process.returncode]
        assert not failed, failed[0]
        return [out for out, _ in ended]

    return run
