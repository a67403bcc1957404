"""Every verb ends with a line to type, which the command line takes: verb, flags, and files that are there."""

import contextlib
import io
import shlex
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

import lagom_overlap
from lagom_overlap.capturing.file import write_capture
from lagom_overlap.cli import main
from lagom_overlap.cli.main import full_parser
from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.papers.reproduce import run_reproduce
from lagom_overlap.results.compare import CompareResult
from lagom_overlap.workload import CommOp, CompOp, Gemm, Iteration
from lagom_overlap.workload.issued import IssuedStep

CLUSTER = '[cluster]\npreset = "a40_nvlink"\nnodes = 1\n'
MODEL = f'[job]\nname = "m"\n[model]\nname = "phi-2"\nseq_len = 256\n{CLUSTER}[parallel]\nfsdp = 8\n'
SHAPES = (
    f'[job]\nname = "s"\n{CLUSTER}[[group]]\nname = "g"\nop = [{{ name = "a", memory = "64 KiB" }}]\n'
    'comm = [{ name = "c", kind = "all_reduce", bytes = "1 MiB" }]\n[tune]\npairs = 3\nbudget = { measurements = 4 }\n'
)
STEP = IssuedStep(
    iteration=Iteration(
        "tiny",
        (
            CompOp(name="mm", work=Gemm(4096, 4096, 4096)),
            CommOp(
                name="ag", collective=Collective(CollectiveKind.ALL_GATHER, 1 << 20, 8), communicator="fsdp",
                deps=("mm",), stream="all_gather",
            ),
        ),
        is_dataflow=True,
    ),
    num_ranks=8,
    groups={"fsdp": tuple(range(8))},
)  # fmt: skip
SCRIPT = "init_process_group('nccl')\nfully_shard(model)\nBATCH_SIZE = 1\n"
RUNS = {
    "init phi-2 --cluster a40_nvlink --gpus 8 --out 'job of it.toml'": "lagom simulate 'job of it.toml'",
    "init phi-2 --cluster a40_nvlink --gpus 8 --check": "lagom init phi-2 --cluster a40_nvlink --gpus 8 ",
    "init 'a train.py' --out half.toml": "lagom simulate half.toml",
    "simulate 'a b.toml' --out simulated": "lagom plan 'a b.toml'",
    "simulate 'a b.toml' --set parallel.micro_batch=1,2 --out 'the ranked'": "lagom simulate 'the ranked/best.toml'",
    "simulate captured.toml": "lagom plan captured.toml",
    "plan 'a b.toml' --planner program_order": "lagom simulate 'a b.toml'",
    "plan step.json --cluster a40_nvlink --planner program_order": (
        "lagom plan step.json --planner program_order --cluster a40_nvlink --out planned"
    ),
    "plan 'a b.toml' --planner program_order --out planned": "lagom open planned",
    "plan 'a b.toml' --apply planned/plan.toml": "lagom simulate 'a b.toml'",
    "compare shapes.toml --tuners fixed_min": "lagom run --online -- COMMAND",
    "compare shapes.toml --tuners default --set tune.pairs=4": "lagom run --online -- COMMAND",
    "compare step.json --cluster a40_nvlink --planners program_order": (
        "lagom plan step.json --cluster a40_nvlink --planner program_order --out planned-2"
    ),
    "tune shapes.toml --tuner default --out tuned": "lagom run --online -- COMMAND",
    "analyze --example": "lagom tune --example",
    "show tuned": "lagom open tuned",
    "show planned/plan.toml": "lagom plan JOB.toml --apply planned/plan.toml",
    "show 'the ranked'": "lagom simulate 'the ranked/best.toml'",
    "show step.json": "lagom plan step.json --cluster h100_dgx",
    "show 'a b.toml'": "lagom simulate 'a b.toml'",
    "show tuned/configs.toml": "lagom export tuned --format plugin",
    "runs": "lagom open tuned",
    "watch tuned": "lagom show tuned",
    "diff tuned simulated": "lagom run --online -- COMMAND",
    "export tuned --format plugin": "lagom run --config tuned/lagom_table.bin -- COMMAND",
    "export tuned --format perfetto": "python3 -m webbrowser https://ui.perfetto.dev",
    "docs": "lagom docs ",
    "analyze --example --out analysed": "lagom tune --example",
    "doctor": "lagom run --observe -- COMMAND",
}
"""In one folder, one after the other: what is typed, and what is to be typed next."""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str]]]:
    """What each of them printed."""
    folder = tmp_path_factory.mktemp("here")
    captured = f'[job]\nname = "c"\n[model]\ncapture = "step.json"\n{CLUSTER}'
    for name, text in (("a b", MODEL), ("shapes", SHAPES), ("captured", captured)):
        (folder / f"{name}.toml").write_text(text)
    (folder / "a train.py").write_text(SCRIPT)
    write_capture(folder / "step.json", STEP)
    patch, lines = pytest.MonkeyPatch(), dict[str, list[str]]()
    with patch.context() as at:
        at.chdir(folder)
        at.setattr("lagom_overlap.verbs.tune.render_tuning", lambda result: f"a page of {result.job}")
        at.setattr("lagom_overlap.verbs.plan.render_plan", lambda result: f"a page of {result.job}")
        for typed in RUNS:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                assert main(shlex.split(typed)) == 0, typed
            lines[typed] = printed.getvalue().splitlines()
        yield lines


@pytest.mark.parametrize("typed", RUNS)
def test_a_verb_ends_with_a_line_to_type(
    typed: str, said: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    lines = [line for line in said[typed] if line.lower().startswith("next: ")]
    assert len(lines) == 1
    assert lines[0][len("next: ") :].startswith(RUNS[typed])
    behind = said[typed][said[typed].index(lines[0]) + 1 :]
    assert all(line.startswith(("Or: ", "To undo: ", "Which layout is ", "What it does when ")) for line in behind), (
        behind
    )
    monkeypatch.chdir(tmp_path_factory.getbasetemp() / "here0")
    for line in said[typed]:
        head, _, command = line.partition(": ")
        if head.lower() in ("next", "or") and not command.startswith("python3 "):
            check(command.strip())


def check(line: str) -> None:
    """What the command line takes, of files that are there; COMMAND and JOB.toml stand for what only a user knows."""
    words = shlex.split(line, comments=True)
    assert words[0] == "lagom"
    parser, _ = full_parser()
    parser.parse_args(words[1:])  # ends the test where the line is none
    new = words.index("--out") + 1 if "--out" in words else 0
    for at, word in enumerate(words):
        is_file = "/" in word or word.endswith((".toml", ".json", ".py"))
        if is_file and at != new and word != "JOB.toml" and not word.startswith("$("):
            assert Path(word).exists(), line


def test_the_verbs_of_the_papers_and_of_emulated_gpus_end_with_one_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    parser, _ = full_parser()
    papers = import_module("lagom_overlap.papers.cli")
    report = run_reproduce("fig5", profiles=["plausible"])
    for typed in ("reproduce fig5 --seed 3", "reproduce fig5 --unknowns", "reproduce fig5 --out there"):
        check(papers._following(parser.parse_args(typed.split()), report))
    swept = papers._following(parser.parse_args(["reproduce", "fig5", "--unknowns", "--seed", "3"]), report)
    assert "--seed 3 --unknowns --out" in swept, "the page of what took minutes"
    again = papers._again(parser.parse_args(["reproduce", "fig5", "--seed", "3", "--unknowns", "--out", "there"]))
    check(again)
    assert "fig5 --backend simulated --seed 3 --unknowns --out there    # from the start" in again, "after Ctrl-C"
    emulate = pytest.importorskip("lagom_emulate.cli")
    for typed in ("emulate --cluster a40_nvlink --ranks 2 -- python t.py", "emulate --job j.toml --out there -- t"):
        line = emulate._following(parser.parse_args(typed.split()))
        parser.parse_args(shlex.split(line)[1:])


def test_a_comparison_names_the_tuner_that_beat_the_default_with_what_it_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shapes.toml").write_text(SHAPES)
    result = lagom_overlap.compare("shapes.toml", tuners=("fixed_max",))
    assert isinstance(result, CompareResult)
    faster = replace(result, rows=(replace(result.rows[0], speedup_over_default=1.2),))
    parser, _ = full_parser("compare")
    arguments = parser.parse_args(["compare", "shapes.toml", "--seed", "3", "--set", "tune.pairs=4"])
    line = import_module("lagom_overlap.cli.compare")._following(faster, arguments)
    assert line == "lagom tune shapes.toml --seed 3 --set tune.pairs=4 --tuner fixed_max"
    check(line)
