"""Ctrl-C and SIGTERM end a run alike: once as an interrupt, then at once."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lagom_overlap.interrupts import SIGNALS, as_interrupts, exit_code, held_back, noted, received


@pytest.fixture(autouse=True)
def listening() -> Iterator[None]:
    """Signals as in the foreground: they may arrive ignored (in the background, under nohup)."""
    before = {each: signal.getsignal(each) for each in SIGNALS}
    for each in SIGNALS:
        signal.signal(each, signal.default_int_handler if each is signal.SIGINT else signal.SIG_DFL)
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


class Clock:
    """Seconds as a test says."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_first_signal_interrupts_and_names_the_exit_code(signum: signal.Signals, code: int) -> None:
    before = signal.getsignal(signum)
    with pytest.raises(KeyboardInterrupt), as_interrupts():
        signal.raise_signal(signum)
    assert received()
    assert exit_code() == code
    assert signal.getsignal(signum) is before
    with as_interrupts():
        assert not received()


def test_a_launcher_that_passes_the_terminals_signal_on_says_nothing_new() -> None:
    clock = Clock()
    with as_interrupts(clock):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        clock.now_s += 0.9
        signal.raise_signal(signal.SIGTERM)
    assert exit_code() == 130


@pytest.mark.parametrize("block", ["pass", "stack.enter_context(held_back(clock))"])
def test_a_second_wish_ends_the_process_at_once(block: str) -> None:
    script = f"""
import contextlib, signal
from lagom_overlap.interrupts import as_interrupts, held_back
now_s = 0.0
def clock():
    return now_s
with contextlib.ExitStack() as stack:
    stack.enter_context(as_interrupts(clock))
    {block}
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        pass
    print("first", flush=True)
    now_s = 1.0
    signal.raise_signal(signal.SIGTERM)
    print("second")
"""
    preset = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    done = subprocess.run([sys.executable, "-c", preset + script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "first\n"), done.stderr


@pytest.mark.parametrize("signum", SIGNALS)
def test_what_is_held_back_passes_a_block_and_interrupts_nothing_after_it(signum: signal.Signals) -> None:
    with as_interrupts():
        with held_back():
            signal.raise_signal(signum)
        assert received()


def test_without_a_command_of_ours_only_ctrl_c_is_held_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    for _ in range(2):  # a wish of an earlier call is none of the next
        with held_back():
            assert signal.getsignal(signal.SIGTERM) is before
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_noted_signal_interrupts_nothing(signum: signal.Signals) -> None:
    notes: list[int] = []
    with as_interrupts(), noted(lambda: notes.append(1)):
        signal.raise_signal(signum)
    assert notes == [1]
    assert exit_code() == 128 + signum


def test_a_signal_that_our_parent_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with as_interrupts(), held_back(), noted(lambda: None):
        signal.raise_signal(signal.SIGINT)
    assert not received()
