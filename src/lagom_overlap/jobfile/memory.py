"""Whether a job fits its GPUs; where it does not, what of the job's own keys would make it fit, by the same count."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Final

from lagom_overlap.errors import JobError, LagomError
from lagom_overlap.hardware import Gpu
from lagom_overlap.jobfile.step import JobStep
from lagom_overlap.toml_tables import toml_value
from lagom_overlap.units import format_memory, format_percent
from lagom_overlap.workload.layer_kinds import LayerKind, Mixer, Mlp
from lagom_overlap.workload.parallel import ParallelLayout, Recompute
from lagom_overlap.workload.parallel.eager_memory import NUM_JOBS, WORST_ALLOCATED, WORST_RESERVED
from lagom_overlap.workload.parallel.layout_check import check_model
from lagom_overlap.workload.step.rules import Sharding

_MOST_SHOWN: Final = 3
"""Single changes that are named where none is enough."""
_MOST_TOGETHER: Final = 4
"""Changes that are combined before a job is said not to fit."""
_MOST_STAGE: Final = {Sharding.BUCKETS: 1, Sharding.LAYERWISE: 3, Sharding.FSDP2: 3}
"""The furthest ZeRO stage of frameworks that share parameters out that way."""

_COMPARED: Final = ("fsdp2", "ddp", "torchtitan")

_Fields = dict[str, object]
"""Keys of `[parallel]` as the layout has them, with other values."""


def check_memory(job: JobStep) -> None:
    """Refuses a job of which a stage does not fit its GPU; every verb asks this before it says anything of a job.

    Raises:
        JobError: with what the fullest GPU needs, and what would help.
    """
    memories, gpu = job.memories, job.cluster.gpu
    rank = max(range(len(memories)), key=lambda index: memories[index].total_bytes)
    worst = memories[rank]
    if worst.total_bytes > gpu.memory_bytes:
        parts = {
            "parameters": worst.parameter_bytes,
            "gradients": worst.gradient_bytes,
            "optimizer": worst.optimizer_bytes,
            "activations": worst.activation_bytes,
            **({"buffers and temporaries": worst.transient_bytes} if worst.transient_bytes else {}),
        }
        words = ", ".join(f"{name} {format_memory(num_bytes)}" for name, num_bytes in parts.items())
        raise JobError(
            f"parallel: stage {rank} needs {format_memory(worst.total_bytes)} per GPU, {gpu.name} has "
            f"{format_memory(gpu.memory_bytes)} ({words}); {_advice(job, gpu.memory_bytes)}"
        )


def accuracy_note(job: JobStep) -> str:
    """What the count of a job's memory is worth, and what a GPU holds beyond it."""
    if job.rules.eager is None:
        return (
            f"Memory is counted by formulas: what framework {job.rules.name} holds for itself is not in it, and "
            "nothing of it was compared with an allocator."
        )
    fullest = max(job.memories, key=lambda memory: memory.total_bytes)
    reserved, limit = fullest.reserved_bytes, job.cluster.gpu.memory_bytes
    known = (
        f"{format_percent(WORST_ALLOCATED, 0)} and {format_percent(WORST_RESERVED, 0)} are the worst errors on "
        f"{NUM_JOBS} emulated jobs"
        if _is_compared(job)
        else "no job of this kind was compared with its allocator"
    )
    note = (
        f"Memory: PyTorch allocates {format_memory(fullest.total_bytes)} and reserves up to {format_memory(reserved)}; "
        f"{known}. The CUDA context and NCCL's buffers come on top."
    )
    if reserved > limit:
        note += (
            f" {format_memory(limit)} is less than it would reserve: it gives back what it keeps, and waits each time."
        )
    return note


def _is_compared(job: JobStep) -> bool:
    """Whether `benchmarks/memory_accuracy.py` ran jobs of this kind."""
    layout, dense = job.layout, LayerKind(Mixer.ATTENTION, Mlp.MLP)
    return (
        job.rules.name in _COMPARED
        and layout.pipeline == layout.context == 1
        and layout.flash_attention
        and layout.recompute in (Recompute.NONE, Recompute.FULL, Recompute.PRODUCTS)
        and not job.precision.products.is_narrow
        and all(kind == dense for kind in job.model.layer_kinds)
        and not job.model.tied_embeddings
        and (layout.forward_prefetch, layout.backward_prefetch, layout.kept_units, layout.reduce_buffers)
        == (0, 0, 0, 1)
    )


def beyond_note(peak_bytes: int, gpu: Gpu) -> tuple[str, ...]:
    """That a captured step holds more than its GPU has, which is told and not refused; nothing where it fits."""
    more = peak_bytes - gpu.memory_bytes
    return () if more <= 0 else (f"It does not fit: {format_memory(more)} more than {gpu.name} has.",)


def frees_nothing(job: JobStep) -> bool:
    """Whether selective recomputation is asked for and the fullest GPU needs no less for it."""
    if job.layout.recompute is not Recompute.SELECTIVE:
        return False
    without = replace(job.layout, recompute=Recompute.NONE, recompute_modules=())
    return _most(job, job.layout) >= _most(job, without)


def _most(job: JobStep, layout: ParallelLayout) -> int:
    return replace(job, layout=layout).most_bytes


def _advice(job: JobStep, limit: int) -> str:
    def words(changed: _Fields) -> str:
        names = {"data": "fsdp" if job.says_fsdp else "data"}
        kept = {key: value for key, value in changed.items() if getattr(job.layout, key) != value}
        other = replace(job.layout, **changed)  # type: ignore[arg-type]  # keys of the layout with their values
        if not job.says_batch and other.num_micro_batches > 1:  # a file that names no batch would get a smaller one
            kept["global_batch"] = other.global_batch
        return ", ".join(f"{names.get(key, key)} = {toml_value(value)}" for key, value in kept.items())

    alone = [(changed, most) for changed, _, most in _changes(job, job.layout) if most <= limit]
    if alone:
        return "it fits with " + "; or ".join(
            f"{words(each)} ({format_memory(most)})" for each, most in alone[:_MOST_SHOWN]
        )
    taken: _Fields = {}
    layout, least = job.layout, _most(job, job.layout)
    for _ in range(_MOST_TOGETHER):
        best = min(_changes(job, layout), key=lambda change: change[2], default=None)
        if best is None or least <= limit:
            break
        taken, layout, least = {**taken, **best[0]}, best[1], best[2]
    if not taken:
        return "no key of [parallel] lessens that on as many GPUs: use more of them"
    if least <= limit:
        return f"it fits with all of {words(taken)} ({format_memory(least)})"
    return f"with {words(taken)} it is still {format_memory(least)}: use more GPUs too"


def _changes(job: JobStep, layout: ParallelLayout) -> Iterator[tuple[_Fields, ParallelLayout, int]]:
    """Single changes on as many GPUs that are legal and lessen the fullest GPU, the least costly first."""
    before = _most(job, layout)
    for changed in _settings(job, layout):
        try:
            other = replace(layout, **changed)  # type: ignore[arg-type]  # keys of the layout with their values
            check_model(job.model, other, job.seq_len)
            most = _most(job, other)
        except LagomError:
            continue
        if other.zero_stage > job.rules.most_zero_stage(other.pipeline):
            continue
        if other.tensor <= job.cluster.gpus_per_node and most < before:
            yield changed, other, most


def _settings(job: JobStep, layout: ParallelLayout) -> Iterator[_Fields]:
    if layout.micro_batch > 1:
        least = next(part for part in count(2) if layout.micro_batch % part == 0)
        for size in dict.fromkeys((layout.micro_batch // least, 1)):
            yield {"micro_batch": size}
    if not layout.flash_attention:
        yield {"flash_attention": True}
    if layout.tensor > 1 and not layout.sequence_parallel:
        yield {"sequence_parallel": True, "async_tensor": False}
    if layout.replicate > 1:
        yield {"replicate": 1}
    if layout.replicas > 1:
        for stage in range(layout.zero_stage + 1, _MOST_STAGE[job.rules.sharding] + 1):
            yield {"zero_stage": stage}
    if layout.recompute is not Recompute.FULL:
        yield {"recompute": Recompute.FULL, "recompute_modules": ()}
    if layout.data % 2 == 0 and layout.replicate == 1 and not (job.says_fsdp and layout.data == 2):  # no fsdp = 1
        for key in ("tensor", "pipeline") if not job.says_fsdp else ("tensor",):
            yield {key: 2 * getattr(layout, key), "data": layout.data // 2}
