"""`lagom list KIND`: what a key or a flag takes, with what one chooses by."""

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from inspect import getdoc, getmodule
from types import MappingProxyType
from typing import Final

from lagom_overlap.errors import MissingDependencyError
from lagom_overlap.hardware import load_preset, preset_names
from lagom_overlap.hardware.gpu_file import gpu_names, load_gpu
from lagom_overlap.registry import PLANNERS, TUNERS, entry_point_names, load
from lagom_overlap.results.base import Row
from lagom_overlap.results.listing import ListResult
from lagom_overlap.workload.models import load_model, model_names
from lagom_overlap.workload.step.framework_file import framework_file, framework_names


class Listed(StrEnum):
    """What can be listed."""

    MODELS = "models"
    CLUSTERS = "clusters"
    GPUS = "gpus"
    FRAMEWORKS = "frameworks"
    TUNERS = "tuners"
    PLANNERS = "planners"


def _models() -> Iterator[Row]:
    for name in model_names():
        model = load_model(name)
        yield {
            "name": name,
            "num_params": model.num_params,
            "num_active_params": model.num_active_params,
            "num_layers": model.num_layers,
            "hidden": model.hidden,
            "num_experts": model.num_experts,
        }


def _clusters() -> Iterator[Row]:
    for name in preset_names():
        cluster = load_preset(name)
        yield {
            "name": name,
            "gpu": cluster.gpu.name,
            "gpus_per_node": cluster.gpus_per_node,
            "intra_bytes_per_s": cluster.intra.bytes_per_s,
            "inter_bytes_per_s": cluster.inter.bytes_per_s,
        }


def _gpus() -> Iterator[Row]:
    for name in gpu_names():
        gpu = load_gpu(name)
        yield {
            "name": name,
            "gpu": gpu.name,
            "num_sms": gpu.num_sms,
            "memory_bytes": gpu.memory_bytes,
            "hbm_bytes_per_s": gpu.hbm_bytes_per_s,
            "gemm_flops": gpu.gemm_flops,
        }


def _frameworks() -> Iterator[Row]:
    for name in framework_names():
        file = framework_file(name)
        yield {"name": name, "title": file.title or name, "switches": ", ".join(file.switches)}


def _registered(group: str, noun: str) -> Iterator[Row]:
    """Who is registered, each with the first line of its documentation, or what it lacks here."""
    for name in entry_point_names(group):
        try:
            factory = load(group, noun, name)
        except MissingDependencyError as error:
            what = str(error)
        else:
            module = getmodule(factory)
            what = (getdoc(factory) or (module and getdoc(module)) or "").partition("\n")[0]
        yield {"name": name, "what": what}


_ROWS: Final[Mapping[Listed, tuple[Callable[[], Iterator[Row]], str]]] = MappingProxyType(
    {
        Listed.MODELS: (_models, "In a job file: [model] name = NAME, or a file of shapes of your own (*.toml)."),
        Listed.CLUSTERS: (_clusters, "In a job file: [cluster] preset = NAME, or a file of your own (*.toml)."),
        Listed.GPUS: (_gpus, "In a job file: [cluster] gpu = NAME, or a file of your own (*.toml)."),
        Listed.FRAMEWORKS: (_frameworks, "In a job file: [parallel] framework = NAME."),
        Listed.TUNERS: (lambda: _registered(TUNERS, "tuner"), "lagom tune JOB.toml --tuner NAME"),
        Listed.PLANNERS: (lambda: _registered(PLANNERS, "planner"), "lagom plan JOB.toml --planner NAME"),
    }
)


def run_list(kind: Listed) -> ListResult:
    """All names of a kind."""
    rows, use = _ROWS[kind]
    return ListResult(kind=kind, use=use, rows=tuple(rows()))
