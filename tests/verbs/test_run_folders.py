"""Every verb that writes a folder: the same record, private and whole files, whatever comes in the middle."""

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from selftest_box import BOX, stand_in

import lagom_overlap
from lagom_emulate import verb as emulate
from lagom_emulate.result import EmulateResult
from lagom_overlap.capturing.file import write_capture
from lagom_overlap.cli import main
from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.errors import LagomError, OutputError
from lagom_overlap.interrupts import as_interrupts
from lagom_overlap.jobfile.reading import read_job
from lagom_overlap.jobfile.run_folder import RunFolder, RunKind
from lagom_overlap.timeline import Timeline
from lagom_overlap.verbs import run
from lagom_overlap.verbs.selftest import SelfTestRequest, run_selftest
from lagom_overlap.workload import CommOp, CompOp, Gemm, Iteration
from lagom_overlap.workload.issued import IssuedStep

TRACE = Path(__file__).parents[1] / "data" / "h100" / "all_reduce_8ch.json.gz"
CLUSTER = '[cluster]\npreset = "a40_nvlink"\nnodes = 1\n'
MODEL = (
    '[job]\nname = "small"\n[model]\nname = "phi-2"\nseq_len = 256\n'
    f"{CLUSTER}[parallel]\nfsdp = 8\n[tune]\nseed = 3\n[plan]\nseed = 5\n"
)
SHAPES = (
    f'[job]\nname = "shapes"\n{CLUSTER}[[group]]\nname = "g"\nop = [{{ name = "a", memory = "64 KiB" }}]\n'
    'comm = [{ name = "c", kind = "all_reduce", bytes = "1 MiB" }]\n'
    "[tune]\npairs = 3\nseed = 3\nbudget = { measurements = 4 }\n"
)
CAPTURED = f'[job]\nname = "captured"\n[model]\ncapture = "step.json"\n{CLUSTER}'
STEP = IssuedStep(
    iteration=Iteration(
        "tiny",
        (
            CompOp(name="mm", work=Gemm(4096, 4096, 4096)),
            CommOp(
                name="ag",
                collective=Collective(CollectiveKind.ALL_GATHER, 1 << 20, 8),
                communicator="fsdp",
                deps=("mm",),
                stream="all_gather",
            ),
        ),
        is_dataflow=True,
    ),
    num_ranks=8,
    groups={"fsdp": tuple(range(8))},
)
ALWAYS = ["format", "kind", "date", "seed", "machine", "versions"]


def verb(*words: str) -> Callable[[Path], object]:
    def called(out: Path) -> None:
        assert main([*words, "--out", str(out), "--json"]) == 0

    return called


def emulated(out: Path) -> None:
    request = emulate.EmulateRequest(command=("true",), spec=read_job(Path("shapes.toml")), out=out)
    result = EmulateResult(
        command=request.command, exit_code=0, cluster="a40_nvlink", num_ranks=1, num_started=1, num_hosts=1,
        num_steps=0, step_s=None, steps_s=(), last_step=None, virtual_s=1.0, wall_s=1.0, memory_bytes=None,
        memory_limit_bytes=1, num_operations=0, num_late=0, num_idle=0, python_clock="virtual", priced=(),
        refusals=(), notes=(), files=(), ran=Timeline(()),
    )  # fmt: skip
    with as_interrupts():
        emulate._write(request, result)


def self_tested(out: Path) -> None:
    with as_interrupts():
        run_selftest(
            SelfTestRequest(ranks_per_gpu=2, out=out),
            open_benches=stand_in(None),
            box=lambda: BOX,
            clock=lambda: 0.0,
            environment={"XDG_CACHE_HOME": str(out.parent / "cache")},
        )


def launched(out: Path) -> None:
    request = run.LaunchRequest(command=(sys.executable, "train.py"), mode=run.RunMode.OBSERVE, out=out)
    with as_interrupts():
        run.prepare(request, dict(os.environ))


VERBS = {
    RunKind.ANALYZE: (verb("analyze", str(TRACE)), 0),
    RunKind.COMPARE: (verb("compare", "shapes.toml", "--tuners", "fixed_min", "--seed", "7"), 7),
    RunKind.COMPARE_PLANNERS: (verb("compare", "model.toml", "--planners", "program_order"), 5),
    RunKind.EMULATE: (emulated, None),
    RunKind.LAYOUTS: (verb("simulate", "model.toml", "--set", "parallel.fsdp=4,8"), None),
    RunKind.PLAN: (verb("plan", "model.toml", "--planner", "program_order"), 5),
    RunKind.REPRODUCE: (verb("reproduce", "fig5", "--seed", "2"), 2),
    RunKind.RUN: (launched, None),
    RunKind.SELFTEST: (self_tested, None),
    RunKind.SIMULATE: (verb("simulate", "model.toml"), None),
    RunKind.SIMULATE_CAPTURE: (verb("simulate", "captured.toml"), None),
    RunKind.TUNE: (verb("tune", "shapes.toml"), 3),
}
HAVE_A_JOB = {
    RunKind.COMPARE: "shapes.toml", RunKind.COMPARE_PLANNERS: "model.toml", RunKind.EMULATE: "shapes.toml",
    RunKind.LAYOUTS: "model.toml", RunKind.PLAN: "model.toml", RunKind.SIMULATE: "model.toml",
    RunKind.SIMULATE_CAPTURE: "captured.toml", RunKind.TUNE: "shapes.toml",
}  # fmt: skip
RESULTS = {
    RunKind.ANALYZE: "AnalyzeResult", RunKind.COMPARE: "CompareResult",
    RunKind.COMPARE_PLANNERS: "ComparePlannersResult", RunKind.EMULATE: "EmulateResult",
    RunKind.LAYOUTS: "LayoutsResult", RunKind.PLAN: "PlanResult",
    RunKind.RUN: "RunResult", RunKind.SELFTEST: "SelfTestResult", RunKind.SIMULATE: "SimulateResult",
    RunKind.SIMULATE_CAPTURE: "SimulateCaptureResult", RunKind.TUNE: "TuneResult",
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "_library", lambda: (None, "no plug-in here"))
    for name, text in (("model", MODEL), ("shapes", SHAPES), ("captured", CAPTURED)):
        (tmp_path / f"{name}.toml").write_text(text)
    write_capture(tmp_path / "step.json", STEP)
    return tmp_path


def modes(out: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in out.iterdir()}


@pytest.mark.parametrize("kind", RunKind)
def test_every_verb_says_the_same_of_its_run(kind: RunKind, folder: Path) -> None:
    write, seed = VERBS[kind]
    write(folder / "run")
    raw = json.loads((folder / "run" / "run.json").read_bytes())
    assert list(raw)[: len(ALWAYS)] == ALWAYS
    assert raw.keys() - ALWAYS <= {"job", "request", "from_trace", "result", "process"}
    assert ("process" in raw) is (kind is RunKind.RUN)  # the job's, whose process this one became
    assert ("result" in raw) is (kind is not RunKind.RUN)
    assert raw.keys() & {"job", "request"}
    assert (raw["format"], raw["kind"], raw["seed"]) == (1, kind, seed)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", raw["date"])
    assert {"cpu", "cores", "system"} <= raw["machine"].keys()
    assert {"python", "lagom-overlap", "numpy"} <= raw["versions"].keys()
    found = RunFolder.read(folder / "run")
    assert (found.kind, found.record.seed, found.record.result) == (kind, seed, raw.get("result"))
    assert set(found.files) == {path.name for path in (folder / "run").iterdir()}
    if kind in HAVE_A_JOB:
        assert found.spec() == read_job(Path(HAVE_A_JOB[kind]))
    assert (folder / "run").stat().st_mode & 0o777 == 0o700
    assert set(modes(folder / "run").values()) == {0o600}
    check_loaded(folder / "run", kind, raw.get("result"))


def check_loaded(run: Path, kind: RunKind, written: object) -> None:
    """`lagom_overlap.load` gives back, typed, all that was written."""
    if kind is RunKind.REPRODUCE:
        with pytest.raises(LagomError, match="no typed result"):
            lagom_overlap.load(run)
        return
    loaded = lagom_overlap.load(run)
    assert type(loaded).__name__ == RESULTS[kind]
    if kind is RunKind.RUN:
        assert loaded.to_dict()["command"] == [sys.executable, "train.py"]
    else:
        assert loaded.to_dict() == written
    assert loaded.summary()
    assert loaded._repr_html_()
    if kind in {RunKind.TUNE, RunKind.SIMULATE, RunKind.SIMULATE_CAPTURE}:
        assert loaded.figure()  # type: ignore[attr-defined]  # drawn from what lies next to run.json
    if kind in {RunKind.PLAN, RunKind.ANALYZE}:
        with pytest.raises(LagomError, match="that was loaded from its folder has no"):
            loaded.figure()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", RunKind)
def test_a_signal_in_the_middle_of_writing_waits_until_every_file_is_whole(
    kind: RunKind, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, _ = VERBS[kind]
    write(folder / "whole")
    own, num_synced = os.fsync, 0

    def sync(handle: int) -> None:
        nonlocal num_synced
        is_of_run = Path(f"/proc/self/fd/{handle}").readlink().parent == folder / "run"
        num_synced += is_of_run
        if is_of_run and num_synced == at:  # before the file has its name
            signal.raise_signal(signal.SIGTERM)
        own(handle)

    monkeypatch.setattr(os, "fsync", sync)
    at = 1 + 2 * (kind is RunKind.TUNE)  # the job and the journal's first line are written when the search begins
    try:
        write(folder / "run")
    except AssertionError:  # by the exit code: told by the verbs that can
        assert kind in {RunKind.PLAN, RunKind.TUNE, RunKind.COMPARE}
    assert num_synced >= at
    assert modes(folder / "run").keys() == modes(folder / "whole").keys()
    for name in ("run.json", "timeline.json"):
        if (folder / "run" / name).exists():
            assert json.loads((folder / "run" / name).read_bytes())


def test_a_run_does_not_write_over_another(folder: Path) -> None:
    for name, (write, _) in VERBS.items():
        (folder / "mine").mkdir()
        (folder / "mine" / "run.json").write_text("mine")
        with pytest.raises((AssertionError, OutputError)):  # the command line says so by its exit code
            write(folder / "mine")
        assert (folder / "mine" / "run.json").read_text() == "mine", name
        shutil.rmtree(folder / "mine")
