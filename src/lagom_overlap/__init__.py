"""lagom-overlap: give each collective just enough of the machine. What type checkers see is in `__init__.pyi`."""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "api": ("analyze", "capture", "compare", "load", "load_job", "overlap_line", "plan", "simulate", "tune"),
    "online.options": ("OnlineOptions",),
    "online.tuner": ("OnlineTuner",),
    "results.analyze": ("AnalyzeResult",),
    "results.capture": ("CaptureResult",),
    "results.compare": ("ComparePlannersResult", "CompareResult"),
    "results.layouts": ("LayoutsResult",),
    "results.plan": ("PlanResult",),
    "results.proof": ("ProofResult",),
    "results.run": ("RunResult",),
    "results.simulate": ("SimulateCaptureResult", "SimulateResult"),
    "results.tune": ("TuneResult",),
    "jobfile.spec": ("JobSpec",),
    "errors": ("LagomError",),
    "capturing.fake_tensor": ("TrainingStep",),
    "workload.fsdp2.settings": ("Fsdp2Settings",),
    "engines.fx.inductor_pass": ("PlanPass",),
    "export.inductor": ("PlannerDecision", "plan_compiled_graphs"),
    "nccl_plugin.library": ("installed_library",),
    "verbs.plan_apply": ("PlanFile", "SettingsRun", "apply_fsdp2", "measure_fsdp2", "planned_step", "save_plans"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AnalyzeResult",
    "CaptureResult",
    "ComparePlannersResult",
    "CompareResult",
    "Fsdp2Settings",
    "JobSpec",
    "LagomError",
    "LayoutsResult",
    "OnlineOptions",
    "OnlineTuner",
    "PlanFile",
    "PlanPass",
    "PlanResult",
    "PlannerDecision",
    "ProofResult",
    "RunResult",
    "SettingsRun",
    "SimulateCaptureResult",
    "SimulateResult",
    "TrainingStep",
    "TuneResult",
    "__version__",
    "analyze",
    "apply_fsdp2",
    "capture",
    "compare",
    "installed_library",
    "load",
    "load_job",
    "measure_fsdp2",
    "overlap_line",
    "plan",
    "plan_compiled_graphs",
    "planned_step",
    "save_plans",
    "simulate",
    "tune",
]


def __getattr__(name: str) -> object:
    """A public name on first use: importing the package imports neither torch nor numpy nor a layer of it."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    attribute = getattr(import_module(f"lagom_overlap.{_HOME_OF[name]}"), name)
    globals()[name] = attribute
    return attribute


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
