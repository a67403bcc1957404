"""The public API, frozen: a change here is a change for every user, and needs a line in CHANGELOG.md."""

import ast
import inspect
import json
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

import pytest

import lagom_overlap
from lagom_overlap.results.base import Result

SIGNATURES = {
    "load": "(run)",
    "load_job": "(path)",
    "tune": "(job=None, *, from_trace=None, tuner=None, backend=None, seed=None, warm_start=None, bundle=None, "
    "out=None)",
    "compare": "(job, *, tuners=None, planners=None, backend=None, seed=None, warm_start=None, bundle=None, "
    "cluster=None, times=None)",
    "plan": "(job, *, planner=None, carrier=None, cluster=None, times=None, work=None, apply=None, execute=False, "
    "out=None)",
    "simulate": "(job, *, out=None)",
    "analyze": "(traces, *, against=None, compat=None, pattern=None, anonymise=False, num_jobs=1, out=None)",
    "overlap_line": "(profiler, keep=None)",
    "capture": "(target, *, num_ranks=None, rank=0, parallel=None, seq_len=None, micro_batch=None, out=None)",
}
RESULTS = (
    "AnalyzeResult", "CaptureResult", "ComparePlannersResult", "CompareResult", "LayoutsResult", "PlanResult",
    "ProofResult", "RunResult", "SimulateCaptureResult", "SimulateResult", "TuneResult",
)  # fmt: skip
NEED_TORCH = (
    "Fsdp2Settings", "PlanFile", "PlanPass", "PlannerDecision", "TrainingStep", "plan_compiled_graphs", "planned_step",
    "save_plans", "apply_fsdp2", "measure_fsdp2", "SettingsRun", "OnlineTuner",
)  # fmt: skip
OTHERS = ("JobSpec", "LagomError", "OnlineOptions", "__version__", "installed_library")
EXAMPLES = Path(__file__).parents[1] / "examples"


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


FORKS = """
import json, os, sys
import msgspec, numpy, plotly.graph_objects, plotly.subplots, rich.table, tomli_w  # of others: a child imports ours
assert not [name for name in sys.modules if name.startswith("lagom_overlap.")]
for code in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, code
"""


def test_the_public_names_are_these():
    assert set(lagom_overlap.__all__) == {*SIGNATURES, *RESULTS, *NEED_TORCH, *OTHERS}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signatures_are_these(name):
    signature = inspect.signature(getattr(lagom_overlap, name))
    bare = [held.replace(annotation=inspect.Parameter.empty) for held in signature.parameters.values()]
    shown = signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    assert str(shown) == SIGNATURES[name]
    assert all(held.annotation is not inspect.Parameter.empty for held in signature.parameters.values())


def test_what_type_checkers_see_is_what_the_package_promises():
    stub = ast.parse(Path(lagom_overlap.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imported = {
        alias.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert {*imported, "__version__"} == set(lagom_overlap.__all__)
    assert imported == {name: f"lagom_overlap.{home}" for name, home in lagom_overlap._HOME_OF.items()}
    assert Path(lagom_overlap.__file__).with_name("py.typed").exists()


@pytest.mark.torch
@pytest.mark.parametrize("name", NEED_TORCH)
def test_what_needs_torch_is_there(name):
    pytest.importorskip("torch")
    assert getattr(lagom_overlap, name)


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_has_summary_table_and_json_and_hides_nothing_but_what_figures_need(name):
    result = getattr(lagom_overlap, name)
    assert issubclass(result, Result)
    assert not [field.name for field in fields(result) if field.name.startswith("_")]
    for method in ("summary", "table", "to_frame", "to_json", "to_dict", "_repr_html_"):
        assert callable(getattr(result, method))


def test_importing_the_package_imports_nothing_of_it():
    code = "import sys, lagom_overlap; dir(lagom_overlap); print([m for m in sys.modules if m.startswith({!r})])"
    for name in ("lagom_overlap.", "torch", "numpy", "msgspec", "plotly"):
        assert run(code.format(name)) == "[]", name


def test_no_module_of_the_package_has_the_name_of_something_public():
    """The import of such a module would put it in the other's place."""
    found = {path.stem for path in Path(lagom_overlap.__file__).parent.iterdir()}
    assert found & set(lagom_overlap.__all__) == set()
    assert "verbs" in found


@pytest.mark.timeout(120)
def test_no_module_shadows_a_function_in_either_order_of_import():
    pairs = [("tune", "verbs.tune"), ("plan", "planners.base")]
    codes = []
    for name, module in pairs:
        lines = [f"import lagom_overlap.{module}", f"lagom_overlap.{name}"]
        for order in (lines, lines[::-1]):
            said = f"print({name!r}, {module!r}, type(lagom_overlap.{name}).__name__)"
            codes.append("; ".join(["import lagom_overlap", *order, said]))
    done = subprocess.run([sys.executable, "-c", FORKS, json.dumps(codes)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name} {module} function" for name, module in pairs for _ in range(2)]


def test_functions_take_a_path_or_a_job_and_give_what_the_command_prints(tmp_path, capsys):
    from lagom_overlap.cli import main

    path = EXAMPLES / "gpt_175b_3d_a100.toml"
    result = lagom_overlap.simulate(str(path))
    assert result == lagom_overlap.simulate(lagom_overlap.load_job(path))
    assert main(["simulate", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == result.to_dict() == json.loads(result.to_json())
    assert result.summary().startswith(f"{result.job}: ")
    assert len(result.table()) == len(result.stages)
    assert result.figure().data
    assert result.files == ()


def test_a_plan_is_made_of_a_job_in_memory(tmp_path):
    job = lagom_overlap.load_job(EXAMPLES / "phi2_fsdp_a40.toml")
    result = lagom_overlap.plan(job, planner="program_order", out=tmp_path / "plan")
    assert {path.name for path in result.files} == {path.name for path in (tmp_path / "plan").iterdir()}
    assert result.planner == "program_order"
    assert result.step.timelines.keys() == {"before", "after"}
    assert "program_order" in result.summary()
    compared = lagom_overlap.compare(job, planners=["program_order"])
    assert compared.rows[0].before_s == result.iteration_s.before


def test_words_that_do_not_go_together_are_refused():
    job = EXAMPLES / "phi2_fsdp_a40.toml"
    with pytest.raises(TypeError, match="planners"):
        lagom_overlap.compare(job, times="model")
    with pytest.raises(TypeError, match="tuners"):
        lagom_overlap.compare(job, tuners=["lagom"], planners=["ours"])
    with pytest.raises(lagom_overlap.LagomError, match="give a job file"):
        lagom_overlap.tune()


@pytest.mark.torch
def test_a_function_is_captured_and_its_capture_planned():
    torch = pytest.importorskip("torch")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def step():
        mesh = init_device_mesh("cpu", (2,))
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return lagom_overlap.TrainingStep(model=model, inputs=(torch.randn(8, 64),), loss=torch.Tensor.sum)

    found = lagom_overlap.capture(step, num_ranks=2)
    assert (found.name, found.num_ranks, found.files) == ("step", 2, ())
    assert found.num_comms == len(found.capture.iteration.comms) > 0
    planned = lagom_overlap.plan(found, cluster="a40_nvlink", planner="program_order")
    assert planned.num_comms == found.num_comms


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'nope'"):
        _ = lagom_overlap.nope


def test_a_public_class_has_one_home() -> None:
    """A name that two modules give to different things is read wrong in one of them."""
    homes = defaultdict(list)
    root = Path(__file__).parents[1]
    for path in [*(root / "src").rglob("*.py"), *(root / "emulate" / "src").rglob("*.py")]:
        for name in re.findall(r"^class ([A-Za-z]\w*)", path.read_text(encoding="utf-8"), re.MULTILINE):
            homes[name].append(str(path.relative_to(root)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}
    assert len(homes) > 100
