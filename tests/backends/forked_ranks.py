"""Ranks of `RankProcesses` that are forked from a process which has imported PyTorch: half of what most tests cost.

As a script, one rank. That a controller starts Python is tested in tests/conformance/test_backends.py and by the
commands of tests/cli/test_interrupt.py.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

import pytest

from forked_python import ForkedPython, server


class ForkingSubprocess:
    """The module `subprocess` as the controller of ranks uses it."""

    PIPE = subprocess.PIPE

    @staticmethod
    def Popen(  # noqa: N802
        command: Sequence[str],
        *,
        stdin: int | IO[bytes],
        stdout: int | IO[bytes],
        stderr: int | IO[bytes],
        env: Mapping[str, str],
        start_new_session: bool,
    ) -> "ForkedPython | subprocess.Popen[bytes]":
        start = command.index(sys.executable) if sys.executable in command else len(command)
        entering, python = list(command[:start]), list(command[start:])
        within = entering[:1] == ["nsenter"]  # an emulated link, whose namespaces a command enters
        if python[1:3] != ["-P", "-m"] or (entering and not within):
            return subprocess.Popen(
                command, stdin=stdin, stdout=stdout, stderr=stderr, env=env, start_new_session=start_new_session
            )
        arguments = [each for each in python[4:] if not each.startswith("--parent=")]
        machine = int(entering[entering.index("--target") + 1]) if within else None
        return ForkedPython(
            __file__, arguments, env=env, stdin=stdin, stdout=stdout, stderr=stderr, text=False, machine=machine
        )


@pytest.fixture(scope="module", autouse=True)
def forked_ranks() -> Iterator[None]:
    """For the tests of the module that imports it."""
    from lagom_overlap.backends.gloo import ranks

    server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "subprocess", ForkingSubprocess)
        yield


if __name__ == "__main__":
    os.setsid()
    sys.argv.append(f"--parent={os.getppid()}")
    from lagom_overlap.engines.gloo_worker import main

    main()
