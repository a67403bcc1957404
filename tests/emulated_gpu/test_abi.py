"""Our declarations of CUDA's layouts against NVIDIA's headers, which come with PyTorch's CUDA build."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

# The packages leave this header to the compiler's; as plain C its words mean nothing.
HOST_DEFINES = """
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __host__
#define __device__
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))
#define CUDARTAPI
#define CUDARTAPI_CDECL
"""


@pytest.mark.cuda_torch
def test_layouts_are_those_of_nvidias_headers(tmp_path: Path, sources: Path, c_compiler: Callable[..., None]) -> None:
    python = os.environ.get("LAGOM_CUDA_PYTHON")
    if not python:
        pytest.skip("LAGOM_CUDA_PYTHON names no Python with PyTorch's CUDA build")
    ask = "import nvidia; print(next(iter(nvidia.__path__)))"  # the environment may be layered on another one
    found = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True, timeout=60)
    packages = Path(found.stdout.strip())
    by_package = [packages / name / "include" for name in ("cuda_runtime", "cuda_cupti")]
    major, folders = (13, [packages / "cu13" / "include"]) if (packages / "cu13").is_dir() else (12, by_package)
    (tmp_path / "crt").mkdir()
    (tmp_path / "crt" / "host_defines.h").write_text(HOST_DEFINES)
    includes = [f"-I{folder}" for folder in (tmp_path, *folders)]
    c_compiler("-fsyntax-only", "-w", f"-DRUNTIME_MAJOR={major}", *includes, str(sources / "abi_check.c"))
