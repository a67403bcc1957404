"""The flags of every verb, as data: what `lagom --help` reads. Whoever runs a verb is loaded once it is named."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from lagom_overlap.planners.carriers import Carrier

# What these name lies in modules that take long to load: tests/cli/test_start.py holds both to be the same.
TUNERS: Final = ("default", "fixed_min", "fixed_max", "static_cap", "autoccl", "lagom", "ours")
"""What `compare` compares by default."""
FORMATS: Final = ("plugin", "nvidia_csv", "ncclx_csv", "ncclx_json", "env", "megatron_yaml", "perfetto")
"""What `export` writes."""
RESTARTS: Final = 6
"""Pairs of restarts at most, where nobody says."""
LEAST_RESTARTS: Final = 6
"""The fewest by which a clear gain is proven at an error rate of 5 %: see verbs/prove.py."""
MOST_RESTARTS: Final = 50
"""Chosen: a hundred starts of a training job are days."""
PAIRS: Final = 25
"""Pairs of a proof inside the job at most, where nobody says: those of online tuning's verdict."""
LEAST_PAIRS: Final = 8
"""The fewest by which a clear gain is proven at an error rate of 1 % (`tuners.sequential.pairs_of_large_bet`)."""
MOST_PAIRS: Final = 101
"""Of any verdict (`tuners.problem`)."""
MAX_JOBS: Final = 64
"""Processes that `analyze` reads with."""
LISTED: Final = ("models", "clusters", "gpus", "frameworks", "tuners", "planners")
"""What `list` lists."""
SHELLS: Final = ("bash", "zsh", "fish")
"""Shells that `completion` writes for."""
MAX_COUNT: Final = 1 << 20
"""GPUs, tokens or sequences."""
MAX_JOB_STEPS: Final = 10**12
"""Chosen far above any job: a step of 10 us would take four months."""
_COMPAT: Final = ("hta",)

Verbs: TypeAlias = "argparse._SubParsersAction[Any]"


def _json_and_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    _debug(parser)


def _debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def seed(text: str) -> int:
    """A seed: a whole number of at least 0."""
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed; allowed: whole numbers from 0")
    return int(text)


def restarts(text: str) -> int:
    """Pairs of restarts."""
    if not text.isdecimal() or not LEAST_RESTARTS <= int(text) <= MOST_RESTARTS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of pairs of restarts; allowed: {LEAST_RESTARTS} to {MOST_RESTARTS}"
        )
    return int(text)


def pairs(text: str) -> int:
    """Pairs of windows of a proof inside the job."""
    if not text.isdecimal() or not LEAST_PAIRS <= int(text) <= MOST_PAIRS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of pairs; allowed: {LEAST_PAIRS} to {MOST_PAIRS}")
    return int(text)


def jobs(text: str) -> int:
    """A number of processes."""
    if not text.isdecimal() or not 1 <= int(text) <= MAX_JOBS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes; allowed: 1 to {MAX_JOBS}")
    return int(text)


def path(text: str) -> Path:
    """A path; "" is none, though Path takes it for the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def word(text: str) -> str:
    """A name; "" would be taken for none at all."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty")
    return text


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or not 1 <= int(text) <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is no count; allowed: whole numbers from 1 to {MAX_COUNT}")
    return int(text)


def job_steps(text: str) -> int:
    """A job's number of steps."""
    if not text.isdecimal() or not 1 <= int(text) <= MAX_JOB_STEPS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps; allowed: 1 to {MAX_JOB_STEPS}")
    return int(text)


def names(text: str) -> tuple[str, ...]:
    """Names by comma."""
    return tuple(name.strip() for name in text.split(","))


def group(text: str) -> tuple[str, str]:
    """A communicator's description and Megatron's name for it."""
    name, separator, megatron = text.partition("=")
    if not (name and separator and megatron):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=GROUP")
    return name, megatron


def _verb(verbs: Verbs, adds_flags: Callable[[Verbs], None], words: str) -> argparse.ArgumentParser:
    """The parser of the verb that the function is named after; its docstring is the verb's help."""
    parser: argparse.ArgumentParser
    parser = verbs.add_parser(adds_flags.__name__.lstrip("_"), help=words, description=adds_flags.__doc__)
    return parser


def _set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set a key of the job file, such as parallel.fsdp=16",
    )


def _tune(verbs: Verbs) -> None:
    """`lagom tune JOB.toml`: search for settings, judge them by a paired A/B test, write a run folder.

    `lagom tune --from-trace TRACES` predicts instead: groups and model come from profiler traces, and nothing is run.
    """
    parser = _verb(verbs, _tune, "search for settings and prove them by an A/B test")
    parser.add_argument("job", type=path, nargs="?", metavar="JOB.toml", help="the job file")
    parser.add_argument(
        "--from-trace",
        type=path,
        metavar="DIR",
        help="predict from profiler traces (a file, or a folder of them) what tuning would gain; if JOB.toml is "
        "given, only its [tune], [cluster] and [cost] count",
    )
    parser.add_argument(
        "--example", action="store_true", help="predict from a made-up trace that comes with the package"
    )
    parser.add_argument("--backend", type=word, metavar="NAME", help="what measures (default: the job file's)")
    parser.add_argument("--tuner", type=word, metavar="NAME", help="what searches (default: the job file's)")
    parser.add_argument("--seed", type=seed, metavar="N", help="seed of the search, the noise and the shuffling")
    parser.add_argument(
        "--warm-start",
        type=word,
        metavar="RUN",
        help="start from an earlier run folder; all of it is measured before it is adopted",
    )
    parser.add_argument("--bundle", type=path, metavar="RUN", help="run folder to replay (--backend recorded)")
    _set(parser)
    parser.add_argument("--out", type=path, metavar="DIR", help="new folder for the run (default: below lagom-runs/)")
    parser.add_argument("--details", action="store_true", help="show every collective of every group")
    _json_and_debug(parser)


def _plan(verbs: Verbs) -> None:
    """`lagom plan JOB.toml | CAPTURE`: a schedule of a training step that hides more communication."""
    parser = _verb(verbs, _plan, "plan how a step's collectives overlap its computation")
    parser.add_argument("job", type=path, metavar="JOB.toml|CAPTURE", help="a job file, or a captured step")
    parser.add_argument("--planner", type=word, metavar="NAME", help="what plans (default: the job file's, else ours)")
    parser.add_argument(
        "--for",
        dest="carrier",
        choices=[str(one) for one in Carrier],
        help="what runs the plan (default: the job's framework)",
    )
    parser.add_argument("--cluster", type=word, metavar="NAME", help="cluster of a captured step: a preset or a file")
    parser.add_argument(
        "--times",
        type=word,
        metavar="TRACE|measure|model",
        help="where the operators' times come from (default: times in the job file's [plan])",
    )
    parser.add_argument(
        "--work",
        type=float,
        metavar="N",
        help="plan for N million search steps instead of seconds: gives the same plan on every machine",
    )
    parser.add_argument("--apply", type=path, metavar="plan.toml", help="use this plan instead of making one")
    parser.add_argument(
        "--execute", action="store_true", help="run the plan on real ranks, in turns with the step as it was"
    )
    _set(parser)
    parser.add_argument("--out", type=path, metavar="DIR", help="new folder for plan.toml, report.html, timeline.json")
    _json_and_debug(parser)


def _compare(verbs: Verbs) -> None:
    """`lagom compare JOB.toml`: several tuners, or several planners, on one job, in one table."""
    parser = _verb(verbs, _compare, "compare tuners or planners on one job")
    parser.add_argument(
        "job", type=path, metavar="JOB.toml|CAPTURE", help="a job file; with --planners also a captured step"
    )
    who = parser.add_mutually_exclusive_group()
    words = ", ".join(TUNERS)  # argparse breaks lines at blanks alone
    who.add_argument(
        "--tuners", type=word, default=",".join(TUNERS), metavar="A,B", help=f"tuners to compare (default: {words})"
    )
    who.add_argument("--planners", type=word, metavar="A,B", help="planners to compare, instead of tuners")
    parser.add_argument("--backend", type=word, metavar="NAME", help="what measures (default: the job file's)")
    parser.add_argument("--cluster", type=word, metavar="NAME", help="cluster of a captured step (with --planners)")
    parser.add_argument(
        "--times",
        type=word,
        metavar="TRACE|measure|model",
        help="where the operators' times come from (with --planners)",
    )
    parser.add_argument("--seed", type=seed, metavar="N", help="seed of the search, the noise and the shuffling")
    parser.add_argument("--bundle", type=path, metavar="RUN", help="run folder to replay (--backend recorded)")
    parser.add_argument(
        "--warm-start", type=word, metavar="RUN", help="as of lagom tune, for the tuners that can start from something"
    )
    _set(parser)
    parser.add_argument("--out", type=path, metavar="DIR", help="new folder for compare.json and report.html")
    _json_and_debug(parser)


def _simulate(verbs: Verbs) -> None:
    """`lagom simulate JOB.toml`: predict an iteration: its time, MFU and memory, and what communication costs.

    With --model, --cluster and --gpus instead of a job file: rank the layouts of the model, the fastest first.
    """
    parser = _verb(verbs, _simulate, "predict a training iteration, or find the fastest layout")
    parser.add_argument("job", type=path, nargs="?", metavar="JOB.toml", help="the job file")
    parser.add_argument(
        "--model", type=word, metavar="NAME", help="rank the layouts of a model: its name, or a model file"
    )
    parser.add_argument("--cluster", type=word, metavar="NAME", help="a preset or a cluster file (with --model)")
    parser.add_argument("--gpus", type=count, metavar="N", help="number of GPUs (with --model)")
    parser.add_argument("--seq-len", type=count, metavar="N", help="tokens per sequence (with --model; default 4096)")
    parser.add_argument(
        "--global-batch", type=count, metavar="N", help="sequences per iteration (with --model; default 2 per GPU)"
    )
    parser.add_argument(
        "--framework", type=word, metavar="A,B", help="frameworks to rank (with --model; default: megatron, fsdp2)"
    )
    parser.add_argument(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="KEY=A,B,...",
        help="set a key of the job file, such as parallel.fsdp=16; several values are ranked: parallel.fsdp=8,16",
    )
    parser.add_argument("--out", type=path, metavar="DIR", help="new folder for run.json, report.html, timeline.json")
    _json_and_debug(parser)


def _capture(verbs: Verbs) -> None:
    """`lagom capture`: write a training step of your model as a file for simulate, tune and plan; no GPU, no weights.

    TARGET is SCRIPT.py:FUNCTION (the function returns a TrainingStep; the script is your own code and is run), a
    job file whose [model] and [parallel] say what to build, or a model's name with --parallel.
    """
    parser = _verb(verbs, _capture, "write a model's training step as a file")
    parser.add_argument("target", metavar="TARGET", help="SCRIPT.py:FUNCTION, JOB.toml, or a model's name")
    parser.add_argument(
        "--out", type=path, required=True, metavar="FILE", help="new file, compressed if it ends in .gz"
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks of a script's world (default 8)")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="the rank to capture (default 0)")
    parser.add_argument("--parallel", metavar="KEY=N,...", help="degrees of a named model, such as fsdp=8,tensor=2")
    parser.add_argument("--seq-len", type=int, metavar="N", help="sequence length of a named model (default 2048)")
    parser.add_argument("--micro-batch", type=int, metavar="N", help="sequences per rank of a named model (default 1)")
    _json_and_debug(parser)


def _analyze(verbs: Verbs) -> None:
    """`lagom analyze TRACE...`: how much of a job's communication overlaps, what contention costs, what to change."""
    parser = _verb(verbs, _analyze, "what traces show of overlap, and what to change")
    parser.add_argument(
        "traces",
        type=path,
        nargs="*",
        metavar="TRACE",
        help="Kineto JSON (.json, .json.gz, .tar.gz), Nsight Systems SQLite, NCCL Inspector JSON lines, flight "
        "recorder dumps (JSON or pickle), profiles of our NCCL plug-in (profile.RANK.bin), or a folder of them; one "
        "rank per parallel role is enough",
    )
    parser.add_argument("--example", action="store_true", help="analyse a made-up trace that comes with the package")
    parser.add_argument("--against", type=path, metavar="B", help="trace or folder of another run: say what changed")
    parser.add_argument("--compat", choices=_COMPAT, help="print HolisticTraceAnalysis's figures")
    parser.add_argument(
        "--cluster", type=word, metavar="NAME", help="cluster of the traces, a preset or a file (default: by their GPU)"
    )
    parser.add_argument(
        "--pattern", type=word, metavar="REGEX", help="regular expression for more communication kernels"
    )
    parser.add_argument(
        "--anonymise",
        action="store_true",
        help="write numbers in place of the names of files, kernels and communicators",
    )
    parser.add_argument("--jobs", type=jobs, metavar="N", help="processes that read (default: one per core)")
    parser.add_argument("--out", type=path, metavar="DIR", help="new folder for run.json, report.html, timeline.json")
    _json_and_debug(parser)


def _run(verbs: Verbs) -> None:
    """`lagom run -- COMMAND`: run a training command with our plug-in and hooks: watched, tuned, or set from a file.

    The command takes this process's place: its streams, signals and exit code are the job's own. Only a proof by
    restarts runs it several times, and exits by itself.
    """
    parser = _verb(verbs, _run, "run a training command: watched, tuned or configured")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--observe", action="store_true", help="change nothing: record what runs, say what could be set")
    way.add_argument("--online", action="store_true", help="tune the job's collectives while it runs")
    way.add_argument(
        "--prove",
        type=path,
        metavar="WHAT",
        help="compare WHAT, which is anything that --config takes, with the job's default by a sequential test: saved "
        "settings inside the job, anything else by restarting it",
    )
    parser.add_argument(
        "--config",
        type=path,
        metavar="RUN",
        help="start from a folder of run --online, tune or plan, saved settings, an FSDP2 plan, an environment file "
        "(.env) or a plug-in table",
    )
    parser.add_argument(
        "--restarts",
        type=restarts,
        metavar="N",
        help=f"at most N pairs of restarts (with --prove; {LEAST_RESTARTS} to {MOST_RESTARTS}, default: {RESTARTS}); "
        "if given, saved settings are proven by restarts, too",
    )
    parser.add_argument(
        "--pairs",
        type=pairs,
        metavar="N",
        help=f"at most N pairs of windows of a proof inside the job (with --prove; {LEAST_PAIRS} to {MOST_PAIRS}, "
        f"default: {PAIRS})",
    )
    parser.add_argument("--tuner", type=word, metavar="NAME", help="what searches (with --online; default: ours)")
    parser.add_argument(
        "--compare",
        type=names,
        default=(),
        metavar="NAMES",
        help="other tuners, separated by commas (with --online): each searches, too, and all results run in turns with "
        "the default; only that of --tuner may be adopted",
    )
    parser.add_argument(
        "--adapters",
        type=names,
        default=(),
        metavar="NAMES",
        help="what to tune on gloo (with --online), separated by commas: fsdp2, ddp, or calls, which are those of "
        "torch.distributed that the job itself makes (default: fsdp2 or ddp, whichever fits the model)",
    )
    parser.add_argument(
        "--job-steps",
        type=job_steps,
        metavar="N",
        help="roughly how many steps the job has (with --online): in a long job the search continues while it pays",
    )
    parser.add_argument("--out", type=path, metavar="DIR", help="new folder for the files (default: below lagom-runs/)")
    _debug(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the training command")


def _selftest(verbs: Verbs) -> None:
    """`lagom selftest --nccl`: ask this machine's NCCL for every setting; say what ran, how fast, how correctly.

    Saves a capability map, which tuning uses from then on. Exit code 1 if a result was wrong.
    """
    parser = _verb(verbs, _selftest, "test which settings this machine's NCCL obeys")
    parser.add_argument(
        "--nccl", action="store_true", help="test NCCL on this machine's GPUs (required; there is no other test yet)"
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="number of GPUs (default: all)")
    parser.add_argument(
        "--ranks-per-gpu",
        type=int,
        default=1,
        metavar="K",
        help="with 2, one GPU is enough (default: 1; NCCL 2.30.3 or later)",
    )
    parser.add_argument("--library", type=path, metavar="PATH", help="libnccl.so.2 (default: the one that torch loads)")
    parser.add_argument(
        "--minutes", type=float, default=10.0, metavar="M", help="start no test after M minutes (default: 10)"
    )
    parser.add_argument("--out", type=path, metavar="DIR", help="new folder for the files (default: below lagom-runs/)")
    _json_and_debug(parser)


def _export(verbs: Verbs) -> None:
    """`lagom export RUN`: write what a run found in a format that a job, NCCL or a framework reads."""
    parser = _verb(verbs, _export, "write a run's settings for a job to read")
    parser.add_argument(
        "folder", type=path, metavar="RUN", help="folder of lagom tune or run --online, or saved settings"
    )
    parser.add_argument(
        "--format",
        action="append",
        choices=FORMATS,
        required=True,
        help="what to write; can be given several times",
    )
    parser.add_argument(
        "--group",
        action="append",
        default=[],
        type=group,
        metavar="NAME=GROUP",
        help="with megatron_yaml: Megatron's group for a communicator of the run",
    )
    parser.add_argument(
        "--out", type=path, metavar="DIR", help="folder to write into, created if missing (default: RUN)"
    )
    _json_and_debug(parser)


def _diff(verbs: Verbs) -> None:
    """`lagom diff A B`: compare two runs of any verb, or two traces: settings, times, and whether these differ."""
    parser = _verb(verbs, _diff, "compare two runs or two traces")
    parser.add_argument("first", type=path, metavar="A", help="run folder or trace")
    parser.add_argument("second", type=path, metavar="B", help="the other run folder or trace")
    _json_and_debug(parser)


def _doctor(verbs: Verbs) -> None:
    """`lagom doctor`: say what this machine and its NCCL can do, what is missing, and what would work."""
    parser = _verb(verbs, _doctor, "say what this machine can do and what is missing")
    _json_and_debug(parser)


def _list(verbs: Verbs) -> None:
    """`lagom list KIND`: list models, clusters, GPUs, frameworks, tuners or planners, with what tells them apart."""
    parser = _verb(verbs, _list, "list models, clusters, GPUs, frameworks, tuners, planners")
    parser.add_argument("kind", choices=LISTED, metavar="KIND", help=", ".join(LISTED))
    _json_and_debug(parser)


def _init(verbs: Verbs) -> None:
    """`lagom init SOURCE`: write a commented job file; without SOURCE, it asks questions on a terminal.

    A script is read, not run, and what it does not say is left for you to fill in. A trace gives a job for lagom tune
    --from-trace.
    """
    parser = _verb(verbs, _init, "write a first job file")
    parser.add_argument(
        "source",
        nargs="?",
        metavar="SOURCE",
        help="a model's name (lagom list models), a Hugging Face config.json, a model file, a training script, or a "
        "trace",
    )
    parser.add_argument(
        "--cluster",
        type=word,
        metavar="NAME",
        help="a preset (lagom list clusters) or a cluster file; required with a model",
    )
    parser.add_argument("--gpus", type=count, metavar="N", help="number of GPUs; required with a model")
    parser.add_argument("--seq-len", type=count, metavar="N", help="tokens per sequence (default 4096)")
    parser.add_argument(
        "--out", type=path, default=Path("job.toml"), metavar="FILE", help="new file (default job.toml)"
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; say whether it fits and how long a step takes"
    )
    _debug(parser)


def _show(verbs: Verbs) -> None:
    """`lagom show FILE`: say in words what a run folder, plan, settings, plug-in table, capture or job file holds."""
    parser = _verb(verbs, _show, "say what a run or a file holds")
    parser.add_argument("file", type=path, metavar="FILE", help="file or run folder")
    _json_and_debug(parser)


def _runs(verbs: Verbs) -> None:
    """`lagom runs`: list run folders, the latest first."""
    parser = _verb(verbs, _runs, "list run folders")
    parser.add_argument(
        "folder", type=path, nargs="?", metavar="DIR", help="where to look (default: this folder and lagom-runs)"
    )
    _json_and_debug(parser)


def _open(verbs: Verbs) -> None:
    """`lagom open RUN`: open the report of a run in the browser."""
    parser = _verb(verbs, _open, "open the report of a run")
    parser.add_argument("folder", type=path, nargs="?", metavar="RUN", help="run folder (default: the latest)")
    _debug(parser)


def _watch(verbs: Verbs) -> None:
    """`lagom watch RUN`: follow a lagom tune or lagom run in progress: its state, the steps left, the best so far.

    On a terminal it redraws; elsewhere it writes a line when something has changed. It ends with the run.
    """
    parser = _verb(verbs, _watch, "follow a run in progress")
    parser.add_argument(
        "folder", type=path, nargs="?", metavar="RUN", help="run folder (default: the latest here or in lagom-runs)"
    )
    parser.add_argument("--once", action="store_true", help="print the current state and exit")
    _debug(parser)


def _resume(verbs: Verbs) -> None:
    """`lagom resume RUN`: continue a run of lagom tune that was interrupted or killed, in its folder.

    Its journal is replayed: nothing is measured twice. Runs of other verbs cannot be resumed.
    """
    parser = _verb(verbs, _resume, "continue an interrupted tuning run")
    parser.add_argument("folder", type=path, metavar="RUN", help="run folder")
    parser.add_argument("--details", action="store_true", help="show every collective of every group")
    _json_and_debug(parser)


def _completion(verbs: Verbs) -> None:
    """`lagom completion SHELL`: print a script that makes the shell complete verbs, flags and values."""
    parser = _verb(verbs, _completion, "shell completion for bash, zsh and fish")
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    _debug(parser)


def _docs(verbs: Verbs) -> None:
    """`lagom docs [PAGE]`: read this version's documentation in the terminal; without PAGE, list the pages."""
    parser = _verb(verbs, _docs, "read the documentation")
    parser.add_argument("page", nargs="?", metavar="PAGE", help="such as accuracy, online, howto/no_gain")
    _debug(parser)


VERBS: Final[Mapping[str, Callable[[Verbs], None]]] = MappingProxyType(
    {
        "tune": _tune,
        "plan": _plan,
        "compare": _compare,
        "simulate": _simulate,
        "capture": _capture,
        "analyze": _analyze,
        "run": _run,
        "selftest": _selftest,
        "export": _export,
        "diff": _diff,
        "doctor": _doctor,
        "list": _list,
        "init": _init,
        "show": _show,
        "runs": _runs,
        "open": _open,
        "watch": _watch,
        "resume": _resume,
        "completion": _completion,
        "docs": _docs,
    }
)
"""Adds a verb's flags, by its name; `cli/NAME.py` runs it."""
