"""Where `lagom plan` takes times from: a trace, the ranks, the model; what is said of it, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest

from lagom_overlap.cli import main
from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.engines.fx.commands import Profiled
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import load_preset
from lagom_overlap.jobfile.reading import read_job
from lagom_overlap.jobfile.spec import TimesSource
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.predict import predict
from lagom_overlap.verbs import plan_problem
from lagom_overlap.verbs.plan_problem import PlanFlags, read_input
from lagom_overlap.verbs.plan_times import ProportionalTimes, TimesWish, from_ranks, from_trace
from lagom_overlap.workload import CommOp, CompOp, Gemm, Iteration, MemoryBound, Origin, ShardSpec, TensorUse
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.steps import Split
from lagom_overlap.workload.sharding import Gather

ROOT = Path(__file__).parents[2]
OURS = ROOT / "tests" / "data" / "zero_step_gloo_trace.json.gz"
JOB = """
[job]
name = "zero"
backend = "gloo"
[program]
script = "plan_zero.py"
[plan]
planner = "program_order"
"""
MODEL = """
[job]
name = "phi"
[model]
name = "phi-2"
seq_len = 256
[cluster]
preset = "a40_nvlink"
nodes = 1
[parallel]
fsdp = 8
[plan]
planner = "program_order"
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A gloo job of the recorded program in a folder of its own, where nothing may be started."""
    monkeypatch.setattr(plan_problem, "ProgramRanks", lambda *_, **__: pytest.fail("ranks were started"))
    shutil.copy(ROOT / "examples" / "plan_zero.py", tmp_path)
    shutil.copy(OURS, tmp_path / "trace.json.gz")
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


@pytest.mark.torch
def test_a_trace_of_the_program_gives_every_operator_its_time(job):
    given = read_input(job, PlanFlags(times=str(OURS)))
    assert given.ranks is None
    found = given.times
    assert (found.source, found.num_steps, found.is_gpu, found.num_in_order) == ("trace", 3, False, 118)
    assert (found.computations.num_measured, found.collectives.num_measured) == (94, 24)
    assert found.computations.share_of_time == found.collectives.share_of_time == 1
    assert given.notes[0] == (
        "Times come from zero_step_gloo_trace.json.gz (CPU operators, 3 steps): 94 of 94 computations (100.0 % of "
        "their time) and 24 of 24 collectives (100.0 %); 118 matched in order, 0 by shape."
    )


@pytest.mark.torch
def test_the_step_as_it_ran_takes_about_what_the_trace_says(job):
    """The program waits on the spot: its prediction is the sum of its operators, the trace's steps hold calls too."""
    given = read_input(job, PlanFlags(times=str(OURS)))
    predicted_s = predict(given.problem, given.issued).overlap.makespan_s
    assert predicted_s == pytest.approx(sum(given.problem.times.seconds(op) for op in given.issued.ops), rel=1e-3)
    import gzip

    with gzip.open(OURS) as file:
        events = json.load(file)["traceEvents"]
    steps_us = sorted(event["dur"] for event in events if event["name"].startswith("ProfilerStep"))
    assert 0.75 * steps_us[0] < 1e6 * predicted_s < steps_us[-1]


@pytest.mark.torch
def test_the_key_is_seen_from_the_job_file_and_the_flag_from_here(job, monkeypatch, tmp_path):
    job.write_text(JOB + 'times = "trace.json.gz"\n')
    assert read_input(job).times.file == "trace.json.gz"
    (tmp_path / "here").mkdir()
    shutil.copy(OURS, tmp_path / "here" / "other.json.gz")
    monkeypatch.chdir(tmp_path / "here")
    assert read_input(job, PlanFlags(times="other.json.gz")).times.file == "other.json.gz"
    with pytest.raises(JobError, match=r"times is 'trace.json.gz': no such file; allowed: model, measure, or a trace"):
        read_input(job, PlanFlags(times="trace.json.gz"))


@pytest.mark.torch
def test_the_verb_prints_and_writes_what_was_matched(job, capsys, tmp_path):
    out = tmp_path / "run"
    assert main(["plan", str(job), "--times", str(OURS), "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["times"]["computations"] == {"num": 94, "num_measured": 94, "share_of_time": 1.0}
    assert found["iteration_s"]["lower_bound"] <= found["iteration_s"]["after"] <= found["iteration_s"]["before"]
    assert f'times = "{OURS.name}"' in (out / "plan.toml").read_text()
    assert OURS.name in (out / "report.html").read_text()
    assert json.loads((out / "run.json").read_text())["result"]["times"]["num_in_order"] == 118
    assert main(["compare", str(job), "--planners", "program_order", "--times", str(OURS)]) == 0
    assert "118 matched in order" in " ".join(capsys.readouterr().out.split())


@pytest.mark.torch
@pytest.mark.parametrize(
    ("times", "words"),
    [
        ("model", ["no cost model describes these ranks", '"measure"']),
        ("nothing.json", ["'nothing.json': no such file"]),
    ],
)
def test_times_that_ranks_cannot_have_are_refused(job, capsys, times, words):
    assert main(["plan", str(job), "--times", times]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert all(word in err for word in words)


def test_times_that_a_model_cannot_have_are_refused(tmp_path, capsys):
    job = tmp_path / "job.toml"
    job.write_text(MODEL)
    assert main(["plan", str(job), "--times", "measure"]) == 2
    assert "needs a program on real ranks" in capsys.readouterr().err
    assert main(["plan", str(job), "--times", str(OURS)]) == 2
    err = capsys.readouterr().err
    assert "is not of this step: it holds times of 0 of" in err
    assert "aten.mm (108)" in err
    assert err.count("\n") == 1
    assert main(["compare", str(job), "--times", "model"]) == 2
    assert "--times goes with --planners" in capsys.readouterr().err
    assert main(["plan", str(job), "--times", "model", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["times"] is None


def test_a_wish_is_a_word_or_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "measure").write_text("a trace of that name")
    assert TimesWish.of(None) == TimesWish()
    assert TimesWish.of("measure") == TimesWish(source=TimesSource.MEASURE)
    assert TimesWish.of("./measure") == TimesWish(trace=Path("measure"))
    (tmp_path / "job.toml").write_text(MODEL + 'times = "./measure"\n')
    assert TimesWish.of(read_job(Path("job.toml")).plan.times).trace is not None


MATRIX = ShardSpec(inputs=(TensorUse("", (0, None)),), combine=(Gather(0),), sizes=(256,))


def small_step():
    """The recorded program's first gather and product, and two operators that it does not have."""
    size = 384 * 1536 * 4
    return Iteration(
        "small",
        (
            CommOp(name="ag", collective=Collective(CollectiveKind.ALL_GATHER, size, 2), shards=MATRIX),
            CompOp(
                name="mm",
                work=Gemm(256, 1536, 384, 4),
                deps=("ag",),
                origin=Origin(kernel="aten.mm"),
                shards=MATRIX,
            ),
            CompOp(name="new", work=Gemm(256, 64, 384, 4), deps=("mm",), origin=Origin(kernel="aten.mm")),
            CompOp(name="odd", work=MemoryBound(64), deps=("new",), origin=Origin(kernel="aten.erf")),
        ),
        is_dataflow=True,
    )


class ByWork:
    """A nanosecond a floating-point operation, a microsecond else."""

    def seconds(self, op):
        return 1e-9 * op.work.flops if isinstance(op, CompOp) and isinstance(op.work, Gemm) else 1e-6


def test_what_the_trace_lacks_takes_the_scaled_model_and_is_named():
    found = from_trace(OURS, small_step(), ByWork())
    _, product, new, odd = small_step().ops
    times = found.times
    factor = times.seconds(product) / ByWork().seconds(product)
    assert times.seconds(new) == pytest.approx(factor * ByWork().seconds(new))
    assert times.seconds(odd) == pytest.approx(factor * 1e-6)
    assert (found.json.computations.num, found.json.computations.num_measured) == (3, 1)
    assert found.json.scale["Gemm"] == pytest.approx(factor)
    assert "The trace lacks aten.mm (1), aten.erf (1): the model's times, scaled (" in found.notes[1]


def test_a_real_trace_without_shapes_is_matched_by_order_alone_and_says_so(shared_traces):
    """ResNet-50 with DDP on two A100, recorded by others: 53 convolutions in each of three steps, five all-reduces."""
    sizes = (8196000, 31502336, 26255360, 26550272, 9724160)
    ops = [
        CompOp(name=f"conv_{n}", work=Gemm(512, 512, 512), origin=Origin(kernel="aten.convolution")) for n in range(53)
    ]
    reduces = [
        CommOp(name=f"ar_{n}", collective=Collective(CollectiveKind.ALL_REDUCE, num_bytes, 2))
        for n, num_bytes in enumerate(sizes)
    ]
    found = from_trace(shared_traces / "hta" / "nccl_data.json.gz", Iteration("resnet", (*ops, *reduces)), ByWork())
    assert (found.json.num_steps, found.json.is_gpu, found.json.num_in_order) == (3, True, 58)
    assert found.json.computations.share_of_time == found.json.collectives.share_of_time == 1
    assert "The trace has no shapes (record_shapes=True)" in found.notes[1]


class Ranks:
    """Ranks on which every operator takes a second, and a collective a nanosecond a byte."""

    num_ranks = 2
    description = "ranks of a test"

    def profile(self, repeats):
        return Profiled({op.name: 1.0 for op in small_step().ops}, rates={"ag": 0.5})

    def time_collectives(self, collectives, repeats):
        self.timed = list(collectives)
        return {collective: 1e-9 * collective.num_bytes for collective in collectives}


@pytest.mark.torch
def test_pieces_are_measured_and_scaled_to_what_the_ranks_took(monkeypatch):
    import lagom_overlap.engines.compute as probe

    seconds = {256: 8.0, 128: 5.0, 64: 3.0, 32: 2.0}  # a half takes more than half
    monkeypatch.setattr(
        probe, "probe_operators", lambda works, repeats: {work: (seconds[work.m], 0.0) for work in works}
    )
    ranks = Ranks()
    held = small_step()
    found = from_ranks(ranks, held)
    assert sorted(timed.num_bytes for timed in ranks.timed) == [384 * 1536 * 4 // n for n in (8, 4, 2, 1)]
    cut = {op.name: op for op in rewritten(held, [Split("mm", 0, 2), Split("ag", 0, 4)]).ops}
    assert found.times.seconds(held.ops[1]) == 1.0
    assert found.times.seconds(cut["mm#0"]) == pytest.approx(5 / 8)
    assert found.times.seconds(cut["ag#3"]) == pytest.approx(1 / 4)
    assert (found.json.source, found.json.num_pieces) == ("ranks", 6)
    assert "6 shapes of their pieces, were timed alone on ranks of a test" in found.notes[0]
    assert found.together == {"ag": 0.5}
    assert "each goes at 0.50 to 0.50 of its speed alone" in found.notes[1]


def comm(name, num_bytes):
    return CommOp(name=name, collective=Collective(CollectiveKind.ALL_GATHER, num_bytes, 2))


def test_a_line_through_collectives_of_two_sizes_tells_what_a_call_costs():
    held = Iteration("s", (comm("a", 1000), comm("b", 4000), CompOp(name="m", work=MemoryBound(8))))
    times = ProportionalTimes.of(held, {"a": 3.0, "b": 9.0, "m": 0.5})  # 1 s, and 2 ms a byte
    assert times.seconds(comm("c", 2000)) == pytest.approx(5.0)
    assert times.comm_overhead_s == pytest.approx(1.0)


def test_collectives_of_one_size_cost_a_call_what_the_shortest_computation_does():
    held = Iteration("s", (comm("a", 1000), comm("b", 1000), CompOp(name="m", work=MemoryBound(8))))
    times = ProportionalTimes.of(held, {"a": 3.0, "b": 3.0, "m": 0.5})
    assert times.seconds(comm("c", 500)) == pytest.approx(0.5 + 2.5 / 2)


def test_predictions_under_the_scaled_model_are_judged_like_all():
    found = from_trace(OURS, small_step(), ByWork())
    problem = PlanProblem(iteration=small_step(), cluster=load_preset("a40_nvlink"), times=found.times)
    whole_s = sum(found.times.seconds(op) for op in problem.iteration.ops)
    assert predict(problem).overlap.makespan_s == pytest.approx(whole_s, rel=1e-3)
