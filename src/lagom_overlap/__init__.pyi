from lagom_overlap.api import analyze as analyze
from lagom_overlap.api import capture as capture
from lagom_overlap.api import compare as compare
from lagom_overlap.api import load as load
from lagom_overlap.api import load_job as load_job
from lagom_overlap.api import overlap_line as overlap_line
from lagom_overlap.api import plan as plan
from lagom_overlap.api import simulate as simulate
from lagom_overlap.api import tune as tune
from lagom_overlap.capturing.fake_tensor import TrainingStep as TrainingStep
from lagom_overlap.engines.fx.inductor_pass import PlanPass as PlanPass
from lagom_overlap.errors import LagomError as LagomError
from lagom_overlap.export.inductor import PlannerDecision as PlannerDecision
from lagom_overlap.export.inductor import plan_compiled_graphs as plan_compiled_graphs
from lagom_overlap.jobfile.spec import JobSpec as JobSpec
from lagom_overlap.nccl_plugin.library import installed_library as installed_library
from lagom_overlap.online.options import OnlineOptions as OnlineOptions
from lagom_overlap.online.tuner import OnlineTuner as OnlineTuner
from lagom_overlap.results.analyze import AnalyzeResult as AnalyzeResult
from lagom_overlap.results.capture import CaptureResult as CaptureResult
from lagom_overlap.results.compare import ComparePlannersResult as ComparePlannersResult
from lagom_overlap.results.compare import CompareResult as CompareResult
from lagom_overlap.results.layouts import LayoutsResult as LayoutsResult
from lagom_overlap.results.plan import PlanResult as PlanResult
from lagom_overlap.results.proof import ProofResult as ProofResult
from lagom_overlap.results.run import RunResult as RunResult
from lagom_overlap.results.simulate import SimulateCaptureResult as SimulateCaptureResult
from lagom_overlap.results.simulate import SimulateResult as SimulateResult
from lagom_overlap.results.tune import TuneResult as TuneResult
from lagom_overlap.verbs.plan_apply import PlanFile as PlanFile
from lagom_overlap.verbs.plan_apply import SettingsRun as SettingsRun
from lagom_overlap.verbs.plan_apply import apply_fsdp2 as apply_fsdp2
from lagom_overlap.verbs.plan_apply import measure_fsdp2 as measure_fsdp2
from lagom_overlap.verbs.plan_apply import planned_step as planned_step
from lagom_overlap.verbs.plan_apply import save_plans as save_plans
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings as Fsdp2Settings

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

__version__: str
