"""CUPTI's records of events are asked for where PyTorch's profiler does not get them."""

import ctypes

import pytest

pytest.importorskip("torch")


from lagom_overlap.online.routes.plugin_timer import CUDA_EVENT, EventRecords


class Cupti:
    """Notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def cuptiActivityEnable(self, kind: int) -> None:  # noqa: N802 - CUPTI's name
        self.asked.append(("on", kind))

    def cuptiActivityDisable(self, kind: int) -> None:  # noqa: N802 - CUPTI's name
        self.asked.append(("off", kind))


@pytest.mark.parametrize(("cuda", "library"), [("12.9", "libcupti.so.12"), ("13.2", "libcupti.so.13")])
def test_events_are_asked_for_where_they_are_a_kind_of_their_own(cuda: str, library: str) -> None:
    cupti, names = Cupti(), []

    def load(name: str) -> Cupti:
        names.append(name)
        return cupti

    records = EventRecords(cuda, load)
    records.begin()
    records.end()
    assert names == [library]
    assert cupti.asked == [("on", CUDA_EVENT), ("off", CUDA_EVENT)]


@pytest.mark.parametrize("cuda", [None, "11.8", "12.8"])
def test_nothing_is_asked_for_where_they_come_by_themselves(cuda: str | None) -> None:
    def load(name: str) -> Cupti:
        raise AssertionError(name)

    records = EventRecords(cuda, load)
    records.begin()
    with records.quiet():
        pass
    records.end()


def test_a_job_without_cupti_runs_on() -> None:
    def load(name: str) -> Cupti:
        raise OSError(name)

    records = EventRecords("13.2", load)
    records.begin()
    with records.quiet():
        pass
    records.end()


def test_pytorch_warns_of_nothing_while_the_profiler_stops() -> None:
    import torch  # noqa: F401 - loads libc10

    found = ctypes.c_int.in_dll(ctypes.CDLL("libc10.so"), "FLAGS_caffe2_log_level")
    before = found.value
    with EventRecords("13.2", lambda name: Cupti() if "cupti" in name else ctypes.CDLL(name)).quiet():
        assert found.value == max(before, 2)
    assert found.value == before
