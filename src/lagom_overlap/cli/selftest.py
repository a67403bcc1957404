"""`lagom selftest --nccl`: asks this box's NCCL for every setting; says what ran, how long, and whether it was right.

Saves a capability map that tuning goes by afterwards. Exit code 1 where a result was wrong.
"""

import argparse

from rich.console import Console
from rich.text import Text

from lagom_overlap.cli.output import show
from lagom_overlap.cli.progress import PlainLines, is_terminal
from lagom_overlap.cli.stdout import say
from lagom_overlap.errors import BackendError
from lagom_overlap.interrupts import exit_code, held_back
from lagom_overlap.report.selftest import LEGEND, closing_words, contention_table, settings_table
from lagom_overlap.results.selftest import SelfTestResult
from lagom_overlap.stderr import write_lines
from lagom_overlap.verbs.selftest import SelfTestRequest, run_selftest

EXIT_FAILED = 1
"""A collective gave a wrong result, or stood still."""


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    if not arguments.nccl:
        raise BackendError("say what to test: lagom selftest --nccl")
    request = SelfTestRequest(
        num_gpus=arguments.gpus,
        ranks_per_gpu=arguments.ranks_per_gpu,
        library=arguments.library,
        minutes=arguments.minutes,
        out=arguments.out,
    )
    console = Console(stderr=True)
    with PlainLines("selftest", "starting") as lines:
        if is_terminal():
            with console.status("starting") as status:
                result = run_selftest(request, note=status.update)
        else:
            result = run_selftest(request, note=lines.update)
    return _finish(arguments, result)


def _finish(arguments: argparse.Namespace, result: SelfTestResult) -> int:
    """Prints a result, also one that the user ended; the exit code."""
    with held_back():
        if arguments.json:
            say(result.to_json())
        else:
            show(settings_table(result.rows), Text(LEGEND, style="dim"))
            if result.contention:
                say("\nA bf16 GEMM of 4096 cubed during a collective, against alone:")
                show(contention_table(result.contention))
            say("")
            show(Text("\n".join(closing_words(result))))
            say("\nNext: lagom doctor    # what can be set in a job here")
    if result.wrong:
        write_lines(f"lagom selftest: WRONG RESULTS in {len(result.wrong)} of {len(result.rows)} settings")
    if result.swaps is not None and result.swaps.num_wrong:
        write_lines(f"lagom selftest: WRONG RESULTS under swaps of tables: {result.swaps.num_wrong}")
    if result.is_interrupted and not result.is_wrong:
        write_lines("lagom selftest: interrupted; what was measured is kept")
        return exit_code()
    if result.has_failed:
        write_lines(f"lagom selftest: ended early: {result.stopped}; what was measured is kept")
    return EXIT_FAILED if result.has_failed or result.is_wrong else 0
