"""Which part of the model a pipeline stage holds: its layers, the embedding on the first, the head on the last."""

from dataclasses import dataclass

from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel.layout import ParallelLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """A pipeline stage: its layers, whether it begins with the embedding and ends with the head, parameters.

    `layers_per_chunk` are those of its largest chunk, `num_layers` those of all its chunks.
    `num_params` and `num_expert_params` are per GPU; the latter are part of the former and are reduced over data /
    expert ranks only. `layer_share` is the layers' share of the parameters, the rest are tables. `tied_params` are
    embedding gradients summed between first and last stage.
    """

    rank: int
    layers_per_chunk: int
    num_layers: int
    has_embedding: bool
    has_head: bool
    num_params: int
    num_expert_params: int
    tied_params: int
    layer_share: float

    def shard_params(self, layout: ParallelLayout) -> int:
        """Parameters per GPU when they are sharded: dense ones over a layout's `shard`, experts over data / expert."""
        dense = self.num_params - self.num_expert_params
        return dense // layout.shard + self.num_expert_params * layout.expert // layout.replicas


def chunk_layers(model: TransformerModel, layout: ParallelLayout) -> tuple[range, ...]:
    """The layers of every model chunk, of a layout that `check_model` has accepted."""
    fewer = 1 if layout.tables_as_layers else 0
    each, last = (model.num_layers + 2 * fewer) // layout.num_chunks, layout.num_chunks - 1
    starts = [max(0, place * each - fewer) for place in range(layout.num_chunks)]
    return tuple(
        range(start, model.num_layers if place == last else starts[place + 1]) for place, start in enumerate(starts)
    )


def layer_params_per_gpu(model: TransformerModel, layout: ParallelLayout) -> int:
    """Parameters of one layer on one GPU: matrices cut by tensor parallelism, experts by expert parallelism too."""
    dense = (model.layer_matrix_params - model.expert_layer_params) // layout.tensor
    return expert_params_per_gpu(model, layout) + dense + model.layer_params - model.layer_matrix_params


def expert_params_per_gpu(model: TransformerModel, layout: ParallelLayout) -> int:
    """Parameters of one layer's experts on one GPU."""
    return model.expert_layer_params // (layout.tensor * layout.expert)


def plan_stages(model: TransformerModel, layout: ParallelLayout) -> tuple[StagePlan, ...]:
    """The stages of a layout that `check_model` has accepted."""
    chunks = chunk_layers(model, layout)
    layer = layer_params_per_gpu(model, layout)
    experts = expert_params_per_gpu(model, layout)
    table = model.vocab * model.hidden // layout.tensor
    stages = []
    for rank in range(layout.pipeline):
        first, last = rank == 0, rank == layout.pipeline - 1
        sizes = [len(layers) for layers in chunks[rank :: layout.pipeline]]
        num_layers = sum(sizes)
        params = num_layers * layer
        params += (table + model.learned_positions * model.hidden) * first
        params += (0 if model.tied_embeddings and first else table) * last
        tied = table if model.tied_embeddings and layout.pipeline > 1 and (first or last) else 0
        stages.append(
            StagePlan(
                rank=rank,
                layers_per_chunk=max(sizes),
                num_layers=num_layers,
                has_embedding=first,
                has_head=last,
                num_params=params,
                num_expert_params=num_layers * experts,
                tied_params=tied,
                layer_share=num_layers * layer / params,
            )
        )
    return tuple(stages)
