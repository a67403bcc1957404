import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "nccl_plugin"))  # c_build, which compiles the plug-in
sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))  # forked_ranks
sys.path.insert(0, str(Path(__file__).parents[1] / "trace"))  # chrome_timelines, which reads a timeline file back
