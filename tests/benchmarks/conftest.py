"""Puts the benchmark scripts on the path, as running them does, and the tests' own way to build the plug-in."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1] / "nccl_plugin"))  # c_build, played_profiler
