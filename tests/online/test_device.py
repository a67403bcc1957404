"""Which GPU is the job's, where CUDA's current device is another: under srun, with `device_id=`."""

from datetime import timedelta
from math import inf
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
from torch import distributed as dist

from lagom_overlap.online import device as online_device
from lagom_overlap.online.device import DeviceEvent, engine_in_use, job_device, longest_wait_s, note_model


@pytest.fixture
def gpus(monkeypatch):
    """A machine of eight GPUs, of which the current one is GPU 0; `bind` makes a world."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(online_device, "_trained", [])

    def bind(**fields):
        monkeypatch.setattr(
            online_device,
            "dist",
            SimpleNamespace(
                is_available=lambda: True,
                is_initialized=lambda: True,
                group=SimpleNamespace(WORLD=SimpleNamespace(**fields)),
            ),
        )

    return bind


@pytest.mark.parametrize(
    ("fields", "index"),
    [
        ({"bound_device_id": torch.device("cuda", 5)}, 5),
        ({"bound_device_id": None}, 0),
        ({}, 0),
        ({"bound_device_id": torch.device("cpu")}, 0),
        ({"bound_device_id": torch.device("cuda")}, 0),  # the current one, whichever it is
    ],
)
def test_the_jobs_device_is_the_one_its_group_is_bound_to(gpus, fields, index):
    gpus(**fields)
    assert job_device() == torch.device("cuda", index)


def test_a_job_without_a_group_or_a_gpu_has_the_current_one_or_none(gpus, monkeypatch):
    assert not dist.is_initialized()
    assert job_device() == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert job_device() is None


def test_a_wait_of_ours_is_a_small_part_of_what_the_most_impatient_group_gives_a_call(monkeypatch):
    def group(size, **seconds):
        def backend(device):
            if seconds[device.type] is None:
                raise RuntimeError("no options")
            options = SimpleNamespace(_timeout=timedelta(seconds=seconds[device.type]))
            return SimpleNamespace(options=options)

        devices = [torch.device(name) for name in seconds]
        return SimpleNamespace(size=lambda: size, _device_types=devices, _get_backend=backend)

    groups = []
    monkeypatch.setattr(online_device.c10d, "_world", SimpleNamespace(pg_map=groups))
    assert longest_wait_s() == inf
    groups.extend([group(8, cpu=1800, cuda=600), group(1, cpu=2), group(2, cuda=None), object()])
    assert longest_wait_s() == 75
    groups.append(group(2, cpu=40))
    assert longest_wait_s() == 5


class Model:
    """What has parameters somewhere; on this machine no real one can be on a GPU."""

    def __init__(self, *devices):
        self.devices = devices

    def parameters(self):
        return [SimpleNamespace(device=torch.device(name)) for name in self.devices]


@pytest.mark.parametrize(
    ("bound", "devices", "index"),
    [
        (None, ("cuda:5", "cuda:5"), 5),  # PyTorch before 2.15 under srun, in a job that sets no current device
        (torch.device("cuda", 3), ("cuda:5",), 3),
        (None, ("cpu",), 0),  # offloaded: the current one, for want of anything better
        (None, ("cuda:5", "cuda:6"), 0),
        (None, ("meta",), 0),
        (None, (), 0),
    ],
)
def test_a_job_whose_group_is_bound_to_none_computes_where_its_model_is(gpus, bound, devices, index):
    gpus(bound_device_id=bound)
    model = Model(*devices)
    note_model(model)
    assert job_device() == torch.device("cuda", index)
    del model
    assert job_device() == torch.device("cuda", 0 if bound is None else 3)


def test_no_model_is_walked_over_where_the_group_is_bound_to_a_device(gpus, monkeypatch):
    """Thousands of parameters take milliseconds."""
    gpus(bound_device_id=torch.device("cuda", 3))
    model = Model("cuda:5")
    monkeypatch.setattr(model, "parameters", lambda: pytest.fail("the parameters were asked for"))
    note_model(model)
    assert job_device() == torch.device("cuda", 3)


def test_steps_are_timed_on_the_jobs_device_whichever_is_current(monkeypatch):
    recorded = []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self, stream):
            recorded.append(stream)

        def elapsed_time(self, other):
            return 2.5

        def synchronize(self):
            recorded.append("waited")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    first, last = (DeviceEvent(torch.device("cuda", 5)) for _ in range(2))
    first.record()
    last.record()
    last.synchronize()
    assert first.elapsed_time(last) == 2.5
    assert recorded == ["stream of cuda:5"] * 2 + ["waited"]


@pytest.mark.gloo
def test_the_engine_is_the_same_whether_pytorch_checks_its_calls_or_not():
    """TORCH_DISTRIBUTED_DEBUG=DETAIL puts a checker in front of it; the communicators are made in the same order."""
    before, names = dist.get_debug_level(), set()
    try:
        for level in (dist.DebugLevel.OFF, dist.DebugLevel.DETAIL):
            dist.set_debug_level(level)
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            names.add(engine_in_use())
            dist.destroy_process_group()
    finally:
        dist.set_debug_level(before)
    release = ".".join(torch.__version__.split(".")[:2])
    assert names == {f"ProcessGroupGloo of torch {release}"}
