"""Runs our code inside the job: a failure of ours is reported in one line and never becomes the job's failure."""

import logging
from collections.abc import Callable

from lagom_overlap.errors import LagomError
from lagom_overlap.signal_handlers import handing_over
from lagom_overlap.stderr import write_lines

_log = logging.getLogger(__name__)


def safely(work: Callable[[], None], *, ends_the_job: type[LagomError] | None = None) -> None:
    """Runs `work`; a failure is reported in one line and swallowed, except for errors that must end the job.

    What a signal's handler of the job's raises meanwhile is the job's.
    """
    handing_over(lambda: _safely(work, ends_the_job))


def _safely(work: Callable[[], None], ends_the_job: type[LagomError] | None) -> None:
    try:
        work()
    except LagomError as error:
        if ends_the_job is not None and isinstance(error, ends_the_job):
            raise
        _complain(str(error))
    except Exception as error:
        _log.debug("lagom failed in the job", exc_info=True)
        _complain(f"{type(error).__name__}: {error}")


def _complain(text: str) -> None:
    from lagom_overlap.online.events import rank_of  # noqa: PLC0415 - a process without a word of ours needs none of it

    write_lines(f"lagom: the job runs without us (rank {rank_of()}): {' '.join(text.split())}")


def say(lines: list[str]) -> None:
    """Lines for people, on stderr: stdout is the job's."""
    write_lines(*(f"lagom: {line}" for line in lines))
