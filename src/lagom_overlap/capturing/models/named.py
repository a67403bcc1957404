"""Models by name: a training step on any number of ranks, captured without weights or downloads."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812  torch's customary name
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from lagom_overlap.capturing.captured_stages import CapturedStage, pipelined
from lagom_overlap.capturing.fake_tensor import TrainingStep, capture_step
from lagom_overlap.capturing.models.decoder import Decoder
from lagom_overlap.capturing.models.degrees import Degrees
from lagom_overlap.capturing.models.parallelize import (
    apply_data,
    apply_tensor,
    data_mesh,
    decoder_units,
    default_dtype,
    optimizers_of,
    spread_experts,
)
from lagom_overlap.errors import JobError, UnknownNameError
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.models import TransformerModel, load_model, model_names
from lagom_overlap.workload.parallel import ParallelLayout, PipelineSchedule, stage_slots

MODELS: Final = "lagom_overlap.models"
"""Entry points of `RegisteredModel`s, by the model's name."""
HUGGING_FACE = "hf:"


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A model that is no decoder: `step` builds its training step as `named_step` does.

    `world_name` is what the group of all its ranks is called (None: by what the model does with them).
    """

    step: Callable[..., Callable[[], TrainingStep]]
    world_name: str | None = None


def registered_model(name: str) -> RegisteredModel | None:
    """The model that is registered under that name, if one is."""
    for entry in metadata.entry_points(group=MODELS, name=name):
        model: RegisteredModel = entry.load()
        return model
    return None


def check_decoder(model: TransformerModel, degrees: Degrees, *, seq_len: int) -> None:
    """Refuses degrees that do not divide the model.

    Raises:
        JobError: naming the degree, its value and what it must divide.
    """
    if degrees.axial > 1:
        raise JobError(f"parallel: axial is for the Evoformer; model {model.name!r} has no pair representation")
    others = sorted({str(kind) for kind in model.kind_counts} - {"attention+mlp", "attention+experts"})
    if others or len(model.kind_counts) > 1:
        what = f"layers of kind {others[0]!r}" if others else "layers of several kinds"
        raise JobError(
            f"model {model.name!r} has {what}: captured are attention with MLPs or mixtures, "
            f"and what transformers has ({HUGGING_FACE}NAME)"
        )
    tensor = degrees.tensor
    if tensor > 1:
        if model.num_experts:
            raise JobError(f"parallel: tensor is not captured for a mixture of experts; {model.name!r} is one")
        for what in ("num_heads", "num_kv_heads", "ffn", "vocab"):
            if getattr(model, what) % tensor:
                raise JobError(f"parallel: tensor is {tensor}, must divide {what} = {getattr(model, what)}")
        if degrees.sequence and seq_len % tensor:
            raise JobError(f"parallel: tensor is {tensor}, must divide seq_len = {seq_len}")
    if degrees.expert > 1:
        if not model.num_experts:
            raise JobError(f"parallel: expert is {degrees.expert}, but model {model.name!r} has no experts")
        if model.num_experts % degrees.expert:
            raise JobError(f"parallel: expert is {degrees.expert}, must divide the model's {model.num_experts} experts")


def decoder_step(
    model: TransformerModel, degrees: Degrees, *, micro_batch: int, seq_len: int, num_micro_batches: int = 1
) -> TrainingStep:
    """The training step of a decoder by its shapes; called in a fake world."""
    data, tensor = data_mesh(degrees)
    with default_dtype(torch.float32 if data is not None else torch.bfloat16):
        decoder = Decoder(model)
    if tensor is not None:
        apply_tensor(decoder, tensor, sequence=degrees.sequence)
    alone = spread_experts(decoder, degrees)
    apply_data(decoder, decoder_units(decoder, tied=model.tied_embeddings), data, degrees, alone)
    ids = torch.zeros(micro_batch, seq_len, dtype=torch.int64)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())

    return TrainingStep(
        model=decoder,
        inputs=(ids,),
        loss=loss,
        optimizers=optimizers_of(decoder),
        num_micro_batches=num_micro_batches,
        context=nullcontext if tensor is None else loss_parallel,
    )


def _stage_step(
    model: TransformerModel, degrees: Degrees, chunk: int, num_chunks: int, *, micro_batch: int, seq_len: int, rank: int
) -> TrainingStep:
    """One model chunk of a pipeline stage; ranks are pipeline x tensor."""
    mesh = init_device_mesh("cpu", (degrees.pipeline, degrees.tensor), mesh_dim_names=("pp", "tp"))
    place, total = chunk * degrees.pipeline + rank // degrees.tensor, num_chunks * degrees.pipeline
    per_chunk = model.num_layers // total
    first, last = place == 0, place == total - 1

    def neighbour(step: int) -> int:
        return (rank + step * degrees.tensor) % degrees.num_ranks

    with default_dtype(torch.bfloat16):
        layers = range(place * per_chunk, (place + 1) * per_chunk)
        body = Decoder(model, layers, has_embedding=first, has_head=last)
        share = degrees.tensor if degrees.tensor > 1 and degrees.sequence else 1
        like = torch.empty(micro_batch, seq_len // share, model.hidden, requires_grad=True)
    if degrees.tensor > 1:
        apply_tensor(body, mesh["tp"], sequence=degrees.sequence)
    ids = torch.zeros(micro_batch, seq_len, dtype=torch.int64)
    stage = CapturedStage(
        body,
        mesh["pp"].get_group(),
        source=None if first else neighbour(-1),
        target=None if last else neighbour(1),
        like=like,
    )

    def loss(value: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(value.flatten(0, 1).float(), ids.flatten()) if last else value

    return TrainingStep(
        model=stage,
        inputs=(ids,),
        loss=loss,
        optimizers=optimizers_of(stage),
        context=loss_parallel if degrees.tensor > 1 and last else nullcontext,
    )


def _capture_pipeline(
    model: TransformerModel, degrees: Degrees, layout: ParallelLayout, *, seq_len: int, rank: int
) -> IssuedStep:
    if model.num_layers % layout.num_chunks:
        raise JobError(
            f"parallel: pipeline x chunks is {layout.num_chunks}, must divide the model's {model.num_layers} layers"
        )

    def captured(chunk: int) -> IssuedStep:
        return capture_step(
            lambda: _stage_step(
                model, degrees, chunk, layout.chunks, micro_batch=layout.micro_batch, seq_len=seq_len, rank=rank
            ),
            num_ranks=degrees.num_ranks,
            rank=rank,
            world_name="pp",
        )

    chunks = [captured(chunk) for chunk in range(layout.chunks)]
    slots = stage_slots(layout, rank // degrees.tensor)
    return pipelined(chunks, slots, name=f"{model.name}-pipeline{degrees.pipeline}")


def captured_names() -> list[str]:
    """The names of our own modules; `hf:` names are listed by `models.hugging_face`."""
    return sorted([*model_names(), *(entry.name for entry in metadata.entry_points(group=MODELS))])


def _words(options: Mapping[str, int | str]) -> str:
    shown = ("replicate", "fsdp", "tensor", "expert", "pipeline", "axial")
    return "".join(f"-{key}{options[key]}" for key in shown if options.get(key, 1) != 1)


def capture_named(
    name: str, options: Mapping[str, int | str], *, micro_batch: int, seq_len: int, rank: int = 0
) -> IssuedStep:
    """Captures one step of a named model.

    `options` are the degrees (`Degrees`), `micro_batches` per step, and a pipeline's `schedule` and `chunks`.
    `seq_len` is the number of residues of the Evoformer and is not used by vision models.

    Raises:
        UnknownNameError: if there is no such model.
        JobError: if it cannot be parallelised so.
    """
    numbers = {key: int(value) for key, value in options.items() if key not in ("schedule", "sequence")}
    micro_batches, num_chunks = numbers.pop("micro_batches", 1), numbers.pop("chunks", 1)
    degrees = Degrees(**numbers, sequence=bool(options.get("sequence", 1)))
    if not 0 <= rank < degrees.num_ranks:
        raise JobError(f"rank is {rank}, must be 0 to {degrees.num_ranks - 1}")
    if micro_batches < 1:
        raise JobError(f"parallel: micro_batches is {micro_batches}, must be at least 1")
    title = name + _words(options)
    if degrees.pipeline > 1 and name in model_names():
        model = load_model(name)
        check_decoder(model, degrees, seq_len=seq_len)
        layout = _layout(options, degrees, micro_batch, micro_batches, num_chunks)
        return _capture_pipeline(model, degrees, layout, seq_len=seq_len, rank=rank)
    build = named_step(name, degrees, micro_batch=micro_batch, seq_len=seq_len, num_micro_batches=micro_batches)
    registered = registered_model(name)
    world_name = None if registered is None else registered.world_name
    return capture_step(build, num_ranks=degrees.num_ranks, rank=rank, name=title, world_name=world_name)


def named_step(
    name: str, degrees: Degrees, *, micro_batch: int, seq_len: int, num_micro_batches: int = 1
) -> Callable[[], TrainingStep]:
    """What builds the training step of a named model, in a fake world of as many ranks as the degrees say.

    Raises:
        UnknownNameError: if there is no such model.
        JobError: if it cannot be parallelised so.
    """
    if name.startswith(HUGGING_FACE):
        hugging_face = import_module("lagom_overlap.capturing.models.hugging_face")
        build: Callable[[], TrainingStep] = hugging_face.hugging_face_step(
            name, degrees, micro_batch=micro_batch, seq_len=seq_len, num_micro_batches=num_micro_batches
        )
        return build
    if (registered := registered_model(name)) is not None:
        return registered.step(
            name, degrees, micro_batch=micro_batch, seq_len=seq_len, num_micro_batches=num_micro_batches
        )
    if name not in model_names():
        raise UnknownNameError.among("model", name, [*captured_names(), "hf:llama-3-8b"])
    model = load_model(name)
    check_decoder(model, degrees, seq_len=seq_len)
    return partial(
        decoder_step, model, degrees, micro_batch=micro_batch, seq_len=seq_len, num_micro_batches=num_micro_batches
    )


def _layout(
    options: Mapping[str, int | str], degrees: Degrees, micro_batch: int, micro_batches: int, num_chunks: int
) -> ParallelLayout:
    schedule = str(options.get("schedule", PipelineSchedule.ONE_F_ONE_B))
    if schedule not in list(PipelineSchedule):
        raise JobError(f"parallel: schedule is {schedule!r}; allowed: {', '.join(PipelineSchedule)}")
    return ParallelLayout(
        tensor=degrees.tensor,
        pipeline=degrees.pipeline,
        micro_batch=micro_batch,
        global_batch=micro_batch * micro_batches,
        schedule=PipelineSchedule(schedule),
        chunks=num_chunks,
    )
