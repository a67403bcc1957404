"""Every verb ends with a line to type, which the command line takes."""

import shlex
from pathlib import Path

import pytest

from lagom_overlap.capturing.file import write_capture
from lagom_overlap.cli import main
from lagom_overlap.cli.main import full_parser
from lagom_overlap.collective import Collective, CollectiveKind
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
RUNS = {
    "simulate a b.toml": "lagom plan 'a b.toml'",
    "simulate captured.toml": "lagom plan captured.toml",
    "plan 'a b.toml' --planner program_order": "lagom plan 'a b.toml' --planner program_order --out planned    #",
    "plan 'a b.toml' --planner program_order --out planned": "lagom open planned",
    "compare shapes.toml --tuners fixed_min": "lagom tune shapes.toml --tuner fixed_min",
    "compare step.json --cluster a40_nvlink --planners program_order": (
        "lagom plan step.json --cluster a40_nvlink --planner program_order --out planned"
    ),
    "tune shapes.toml --tuner default --out tuned": "lagom run --online -- COMMAND",
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lagom_overlap.verbs.tune.render_tuning", lambda result: f"a page of {result.job}")
    monkeypatch.setattr("lagom_overlap.verbs.plan.render_plan", lambda result: f"a page of {result.job}")
    captured = f'[job]\nname = "c"\n[model]\ncapture = "step.json"\n{CLUSTER}'
    for name, text in (("a b", MODEL), ("shapes", SHAPES), ("captured", captured)):
        Path(f"{name}.toml").write_text(text)
    write_capture(Path("step.json"), STEP)


@pytest.mark.parametrize("typed", RUNS)
def test_a_verb_ends_with_a_line_to_type(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(typed.replace("simulate a b.toml", "simulate 'a b.toml'"))
    assert main(words) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Next: ")]
    assert len(lines) == 1
    line = lines[0].removeprefix("Next: ")
    assert line.startswith(RUNS[typed])
    if line.startswith("lagom ") and "COMMAND" not in line:
        parser, _ = full_parser()
        parser.parse_args(shlex.split(line, comments=True)[1:])  # ends the test where the line is none
