"""A verb resolves its job once: no file of it is read twice, no part of it built twice."""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lagom_overlap.capturing.file import read_capture, write_capture
from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.hardware import load_preset
from lagom_overlap.jobfile import shapes, step
from lagom_overlap.jobfile.job import Job, limits_of
from lagom_overlap.jobfile.reading import read_tables
from lagom_overlap.sim.training import TrainingSimulator
from lagom_overlap.verbs.compare import CompareRequest, run_compare
from lagom_overlap.verbs.plan import PlanRequest, run_plan
from lagom_overlap.verbs.plan_problem import read_input
from lagom_overlap.verbs.simulate import SimulateRequest, run_simulate, simulate_capture
from lagom_overlap.verbs.tune import TuneRequest, run_tune
from lagom_overlap.workload import CommOp, CompOp, Gemm, Iteration, find_overlap_groups
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.models import load_model
from lagom_overlap.workload.parallel import ParallelTable
from lagom_overlap.workload.step import load_rules

LOADERS: tuple[Callable[..., object], ...] = (
    read_tables, load_preset, load_model, load_rules, read_capture,
)  # fmt: skip
BUILDERS: tuple[Callable[..., object], ...] = (
    step.job_step, step.cluster_for, step.filled_cluster, step.stated_cluster, step.model_of,
    step.precision_of, step.step_operators, shapes.groups_from_shapes, find_overlap_groups, limits_of,
)  # fmt: skip
CLUSTER = '[cluster]\npreset = "a40_nvlink"\n'
TUNE = "[tune]\npairs = 3\nbudget = { measurements = 4 }\n"
JOBS = {
    # Without a layer of interest left to build: what-ifs build other layouts, and one that fits is asked for anyway.
    "model": f'[model]\nname = "phi-2"\nseq_len = 256\n[parallel]\nfsdp = 8\n{CLUSTER}{TUNE}',
    "shapes": f'{CLUSTER}{TUNE}[[group]]\nname = "g"\nop = [{{ name = "a", gemm = [8192, 8192, 8192] }}]\n'
    'comm = [{ name = "c", kind = "all_reduce", bytes = "64 MiB" }]\n',
    "captured": f'[model]\ncapture = "step.json"\n{CLUSTER}{TUNE}',
}
GATHER = Collective(CollectiveKind.ALL_GATHER, 64 << 20, 8)
STEP = IssuedStep(
    iteration=Iteration(
        "tiny",
        (
            CommOp(name="ag", collective=GATHER, communicator="fsdp", stream="all_gather"),
            CompOp(name="mm", work=Gemm(8192, 8192, 8192)),
            CompOp(name="next", work=Gemm(8192, 8192, 8192), deps=("ag", "mm")),
        ),
        is_dataflow=True,
    ),
    num_ranks=8,
    groups={"fsdp": tuple(range(8))},
)


def simulated(path: Path) -> None:
    job = Job.read(path)
    if path.stem == "captured":
        simulate_capture(job, None)
    else:
        run_simulate(SimulateRequest(job=job))


VERBS: dict[str, Callable[[Path], object]] = {
    "simulate": simulated,
    "plan": lambda path: run_plan(read_input(path), PlanRequest(planner="program_order")),
    "tune": lambda path: run_tune(TuneRequest(job=Job.read(path), out=path.parent / "run")),
    "compare": lambda path: run_compare(CompareRequest(job=Job.read(path), tuners=("fixed_min", "fixed_max"))),
}
CASES = [(verb, job) for verb in VERBS for job in JOBS if job != "shapes" or verb in ("tune", "compare")]


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of loaders and builders from now on, wherever they were imported; and simulators of training made."""
    counts: Counter[str] = Counter()

    def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return real(*args, **kwargs)

        return call

    modules = [module for name, module in sys.modules.items() if name.startswith("lagom_overlap")]
    for each in (*LOADERS, *BUILDERS):
        replacement = counting(each.__name__, each)
        for module in modules:
            for name, value in list(vars(module).items()):
                if value is each:
                    monkeypatch.setattr(module, name, replacement)
    methods = [(TrainingSimulator, name) for name in ("__init__", "times", "step")]
    for owner, name in [*methods, (ParallelTable, "layout")]:
        monkeypatch.setattr(owner, name, counting(f"{owner.__name__}.{name}", getattr(owner, name)))
    return counts


@pytest.mark.parametrize(("verb", "job"), CASES)
def test_no_verb_loads_or_builds_a_part_of_its_job_twice(
    verb: str, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{job}.toml").write_text(f'[job]\nname = "{job}"\n{JOBS[job]}')
    write_capture(tmp_path / "step.json", STEP)
    monkeypatch.setattr("lagom_overlap.verbs.simulate.simulated_what_ifs", lambda job: ())  # they ask of other jobs
    counts = counted(monkeypatch)
    VERBS[verb](tmp_path / f"{job}.toml")
    assert counts["load_preset"] == counts["read_tables"] == 1
    assert counts["job_step"] <= 1
    assert counts["load_model"] == counts["ParallelTable.layout"] == (job == "model")
    assert counts["read_capture"] == (job == "captured")
    assert {name: number for name, number in counts.items() if number > 1} == {}
