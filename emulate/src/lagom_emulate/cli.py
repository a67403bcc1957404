"""`lagom emulate --cluster C -- COMMAND`: a training command on emulated GPUs and a simulated clock, without a GPU.

The exit code is the command's own where that is not 0.
"""

import argparse
import os
import shlex
from pathlib import Path


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb's flags."""
    parser = verbs.add_parser("emulate", help="run a training command on emulated GPUs", description=__doc__)
    parser.add_argument("--cluster", metavar="NAME", help="a preset such as h100_dgx, or a cluster file")
    parser.add_argument("--ranks", type=int, metavar="N", help="total number of GPUs (default: all of each node)")
    parser.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help="number of emulated hosts, each of which runs the command (default: its --nnodes)",
    )
    parser.add_argument(
        "--symmetric",
        action="store_true",
        help="start the ranks of the first host only, and assume that the other hosts do the same",
    )
    parser.add_argument("--job", type=Path, metavar="JOB.toml", help="a job file: [emulate], [cluster], [cost]")
    parser.add_argument("--out", type=Path, metavar="DIR", help="new folder for run.json and timeline.json (Perfetto)")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object; the command's stdout goes to stderr"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the training command")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    # Here, not at the top: `lagom --help` loads this module for one line.
    from lagom_emulate.report import emulation_summary  # noqa: PLC0415
    from lagom_emulate.verb import EmulateRequest, run_emulate  # noqa: PLC0415
    from lagom_overlap.cli.output import show  # noqa: PLC0415
    from lagom_overlap.cli.stdout import say  # noqa: PLC0415
    from lagom_overlap.jobfile.reading import read_job  # noqa: PLC0415
    from lagom_overlap.verbs.run import command_of  # noqa: PLC0415

    spec = None if arguments.job is None else read_job(arguments.job, may_lack_work=True)
    request = EmulateRequest(
        command=command_of(arguments.command),
        cluster=arguments.cluster,
        num_ranks=arguments.ranks,
        num_hosts=arguments.nodes,
        is_symmetric=arguments.symmetric,
        spec=spec,
        job=arguments.job,
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
        if Path(request.command[0]).name != "lagom":  # that has said what to type next
            say(f"\nNext: {_following(arguments)}")
    code = result.exit_code
    return 128 - code if code < 0 else code


def _following(arguments: argparse.Namespace) -> str:
    """What shows the run; where none was kept, the same command that keeps it."""
    from lagom_overlap.cli.typed import new_folder  # noqa: PLC0415

    if arguments.out is not None:
        return shlex.join(("lagom", "show", str(arguments.out)))
    words = ["lagom", "emulate"]
    for name in ("cluster", "ranks", "nodes", "job"):
        value = getattr(arguments, name)
        words += [] if value is None else [f"--{name}", str(value)]
    words += ["--symmetric"] if arguments.symmetric else []
    return shlex.join([*words, "--out", new_folder("emulated"), *arguments.command])
