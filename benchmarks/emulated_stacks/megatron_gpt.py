"""GPT by Megatron-Core's local modules: distributed optimizer with overlap, tensor, pipeline and expert parallelism.

torchrun --nproc-per-node 8 megatron_gpt.py [--tensor 2] [--pipeline 2] [--chunks 2]
    [--experts 8 --expert 4 [--combined]] [--overlap none|gradients|both] STEPS

`--overlap` are Megatron-LM's --overlap-grad-reduce and --overlap-param-gather, `--combined` is
`overlap_moe_expert_parallel_comm`, Megatron-Core's combined 1F1B. Routing is balanced by Megatron's own benchmark
switch (random logits), so that what is sent where does not hang on the values of large products.
"""

import argparse
import os

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed as dist

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("steps", type=int)
parser.add_argument("--tensor", type=int, default=1)
parser.add_argument("--pipeline", type=int, default=1)
parser.add_argument("--chunks", type=int, default=1, help="model chunks of a stage: interleaved 1F1B")
parser.add_argument("--no-overlap-p2p-communication", action="store_true", help="stages wait for every transfer")
parser.add_argument("--experts", type=int, help="a mixture of so many experts")
parser.add_argument("--expert", type=int, default=1, help="ranks that share the experts")
parser.add_argument("--combined", action="store_true")
parser.add_argument("--overlap", choices=("none", "gradients", "both"), default="both")
parser.add_argument("--sequence", type=int, default=1024)
parser.add_argument("--hidden", type=int, default=1024)
parser.add_argument("--layers", type=int, default=4)
options = parser.parse_args()
VOCABULARY, MICRO_BATCHES = 32000, 4
CHUNKS = options.chunks if options.chunks > 1 else None
GOES_ON = (
    CHUNKS is not None and not options.no_overlap_p2p_communication
)  # as Megatron-LM has it (training/arguments.py)
if not hasattr(
    moe_utils, "te_general_gemm"
):  # Megatron-Core 0.16.1 asks for it, and defines it with Transformer Engine alone
    moe_utils.te_general_gemm = None

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
parallel_state.initialize_model_parallel(
    options.tensor, options.pipeline, CHUNKS, expert_model_parallel_size=options.expert, expert_tensor_parallel_size=1
)
tensor_parallel.model_parallel_cuda_manual_seed(1)
mixture = {
    "num_moe_experts": options.experts,
    "expert_model_parallel_size": options.expert,
    "expert_tensor_parallel_size": 1,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_force_load_balancing": True,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": options.hidden,
    "add_bias_linear": False,
    "overlap_moe_expert_parallel_comm": options.combined,
}
config = TransformerConfig(
    num_layers=options.layers,
    hidden_size=options.hidden,
    num_attention_heads=16,
    tensor_model_parallel_size=options.tensor,
    pipeline_model_parallel_size=options.pipeline,
    virtual_pipeline_model_parallel_size=CHUNKS,
    overlap_p2p_comm=GOES_ON,
    batch_p2p_comm=not GOES_ON,
    pipeline_dtype=torch.bfloat16,
    params_dtype=torch.bfloat16,
    bf16=True,
    use_cpu_initialization=True,
    gradient_accumulation_fusion=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    **(mixture if options.experts else {}),
)


class FlashAttention(torch.nn.Module):
    """PyTorch's, where Megatron's local attention has the scores in memory: what Transformer Engine would run."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, **_):
        super().__init__()

    def forward(self, query, key, value, attention_mask, **_):
        """(sequence, batch, heads, columns) to (sequence, batch, width)."""
        heads = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return mixed.permute(2, 0, 1, 3).flatten(2)


def chunk_of(number):
    """One model chunk of this rank's stage."""
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number)
    if options.experts:
        layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=number)
    else:
        layers = get_gpt_layer_local_spec()
        layers.submodules.self_attention.submodules.core_attention = FlashAttention
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=VOCABULARY,
        max_sequence_length=options.sequence,
        pre_process=first,
        post_process=last,
        vp_stage=number,
    )
    return Float16Module(config, gpt.cuda())


overlap = DistributedDataParallelConfig(
    grad_reduce_in_fp32=True,  # as --bf16 sets it (training/arguments.py)
    overlap_grad_reduce=options.overlap != "none",
    use_distributed_optimizer=True,
    overlap_param_gather=options.overlap == "both",
)
model = [DistributedDataParallel(config, overlap, chunk_of(each if CHUNKS else None)) for each in range(options.chunks)]
optimizer = get_megatron_optimizer(
    OptimizerConfig(
        optimizer="adam",
        lr=1e-4,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        overlap_param_gather=options.overlap == "both",
    ),
    model,
)


def of_chunks(values):
    """As Megatron's training loop hands them over: a list only where a stage has several chunks."""
    return values if CHUNKS else values[0]


config.finalize_model_grads_func = finalize_model_grads
config.no_sync_func = of_chunks([each.no_sync for each in model])
if options.overlap != "none":
    config.grad_sync_func = of_chunks([each.start_grad_sync for each in model])
if options.overlap == "both":
    config.param_sync_func = of_chunks([each.start_param_sync for each in model])

tokens = torch.randint(0, VOCABULARY, (1, options.sequence), device="cuda")
positions = torch.arange(options.sequence, device="cuda")[None]
mask = torch.ones(1, 1, options.sequence, options.sequence, dtype=torch.bool, device="cuda").triu(1)


def loss_of(output):
    """The mean of the output, as Megatron's schedules ask for it."""
    loss = output.float().mean()
    return loss, {"loss": loss.detach()}


def forward(_, part, return_schedule_plan=False):
    """One micro-batch through a stage, or its plan for the combined schedule."""
    run_part = part.build_schedule_plan if return_schedule_plan else part
    return run_part(tokens, positions, mask, labels=tokens), loss_of


run = get_forward_backward_func()
for step in range(options.steps):
    for each in model:
        each.zero_grad_buffer()
    optimizer.zero_grad()
    run(
        forward_step_func=forward,
        data_iterator=[None] * options.chunks if CHUNKS else None,
        model=model,
        num_microbatches=MICRO_BATCHES,
        seq_length=options.sequence,
        micro_batch_size=1,
        forward_only=False,
    )
    optimizer.step()
    if dist.get_rank() == 0:
        print("step", step, flush=True)
dist.destroy_process_group()
