"""Whether a layout fits a model and a cluster: what is cut must divide, and what is asked for must be modelled."""

from collections.abc import Iterator

from lagom_overlap.errors import JobError
from lagom_overlap.hardware import Cluster
from lagom_overlap.workload.layer_kinds import Mixer, Mlp
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel.layout import (
    MAX_ZERO_STAGE,
    Dispatcher,
    GraphModule,
    ParallelLayout,
    Recompute,
    RecomputeModule,
)
from lagom_overlap.workload.parallel.pipeline_layout import parse_pipeline_layout


def check_layout(model: TransformerModel, layout: ParallelLayout, cluster: Cluster, seq_len: int) -> None:
    """Refuses a layout that cannot be built: divisibility of the model, size of the cluster.

    Raises:
        JobError: naming the key, its value and what is allowed.
    """
    context, times = ("", "") if layout.context == 1 else (" x context", f" x {layout.context}")
    if layout.num_gpus != cluster.num_gpus:
        raise JobError(
            f"parallel: tensor x pipeline x data{context} = "
            f"{layout.tensor} x {layout.pipeline} x {layout.data}{times} = "
            f"{layout.num_gpus} GPUs, but cluster {cluster.name!r} has {cluster.num_gpus} "
            f"({cluster.num_nodes} x {cluster.gpus_per_node}){_filling(layout, cluster.num_gpus)}"
        )
    check_model(model, layout, seq_len)
    if layout.tensor > cluster.gpus_per_node and layout.tensor % cluster.gpus_per_node:
        raise JobError(
            f"parallel.tensor is {layout.tensor}, must be at most a node's {cluster.gpus_per_node} GPUs "
            "or a multiple of them"
        )
    is_uneven = cluster.num_nodes > 1 and cluster.gpus_per_node % min(layout.tensor, cluster.gpus_per_node)
    if is_uneven and layout.data > 1 and layout.pipeline == 1:
        raise JobError(
            f"parallel.tensor is {layout.tensor}, must divide a node's {cluster.gpus_per_node} GPUs "
            "(cluster.gpus_per_node) or be a multiple of them: a data-parallel group has as many ranks on each node"
        )


def _filling(layout: ParallelLayout, num_gpus: int) -> str:
    """The data parallelism that fills a cluster; of FSDP the number of its groups, where whole ones do."""
    data, rest = divmod(num_gpus, layout.num_gpus // layout.data)
    if rest or not data:
        return ""
    if layout.zero_stage < MAX_ZERO_STAGE:
        return f": data = {data} fills it"
    groups, rest = divmod(data, layout.data // layout.replicate)
    is_whole = groups > 0 and not rest and layout.expert == 1
    return f": {f'replicate = {groups}' if is_whole else f'fsdp = {data}'} fills it"


def _check_chunks(model: TransformerModel, layout: ParallelLayout) -> None:
    if layout.pipeline_layout:
        sizes = parse_pipeline_layout(layout.pipeline_layout)
        if (sum(sizes.layers), sizes.num_mtp) != (model.num_layers, model.mtp_layers):
            raise JobError(
                f"parallel.pipeline_layout has {sum(sizes.layers)} layers t and {sizes.num_mtp} predictions m, must "
                f"have those of model {model.name!r}: {model.num_layers} and {model.mtp_layers}"
            )
        if model.tied_embeddings and layout.mtp_chunk < layout.num_chunks - 1:
            raise JobError(
                f"parallel.pipeline_layout has predictions m before the head's chunk, which is not modelled for tied "
                f"tables, as those of model {model.name!r}"
            )
        return
    tables = 2 if layout.tables_as_layers else 0
    cut = f"parallel.pipeline x chunks = {layout.pipeline} x {layout.chunks} = {layout.num_chunks}"
    if (model.num_layers + tables) % layout.num_chunks:
        more = " and 2 for tables_as_layers" if tables else ""
        raise JobError(f"{cut}, must divide the model's layers ({model.num_layers}){more}; or give pipeline_layout")
    if tables and (model.num_layers + tables) // layout.num_chunks < 2:
        raise JobError(f"{cut}: with tables_as_layers the first and last chunk would have no layer")


def check_model(model: TransformerModel, layout: ParallelLayout, seq_len: int) -> None:
    """Refuses degrees that do not divide the model.

    Raises:
        JobError: naming the key, its value and what it must divide.
    """
    for what, size in _cut_sizes(model, layout):
        if size % layout.tensor:
            raise JobError(f"parallel.tensor is {layout.tensor}, must divide the model's {what} ({size})")
    has_keys = any(kind.mixer in (Mixer.ATTENTION, Mixer.WINDOW) for kind in model.kind_counts)
    if has_keys and max(model.num_kv_heads, layout.tensor) % min(model.num_kv_heads, layout.tensor):
        raise JobError(
            f"parallel.tensor is {layout.tensor}, must divide the model's key-value heads ({model.num_kv_heads}) "
            "or be a multiple of them"
        )
    _check_chunks(model, layout)
    _check_kinds(model, layout)
    if layout.recompute is Recompute.PRODUCTS and (model.num_experts or not (model.gated and layout.flash_attention)):
        raise JobError(
            "parallel.recompute is products, torchtitan's operator mode: only dense models with gated MLPs and flash "
            f"attention have it here, not {model.name!r}"
        )
    if layout.context > 1 and not layout.flash_attention:
        raise JobError(f"parallel.context is {layout.context}, must be 1 without flash_attention")
    if layout.attention_kernel is not None and not layout.flash_attention:
        raise JobError(
            f"parallel.attention_kernel is {layout.attention_kernel}, must be absent without flash_attention"
        )
    if seq_len % layout.context:
        raise JobError(f"parallel.context is {layout.context}, must divide seq_len ({seq_len})")
    if layout.sequence_parallel and seq_len // layout.context % layout.tensor:
        raise JobError(f"parallel.tensor is {layout.tensor}, must divide seq_len ({seq_len}) for sequence parallelism")
    if layout.dispatcher is not Dispatcher.ALL_TO_ALL and not model.num_experts:
        raise JobError(
            f"parallel.dispatcher is {layout.dispatcher}, must be all_to_all: model {model.name!r} has no experts"
        )
    if layout.fused_experts and not model.num_experts:
        raise JobError(f"parallel.fused_experts is true, must be false: model {model.name!r} has no experts")
    if layout.expert > 1 and not model.num_experts:
        raise JobError(f"parallel.expert is {layout.expert}, must be 1: model {model.name!r} has no experts")
    if layout.expert > 1 and model.num_experts % layout.expert:
        raise JobError(f"parallel.expert is {layout.expert}, must divide the model's experts ({model.num_experts})")


def _cut_sizes(model: TransformerModel, layout: ParallelLayout) -> Iterator[tuple[str, int]]:
    """What tensor parallelism cuts, by its name."""
    yield "heads", model.num_heads
    if not (model.num_experts and layout.whole_experts):
        yield "ffn", model.ffn
    if model.dense_ffn:
        yield "dense_ffn", model.dense_ffn
    if model.mamba is not None:
        yield "mamba.num_heads", model.mamba.num_heads
        yield "mamba.num_groups", model.mamba.num_groups


def _check_kinds(model: TransformerModel, layout: ParallelLayout) -> None:
    """Refuses what is not modelled for layers of some kinds."""
    kinds = {*model.kind_counts, *(model.mtp_kinds if model.mtp_layers else ())}
    mixers, mlps = {kind.mixer for kind in kinds}, {kind.mlp for kind in kinds}
    special = sorted(mixers & {Mixer.LATENT, Mixer.WINDOW, Mixer.MAMBA})
    if special and not layout.flash_attention:
        raise JobError(f"parallel.flash_attention is false, must be true: model {model.name!r} has {special[0]} layers")
    if layout.context > 1 and Mixer.MAMBA in mixers:
        raise JobError(f"parallel.context is {layout.context}, must be 1: model {model.name!r} has mamba layers")
    if layout.recompute is Recompute.PRODUCTS and (special or len(kinds) > 1):
        raise JobError(
            f"parallel.recompute is products, which layers of one kind with plain attention have, not {model.name!r}"
        )
    needs = {
        RecomputeModule.MLA_UP_PROJ: (Mixer.LATENT in mixers, "latent attention"),
        RecomputeModule.MLP: (Mlp.MLP in mlps, "layers without experts"),
        RecomputeModule.MOE: (Mlp.EXPERTS in mlps, "experts"),
        RecomputeModule.MOE_ACT: (Mlp.EXPERTS in mlps, "experts"),
    }
    graphs = {
        GraphModule.MAMBA: (Mixer.MAMBA in mixers, "Mamba layers"),
        GraphModule.MLP: (Mlp.MLP in mlps, "layers without experts"),
        GraphModule.MOE_ROUTER: (Mlp.EXPERTS in mlps, "experts"),
    }
    named = [("recompute_modules", str(one), needs.get(one)) for one in layout.recompute_modules]
    named += [("graph_modules", str(one), graphs.get(one)) for one in layout.graph_modules]
    for key, module, needed in named:
        if needed is not None and not needed[0]:
            raise JobError(f"parallel.{key} has {module!r}, but model {model.name!r} has no {needed[1]}")
    if layout.whole_experts and Mlp.EXPERTS not in mlps:
        raise JobError(f"parallel.whole_experts is true, must be false: model {model.name!r} has no experts")
