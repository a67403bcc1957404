"""The steps' own times, by the host and by a device that lags behind it."""

import pytest

from lagom_overlap.online.step_clock import EventClock, HostClock, IntervalClock, StepClock


class Device:
    """A stream that works off what the host issued: `now_ms` is when the last of it will be done."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.num_events = 0
        self.waited_ms: list[float] = []

    def make(self) -> "Event":
        self.num_events += 1
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.at_ms = -1.0

    def record(self) -> None:
        self.at_ms = self._device.now_ms

    def synchronize(self) -> None:
        self._device.waited_ms.append(self.at_ms)

    def elapsed_time(self, other: "Event") -> float:
        return other.at_ms - self.at_ms


def test_a_devices_steps_are_timed_between_events_without_what_lies_between_them() -> None:
    device = Device()
    clock = EventClock(device.make)
    for step_ms in (10.0, 20.0, 30.0):
        device.now_ms += 500.0  # a batch is loaded
        clock.begin()
        device.now_ms += step_ms
        clock.end()
    assert clock.times_s() == pytest.approx([0.01, 0.02, 0.03])
    assert device.waited_ms == [device.now_ms], "one wait, for the last"
    clock.forget()
    assert clock.times_s() == []
    clock.begin()
    device.now_ms += 5.0
    clock.end()
    assert clock.times_s() == pytest.approx([0.005])
    assert device.num_events == 6, "events are used again"


@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_step_ends_where_it_was_last_said_to_end(kind: str) -> None:
    device = Device()
    clock: StepClock = HostClock(lambda: device.now_ms / 1e3) if kind == "host" else EventClock(device.make)
    for _ in range(2):
        clock.begin()
        device.now_ms += 8.0
        clock.end()
        device.now_ms += 2.0
        clock.end()  # a second optimizer
        device.now_ms += 100.0
    assert clock.times_s() == pytest.approx([0.01, 0.01])


def test_an_end_without_a_step_is_nothing() -> None:
    clock = EventClock(Device().make)
    clock.end()
    assert clock.times_s() == []


class Lagging(Event):
    """What the device comes to later, or never: `done_ms` is how far it has come."""

    done_ms = 0.0

    def query(self) -> bool:
        return self.at_ms <= Lagging.done_ms


def test_steps_that_the_device_never_ends_are_left_out_and_hold_up_nothing() -> None:
    device = Device()
    clock = IntervalClock(lambda: Lagging(device), most=3)
    for counts in (False, True, True, True, True, True):
        clock.begin(counts=counts)
        device.now_ms += 10.0
    Lagging.done_ms = 40.0
    assert clock.times_s(wait_s=0.0) == pytest.approx([0.01, 0.01]), "of the latest three the last never ends"


def test_a_step_without_an_event_does_not_count_nor_the_one_before() -> None:
    device = Device()
    clock = IntervalClock(lambda: Lagging(device), most=9)
    Lagging.done_ms = 1e9
    for number in range(6):
        clock.skip() if number == 2 else clock.begin(counts=True)
        device.now_ms += 10.0 * (1 + number)
    assert clock.times_s() == pytest.approx([0.01, 0.04, 0.05])
