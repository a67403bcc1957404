"""`lagom plan`: what it prints, writes, applies and refuses."""

import json
import os
import signal
import time
import tomllib
from pathlib import Path

import pytest

from lagom_overlap.capturing.file import write_capture
from lagom_overlap.cli import main
from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.errors import BackendError
from lagom_overlap.jobfile import reading, registry
from lagom_overlap.jobfile.reading import read_job
from lagom_overlap.planners.baselines import ProgramOrder
from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.finish import Issue, finished
from lagom_overlap.verbs import compare, plan_problem
from lagom_overlap.workload import CommOp, CompOp, Iteration, MemoryBound
from lagom_overlap.workload.gathers import parameter_gathers
from lagom_overlap.workload.issued import IssuedStep

JOB = """
[job]
name = "small"
[model]
name = "phi-2"
seq_len = 256
[cluster]
preset = "a40_nvlink"
[parallel]
fsdp = 8
framework = "deepspeed"
[plan]
planner = "gathers_first"
"""


class GathersFirst:
    """Issues every parameter gather at once; takes its time if asked, or sends itself a Ctrl-C as it begins."""

    def __init__(self, *, seconds: float = 0.0, is_interrupted: bool = False):
        self._seconds = seconds
        self._is_interrupted = is_interrupted

    def plan(self, problem):
        if self._is_interrupted:
            os.kill(os.getpid(), signal.SIGINT)
        deadline = Deadline(self._seconds)
        while deadline.left_s > 0:
            time.sleep(0.01)
        names = [op.name for op in problem.iteration.ops]
        first = {buffer.maker for buffer in parameter_gathers(problem.iteration)}
        first = {op.name for op in problem.iteration.ops if op.name in first and not op.deps}
        order = [name for name in names if name in first] + [name for name in names if name not in first]
        return finished(problem, "gathers_first", (), Issue(order=tuple(order), streams={}))


@pytest.fixture(autouse=True, scope="module")
def planners():
    with pytest.MonkeyPatch.context() as monkeypatch:
        add_planners(monkeypatch)
        yield


def add_planners(monkeypatch):
    known = {"gathers_first": GathersFirst, "program_order": ProgramOrder}
    real = registry.load

    def load(group, what, name):
        return known[name] if group == registry.PLANNERS and name in known else real(group, what, name)

    monkeypatch.setattr(registry, "load", load)
    monkeypatch.setattr(reading, "load", load)
    names = reading.entry_point_names
    monkeypatch.setattr(reading, "entry_point_names", lambda group: [*known, *names(group)])


def lagom(tmp_path: Path, capsys, text: str, *flags: str) -> tuple[int, str, str]:
    job = tmp_path / "job.toml"
    job.write_text(text, encoding="utf-8")
    code = main(["plan", str(job), *flags])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def made(planners, tmp_path_factory) -> str:
    """The plan file of the job."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "job.toml").write_text(JOB, encoding="utf-8")
    assert main(["plan", str(folder / "job.toml"), "--out", str(folder / "run"), "--json"]) == 0
    return (folder / "run" / "plan.toml").read_text(encoding="utf-8")


def refused(tmp_path, capsys, text, words, *flags):
    code, out, err = lagom(tmp_path, capsys, text, *flags)
    assert code == 2, err
    assert out == ""
    assert err.count("\n") == 1, err
    for word in words:
        assert word in err


def test_json_is_the_stable_object_and_nothing_else(tmp_path, capsys):
    code, out, err = lagom(tmp_path, capsys, JOB, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert list(found) == [
        "tool", "version", "job", "num_ranks", "planner", "carrier", "baseline", "simulation", "num_ops", "num_comms",
        "iteration_s", "exposed_comm_s", "peak_memory_bytes", "is_optimal", "decisions", "solve_s", "times", "fsdp2",
        "megatron", "execution", "advice", "notes", "files",
    ]  # fmt: skip
    assert list(found["iteration_s"]) == ["before", "after", "lower_bound"]
    assert list(found["peak_memory_bytes"]) == ["before", "after", "limit"]
    assert set(found["decisions"][0]) == {
        "comm", "substitution", "groups", "split_dim", "num_chunks", "fused_with", "prefetch", "is_computation",
    }  # fmt: skip
    assert found["iteration_s"]["lower_bound"] <= found["iteration_s"]["after"] <= found["iteration_s"]["before"]


def test_a_pipe_gets_80_columns(tmp_path, capsys):
    _, out, err = lagom(tmp_path, capsys, JOB)
    assert err == ""
    assert max(len(line) for line in out.splitlines() if not line.startswith("Next: ")) <= 80
    assert "longer than any order must take" in " ".join(out.split())


def test_the_folder_holds_the_plan_the_page_and_the_timeline(tmp_path, capsys):
    out = tmp_path / "run"
    code, text, _ = lagom(tmp_path, capsys, JOB, "--out", str(out), "--json")
    assert code == 0
    assert sorted(json.loads(text)["files"]) == sorted(str(path) for path in out.iterdir())
    page = (out / "report.html").read_text()
    assert "Critical path" in page
    assert "http" not in page.split("</style>")[1]
    assert json.loads((out / "timeline.json").read_text())


def test_a_plan_file_gives_the_same_prediction_again(tmp_path, capsys):
    out = tmp_path / "run"
    made = json.loads(lagom(tmp_path, capsys, JOB, "--out", str(out), "--json")[1])
    again = json.loads(lagom(tmp_path, capsys, JOB, "--apply", str(out / "plan.toml"), "--json")[1])
    for key in ("planner", "iteration_s", "exposed_comm_s", "peak_memory_bytes", "decisions"):
        assert again[key] == made[key]


def test_an_edited_plan_is_applied_as_edited(tmp_path, capsys):
    out = tmp_path / "run"
    made = json.loads(lagom(tmp_path, capsys, JOB, "--out", str(out), "--json")[1])
    plan = out / "plan.toml"
    head, _, _ = plan.read_text().partition("[[rewrite]]")  # the order is taken out: the program's own is left
    plan.write_text(head)
    edited = json.loads(lagom(tmp_path, capsys, JOB, "--apply", str(plan), "--json")[1])
    assert made["iteration_s"]["after"] < edited["iteration_s"]["after"] == edited["iteration_s"]["before"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("fsdp = 8", "fsdp = 4", ["is for 8 ranks", "4"]),
        ("seq_len = 256", "seq_len = 512", ["another graph", "all that it names is there, but sizes"]),
        ('"phi-2"', '"llama-2-7b"', ["another graph", "'llama-2-7b-fsdp8' has no operator 'mb0.layer31.residual2_b'"]),
        ('framework = "deepspeed"', 'framework = "fsdp2"', ["another graph", "no operator 'mb0.head.logits_sum'"]),
    ],
)
def test_a_plan_for_another_job_is_refused(tmp_path, capsys, made, *, old, new, words):
    plan = tmp_path / "plan.toml"
    plan.write_text(made)
    refused(tmp_path, capsys, JOB.replace(old, new), words, "--apply", str(plan))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda text: text.replace("version = 2", "version = 9"), ["version 9", "version 2"]),
        (lambda text: text.replace("[plan]", "[plan]\ncolour = 3"), ["no plan", "colour"]),
        (lambda text: text.replace('rewrite = "reorder"', 'rewrite = "shuffle"'), ["no plan", "shuffle"]),
        (lambda text: text + '\n[[rewrite]]\nrewrite = "fuse"\ncomms = ["nobody", "else"]\n', ["nobody"]),
        (lambda text: "x = [", ["no plan"]),
    ],
)
def test_a_broken_plan_file_is_one_line(tmp_path, capsys, made, edit, words):
    plan = tmp_path / "plan.toml"
    plan.write_text(edit(made))
    refused(tmp_path, capsys, JOB, words, "--apply", str(plan))


def test_an_order_against_the_data_flow_is_refused(tmp_path, capsys, made):
    plan = tmp_path / "plan.toml"
    order = tomllib.loads(made)["rewrite"][-1]["order"]
    text = made.replace(f'    "{order[-1]}",\n', "", 1)
    plan.write_text(text.replace("order = [\n", f'order = [\n    "{order[-1]}",\n', 1))
    refused(tmp_path, capsys, JOB, [order[-1]], "--apply", str(plan))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('planner = "gathers_first"', 'planner = "gather_first"', ["'gather_first'"]),
        ('planner = "gathers_first"', 'planner = "program_order"\nmemory_limit = "1 MiB"', ["1048576", "too many"]),
        ('planner = "gathers_first"', "prefetch = -1", ["plan.prefetch is -1"]),
        (
            'planner = "gathers_first"',
            'options = { colour = "red" }\nplanner = "gathers_first"',
            ["'colour'", "seconds"],
        ),
        ('planner = "gathers_first"', 'memory_limit = "much"', ["plan.memory_limit", "much"]),
        ('planner = "gathers_first"', "plannner = 1", ["plan.plannner", "planner"]),
        ("fsdp = 8", "fsdp = 8\ntensor = 3", ["must divide", "heads"]),
    ],
)
def test_a_mistake_in_the_job_file_is_one_line(tmp_path, capsys, old, new, words):
    refused(tmp_path, capsys, JOB.replace(old, new), words)


def test_groups_by_shapes_cannot_be_planned(tmp_path, capsys):
    text = '[job]\nname = "g"\n[[group]]\nname = "a"\nop = [{ name = "m", gemm = [8, 8, 8] }]\n'
    text += '[[group.comm]]\nname = "c"\nkind = "all_gather"\nbytes = 64\n'
    refused(tmp_path, capsys, text, ["[model]", "tune"])


def test_flags_that_contradict_each_other_are_refused(tmp_path, capsys):
    refused(tmp_path, capsys, JOB, ["--execute", "[program]"], "--execute")
    refused(tmp_path, capsys, JOB, ["--planner or --apply"], "--planner", "program_order", "--apply", "x.toml")
    refused(tmp_path, capsys, JOB, ["--cluster"], "--cluster", "a40_nvlink")


def test_a_capture_needs_a_cluster_and_must_be_one(tmp_path, capsys):
    file = tmp_path / "step.json"
    file.write_text("{}")
    assert main(["plan", str(file)]) == 2
    assert "--cluster" in capsys.readouterr().err
    assert main(["plan", str(file), "--cluster", "a40_nvlink"]) == 2
    assert "no capture" in capsys.readouterr().err


@pytest.mark.parametrize(("signum", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_ends_the_search_keeps_its_plan_and_is_the_exit_code(
    tmp_path, capsys, monkeypatch, signum, expected
):
    class Told:
        """A planner that is told to end as soon as it begins; its own deadline is far away."""

        def __init__(self, *given, **how):
            self.planner = registry.make_planner(*given, **how)

        def plan(self, problem):
            signal.raise_signal(signum)
            return self.planner.plan(problem)

    monkeypatch.setattr("lagom_overlap.verbs.plan.make_planner", Told)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the suite was started under
    code, out, _ = lagom(tmp_path, capsys, JOB + "options = { seconds = 600.0 }\n")
    signal.signal(signal.SIGINT, before)
    assert code == expected
    assert "ended by a signal" in out


def test_planners_of_settings_and_of_orders_are_compared_on_one_step(tmp_path, capsys):
    """In a pipeline FSDP2's plan alone is judged by the whole iteration, which no order is a plan of."""
    job = tmp_path / "job.toml"
    job.write_text(
        '[job]\nname = "j"\n[model]\nname = "llama-3.2-1b"\nseq_len = 2048\n[cluster]\npreset = "h100_dgx"\n'
        '[parallel]\nframework = "fsdp2"\nfsdp = 4\npipeline = 2\nmicro_batch = 1\nglobal_batch = 32\n'
    )
    assert main(["compare", str(job), "--planners", "program_order,fsdp2", "--json"]) == 0
    order, settings = json.loads(capsys.readouterr().out)["rows"]
    assert settings["before_s"] == order["before_s"]
    assert settings["after_s"] <= settings["before_s"]


def test_planners_are_compared_in_one_table(tmp_path, capsys):
    job = tmp_path / "job.toml"
    job.write_text(JOB, encoding="utf-8")
    assert main(["compare", str(job), "--planners", "program_order,gathers_first", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["planner"] for row in rows] == ["program_order", "gathers_first"]
    assert rows[1]["after_s"] < rows[0]["after_s"]
    assert rows[0]["lower_bound_s"] == rows[1]["lower_bound_s"]
    assert main(["compare", str(job), "--planners", "program_order,program_order"]) == 2
    assert "named twice" in capsys.readouterr().err
    assert main(["compare", str(job), "--planners", "program_order", "--backend", "gloo"]) == 2
    assert "--backend" in capsys.readouterr().err


def test_a_planner_that_finds_no_plan_does_not_end_the_comparison(tmp_path, capsys):
    job = tmp_path / "job.toml"
    job.write_text(JOB, encoding="utf-8")
    assert main(["compare", str(job), "--planners", "program_order,gathers_first", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    needs, more = (row["peak_memory_bytes"] for row in rows)
    assert needs < more
    job.write_text(f'{JOB}memory_limit = "{needs} B"\n', encoding="utf-8")
    assert main(["compare", str(job), "--planners", "program_order,gathers_first", "--json"]) == 0
    kept, failed = json.loads(capsys.readouterr().out)["rows"]
    assert (kept["failure"], failed["after_s"]) == (None, None)
    assert "bytes too many" in failed["failure"]
    assert main(["compare", str(job), "--planners", "program_order,gathers_first"]) == 0
    assert "gathers_first: memory_limit is" in capsys.readouterr().out
    assert main(["compare", str(job), "--planners", "gathers_first"]) == 2
    assert "no planner found a plan; gathers_first: memory_limit" in capsys.readouterr().err


def test_the_before_of_a_program_order_plan_is_its_after(tmp_path, capsys):
    found = json.loads(lagom(tmp_path, capsys, JOB, "--planner", "program_order", "--json")[1])
    assert found["iteration_s"]["before"] == found["iteration_s"]["after"]
    assert found["decisions"] == []


FSDP2_JOB = JOB.replace('framework = "deepspeed"\n', "").replace('[plan]\nplanner = "gathers_first"\n', "[plan]\n")


def test_the_default_carrier_is_the_jobs_framework_and_its_plan_is_applied_again(tmp_path, capsys):
    out = tmp_path / "run"
    found = json.loads(lagom(tmp_path, capsys, FSDP2_JOB, "--json", "--out", str(out))[1])
    assert (found["carrier"], found["planner"]) == ("fsdp2", "fsdp2")
    assert found["iteration_s"]["after"] < found["iteration_s"]["before"]
    plan = tomllib.loads((out / "plan.toml").read_text())
    assert plan["plan"]["carrier"] == "fsdp2"
    assert plan["fsdp2"]["units"] == found["fsdp2"]["settings"]["units"]
    again = json.loads(lagom(tmp_path, capsys, FSDP2_JOB, "--json", "--apply", str(out / "plan.toml"))[1])
    assert again["iteration_s"]["after"] == found["iteration_s"]["after"]
    _, text, _ = lagom(tmp_path, capsys, FSDP2_JOB, "--apply", str(out / "plan.toml"))
    assert "applied as settings of FSDP2" in " ".join(text.split())
    for_others = out / "plan.toml"
    flags = ("--apply", str(for_others), "--for", "megatron")
    refused(tmp_path, capsys, FSDP2_JOB, ["is for fsdp2", "asks for megatron"], *flags)
    other = FSDP2_JOB.replace("seq_len = 256", "seq_len = 512")
    refused(tmp_path, capsys, other, ["is for another graph", "but sizes"], "--apply", str(for_others))
    other = FSDP2_JOB.replace("phi-2", "llama-2-13b")
    refused(tmp_path, capsys, other, ["of 34 units, this job's has 42; 'layers.32' is"], "--apply", str(for_others))
    refused(
        tmp_path,
        capsys,
        JOB,
        ["a step that FSDP2 issues, this job's 'phi-2-fsdp8' is none"],
        "--apply",
        str(for_others),
    )
    for_others.write_text(for_others.read_text().replace('"layers.3"', '"layer3"'))
    refused(tmp_path, capsys, FSDP2_JOB, ["fsdp2.units are", "layer3", "the step's are"], "--apply", str(for_others))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--for", "megatron"], ["this step is issued by FSDP2", "steps of Megatron-LM"]),
        (["--for", "inductor"], ["no graph holds a collective", "--for fsdp2"]),
        (["--for", "program"], ["[program]", "has none"]),
        (["--for", "fsdp2", "--planner", "program_order"], ["takes settings", "'program_order' rewrites a graph"]),
        (["--for", "program", "--planner", "fsdp2"], ["'fsdp2' chooses settings of fsdp2", "program does not take"]),
    ],
)
def test_what_a_carrier_cannot_carry_is_refused(tmp_path, capsys, flags, words):
    refused(tmp_path, capsys, FSDP2_JOB, words, *flags)


def test_a_plan_that_nobody_runs_says_so(tmp_path, capsys):
    found = json.loads(lagom(tmp_path, capsys, FSDP2_JOB, "--planner", "program_order", "--json")[1])
    assert found["carrier"] is None
    assert "No framework issues this order" in found["notes"][-1]
    assert "--for fsdp2" in found["notes"][-1]


PROGRAM_JOB = """
[job]
name = "program"
backend = "simulated"
ranks = 2
[cluster]
preset = "a40_nvlink"
[program]
script = "mine.py"
[plan]
planner = "program_order"
"""

PROGRAM = """
import torch
from torch import distributed as dist
C10D = torch.ops._c10d_functional
def step():
    def run(x, w):
        n, name = dist.group.WORLD.size(), dist.group.WORLD.group_name
        return (torch.relu(C10D.wait_tensor(C10D.all_gather_into_tensor(x, n, name)) @ w),)
    return run, [torch.zeros(4, 8), torch.zeros(8, 8)]
"""


def compares_with_pytorch() -> str:
    """What a plan for Inductor says, by whether the installed PyTorch has a scheduler that we can ask."""
    from lagom_overlap.engines.fx.torch_overlap import own_scheduler

    try:
        own_scheduler()
    except BackendError as error:
        return f"Not compared with PyTorch's own overlap scheduler: {error}"
    return "own overlap scheduler, given the same times"


@pytest.mark.torch
def test_a_program_is_captured_and_planned(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(PROGRAM)
    code, out, err = lagom(tmp_path, capsys, PROGRAM_JOB, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["num_ops"], found["num_comms"], found["carrier"]) == (3, 1, "program")
    compiled = json.loads(lagom(tmp_path, capsys, PROGRAM_JOB, "--json", "--for", "inductor")[1])
    assert compiled["carrier"] == "inductor"
    assert any(compares_with_pytorch() in note for note in compiled["notes"]), compiled["notes"]


@pytest.mark.torch
def test_only_a_planner_that_nobody_named_is_replaced_by_pytorchs_scheduler(tmp_path, capsys, monkeypatch):
    if "Not compared" in compares_with_pytorch():
        pytest.skip("this PyTorch's overlap scheduler takes other arguments")
    example = Path(__file__).parents[2] / "examples" / "plan_zero.py"
    (tmp_path / "mine.py").write_text(example.read_text())
    unnamed = PROGRAM_JOB.replace('planner = "program_order"\n', "work = 1\n")

    def planned(text, *args):
        return json.loads(lagom(tmp_path, capsys, text, "--json", "--for", "inductor", *args)[1])

    # The program's own order, written plainly, is much longer than PyTorch's.
    for named in (planned(PROGRAM_JOB), planned(unnamed, "--planner", "program_order")):
        assert named["planner"] == "program_order"
        assert any("own overlap scheduler, given the same times" in note for note in named["notes"])
    monkeypatch.setattr("lagom_overlap.verbs.plan.MIN_GAIN", -1.0)
    replaced = planned(unnamed)
    assert replaced["planner"] == "torch_overlap"
    assert any("less than with planner ours" in note for note in replaced["notes"])


FSDP2_PROGRAM = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from lagom_overlap import TrainingStep
def model():
    made = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in made:
        fully_shard(block, mesh=mesh)
    return fully_shard(made, mesh=mesh)
def step() -> TrainingStep:
    return TrainingStep(model=model(), inputs=(torch.randn(4, 64),), loss=lambda out: out.sum())
def unsharded() -> TrainingStep:
    return TrainingStep(model=nn.Linear(64, 64), inputs=(torch.randn(4, 64),), loss=lambda out: out.sum())
def traced():
    made = model()
    return lambda x: (made(x),), [torch.zeros(4, 64)]
"""


@pytest.mark.torch
def test_an_fsdp2_module_is_planned_as_a_program_by_its_settings(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(FSDP2_PROGRAM)
    text = PROGRAM_JOB.replace('planner = "program_order"\n', "")
    code, out, err = lagom(tmp_path, capsys, text, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["carrier"], found["planner"], found["baseline"]) == ("fsdp2", "fsdp2", "FSDP2's own order")
    refused(tmp_path, capsys, text, ["no graph holds a collective"], "--for", "inductor")
    on_ranks = text.replace('"simulated"', '"gloo"').replace('"mine.py"', '"mine.py"\nfunction = "unsharded"')
    refused(tmp_path, capsys, on_ranks, ["TrainingStep that FSDP2 does not issue", 'backend = "simulated"'])
    traced = text.replace('script = "mine.py"', 'script = "mine.py"\nfunction = "traced"')
    refused(
        tmp_path,
        capsys,
        traced,
        ["runs its collectives in", "hooks (FSDP2, DDP)", "let traced() return a TrainingStep"],
    )


@pytest.mark.torch
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("", None, ["mine.py", "does not exist"]),
        ("def step", "def steps", ["no function 'step'"]),
        ("import torch", "import torch\n1 / 0", ["ZeroDivisionError"]),
        ("import torch", "import torch\nraise SystemExit(0)", ["SystemExit"]),
        ("return run, [", "return run; [", ["must return (step, inputs)"]),
        ("torch.relu(", "torch.relu(x.item() * ", ["mine.py", "cannot be traced"]),
    ],
)
def test_a_program_that_does_not_work_is_one_line(tmp_path, capsys, old, new, words):
    if new is not None:
        (tmp_path / "mine.py").write_text(PROGRAM.replace(old, new, 1))
    refused(tmp_path, capsys, PROGRAM_JOB, words)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("ranks", "words"),
    [(2, ["'plan.toml' is for another graph", "all that it names is there"]), (4, ["is for 2 ranks, this job has 4"])],
)
def test_a_foreign_plan_is_refused_before_ranks_are_started(tmp_path, capsys, monkeypatch, ranks, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan_problem, "ProgramRanks", lambda *_, **__: pytest.fail("ranks were started"))
    (tmp_path / "mine.py").write_text(PROGRAM)
    lagom(tmp_path, capsys, PROGRAM_JOB, "--out", "made")
    (tmp_path / "made" / "plan.toml").rename("plan.toml")
    (tmp_path / "mine.py").write_text(PROGRAM.replace("torch.relu(", "torch.sigmoid("))
    text = PROGRAM_JOB.replace('"simulated"', '"gloo"').replace("ranks = 2", f"ranks = {ranks}")
    refused(tmp_path, capsys, text, words, "--apply", "plan.toml", "--execute")


@pytest.mark.torch
def test_a_program_cannot_be_tuned(tmp_path, capsys):
    job = tmp_path / "job.toml"
    job.write_text(PROGRAM_JOB, encoding="utf-8")
    assert main(["tune", str(job)]) == 2
    assert "[program] is read by `lagom plan` only" in capsys.readouterr().err


def test_what_is_wrong_whatever_the_step_is_refused_before_it_is_read(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("raise SystemExit('this script must not run')")
    refused(tmp_path, capsys, PROGRAM_JOB, ["unknown planner 'nobody'"], "--planner", "nobody")
    refused(tmp_path, capsys, PROGRAM_JOB, ["'none.toml' does not exist"], "--apply", "none.toml")
    assert main(["compare", str(tmp_path / "job.toml"), "--planners", "program_order,nobody"]) == 2
    assert "unknown planner 'nobody'" in capsys.readouterr().err


def a_capture(tmp_path, *ops):
    capture = IssuedStep(iteration=Iteration("odd", ops, is_dataflow=True), num_ranks=2, groups={"fsdp": (0, 1)})
    write_capture(tmp_path / "odd.json", capture)
    return str(tmp_path / "odd.json")


def test_a_step_without_operators_is_refused(tmp_path, capsys):
    assert main(["plan", a_capture(tmp_path), "--cluster", "a40_nvlink"]) == 2
    assert capsys.readouterr().err == "lagom plan: step 'odd' has no operators: there is nothing to plan\n"


def interrupt_at(monkeypatch, number):
    """Ctrl-C while this many planners have been asked."""
    asked = []

    def stopped(real, *arguments, **more):
        asked.append(arguments)
        if len(asked) == number:
            raise KeyboardInterrupt
        return real(*arguments, **more)

    real = compare.planned
    monkeypatch.setattr(compare, "planned", lambda *arguments, **more: stopped(real, *arguments, **more))


def test_an_interrupted_comparison_of_planners_keeps_those_that_were_done(tmp_path, capsys, monkeypatch):
    job, out = tmp_path / "job.toml", tmp_path / "run"
    job.write_text(JOB, encoding="utf-8")
    interrupt_at(monkeypatch, 2)
    code = main(["compare", str(job), "--planners", "program_order,gathers_first", "--json", "--out", str(out)])
    captured = capsys.readouterr()
    assert (code, captured.err) == (130, "lagom compare: interrupted; 1 of 2 were done and are kept\n")
    kept = json.loads((out / "compare.json").read_text())
    assert kept == json.loads(captured.out)
    assert kept["interrupted"] is True
    assert [row["planner"] for row in kept["rows"]] == ["program_order"]


def test_a_comparison_interrupted_before_the_first_planner_was_done_keeps_nothing(tmp_path, capsys, monkeypatch):
    job, out = tmp_path / "job.toml", tmp_path / "run"
    job.write_text(JOB, encoding="utf-8")
    interrupt_at(monkeypatch, 1)
    assert main(["compare", str(job), "--planners", "program_order", "--out", str(out)]) == 130
    assert capsys.readouterr() == ("", "lagom compare: interrupted\n")
    assert not out.exists()


def test_a_planner_that_ctrl_c_cut_short_is_not_compared(tmp_path, capsys):
    job = tmp_path / "job.toml"
    job.write_text(JOB + "options = { seconds = 1e6, is_interrupted = true }\n", encoding="utf-8")
    code = main(["compare", str(job), "--planners", "program_order,gathers_first", "--json"])
    assert code == 130
    assert [row["planner"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["program_order"]


def test_planners_are_compared_on_a_capture(tmp_path, capsys):
    file = a_capture(tmp_path, CompOp(name="a", work=MemoryBound(64)))
    assert main(["compare", file, "--cluster", "a40_nvlink", "--planners", "program_order", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"] == "odd"
    assert main(["compare", file, "--planners", "program_order"]) == 2
    assert "give --cluster NAME" in capsys.readouterr().err
    assert main(["compare", file, "--cluster", "a40_nvlink"]) == 2
    assert "--cluster goes with --planners" in capsys.readouterr().err


def test_a_capture_with_a_collective_whose_result_nobody_reads_is_planned(tmp_path, capsys):
    ops = (
        CompOp(name="a", work=MemoryBound(64)),
        CommOp(name="lost", collective=Collective(CollectiveKind.ALL_GATHER, 64, 2), communicator="fsdp"),
    )
    path = a_capture(tmp_path, *ops)
    for planner in ("program_order", "ours", "centauri", "concerto"):
        given = ["plan", path, "--cluster", "a40_nvlink", "--planner", planner, "--work", "0.1"]
        assert main(given) == 0, capsys.readouterr().err


EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("plan_*.toml"))


@pytest.mark.torch
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_example_programs_are_captured_and_hold_their_collectives(path):
    from lagom_overlap.capturing.fake_tensor import capture_step
    from lagom_overlap.capturing.fake_world import fake_world
    from lagom_overlap.engines.fx.program import TrainingStepError, load_program

    spec = read_job(path)
    try:
        with fake_world(spec.job.ranks):
            loaded = load_program(Path(spec.program.script), spec.program.function)
            iteration = loaded.captured("example").iteration
        assert all(op.shards is not None for op in iteration.comms)
    except TrainingStepError as error:
        iteration = capture_step(error.build, num_ranks=spec.job.ranks).iteration
    assert iteration.is_dataflow
    assert len(iteration.comms) >= 14
