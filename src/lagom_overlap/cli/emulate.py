"""`lagom emulate --cluster C -- COMMAND`: a training command on emulated GPUs and a simulated clock, without a GPU.

The exit code is the command's own where that is not 0.
"""

import argparse
import os

from lagom_overlap.cli.output import show
from lagom_overlap.cli.stdout import say
from lagom_overlap.jobfile.spec import read_job
from lagom_overlap.report.emulate.terminal import emulation_summary
from lagom_overlap.verbs.emulate import EmulateRequest, run_emulate
from lagom_overlap.verbs.run import command_of


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    spec = None if arguments.job is None else read_job(arguments.job, is_emulated=True)
    request = EmulateRequest(
        command=command_of(arguments.command),
        cluster=arguments.cluster,
        num_ranks=arguments.ranks,
        num_hosts=arguments.nodes,
        is_symmetric=arguments.symmetric,
        spec=spec,
        out=arguments.out,
        is_quiet=arguments.json,
    )
    result = run_emulate(request, os.environ)
    if arguments.json:
        say(result.to_json())
    else:
        show(emulation_summary(result))
        if result.files:
            say(f"\nTimeline (Perfetto): {result.files[1]}")
    code = result.exit_code
    return 128 - code if code < 0 else code
