"""One rank of `lagom tune --backend nccl` without a GPU: gloo moves the bytes, a fake NCCL drives the plug-in.

python nccl_on_host.py PLUGIN FAKE_NCCL RELEASE lagom-arguments...
"""

import contextlib
import os
import sys
from pathlib import Path
from time import perf_counter

import torch
from torch import distributed as dist

from lagom_overlap.backends.fake_nccl import Rehearsal
from lagom_overlap.backends.nccl import backend as nccl_backend
from lagom_overlap.backends.nccl.session import NcclSession, PluginFiles
from lagom_overlap.cli import main
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.errors import TableError
from lagom_overlap.hardware import load_preset
from lagom_overlap.nccl_plugin.library import TunerPlugin

PLUGIN, FAKE, RELEASE, *ARGUMENTS = sys.argv[1:]


class HostDevice:
    """The CPU: one queue, marks are the clock."""

    torch_device = torch.device("cpu")
    group_backend = "gloo"
    description = "host"

    def __init__(self, local_rank):
        torch.set_num_threads(1)

    def new_stream(self):
        return object()

    def use(self, stream):
        return contextlib.nullcontext()

    def mark(self, stream):
        return perf_counter()

    def wait(self, stream, mark):
        assert isinstance(mark, float)

    def head_start(self, factor):
        pass

    def is_passed(self, mark):
        return False

    def finish(self):
        pass

    def seconds(self, marks):
        return [mark - marks[0] for mark in marks]


def session(device, launched, timeout_s):
    model = ContentionModel(load_preset("a40_nvlink", 1), load_profile("plausible"))
    rehearsal = Rehearsal(model, fake_library=Path(FAKE), plugin_library=Path(PLUGIN), release=RELEASE)
    files = PluginFiles(library=rehearsal.table.parent / Path(PLUGIN).name, record=rehearsal.record)
    return NcclSession(
        device,
        files,
        rank=launched.rank,
        num_ranks=launched.num_ranks,
        timeout_s=30.0,
        after_issue=rehearsal.run,
    )


def count_meetings(path):
    """All-reduces of one element, which no measured group has: how often the ranks' devices met."""
    all_reduce, num = dist.all_reduce, [0]

    def counted(tensor, *words, **more):
        num[0] += tensor.numel() == 1
        path.write_text(str(num[0]))
        return all_reduce(tensor, *words, **more)

    dist.all_reduce = counted


def refuse(generation):
    """One rank's plug-in refuses the table of one measurement."""
    prepare = TunerPlugin.prepare

    def prepared(self, data, asked):
        if asked == generation:
            raise TableError("the plug-in refused the table: it is of this test")
        prepare(self, data, asked)

    TunerPlugin.prepare = prepared


if "MEETINGS" in os.environ:
    count_meetings(Path(os.environ["MEETINGS"] + os.environ["RANK"]))
if os.environ.get("REFUSING_RANK") == os.environ["RANK"]:
    refuse(int(os.environ["REFUSED"]))
torch.cuda.is_available = lambda: True
nccl_backend.CudaDevice = HostDevice
nccl_backend._session = session
sys.exit(main(ARGUMENTS))
