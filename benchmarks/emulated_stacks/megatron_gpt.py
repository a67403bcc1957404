"""GPT by Megatron-Core's local modules: tensor, pipeline and data parallelism, distributed optimizer with overlap.

torchrun --nproc-per-node 8 megatron_gpt.py TENSOR PIPELINE STEPS
"""

import os
import sys

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed as dist

TENSOR, PIPELINE, STEPS = map(int, sys.argv[1:])
SEQUENCE, VOCABULARY, MICRO_BATCHES = 1024, 32000, 4

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
parallel_state.initialize_model_parallel(TENSOR, PIPELINE)
tensor_parallel.model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=4,
    hidden_size=1024,
    num_attention_heads=16,
    tensor_model_parallel_size=TENSOR,
    pipeline_model_parallel_size=PIPELINE,
    pipeline_dtype=torch.bfloat16,
    params_dtype=torch.bfloat16,
    bf16=True,
    use_cpu_initialization=True,
    gradient_accumulation_fusion=False,
)
gpt = GPTModel(
    config=config,
    transformer_layer_spec=get_gpt_layer_local_spec(),
    vocab_size=VOCABULARY,
    max_sequence_length=SEQUENCE,
    pre_process=parallel_state.is_pipeline_first_stage(),
    post_process=parallel_state.is_pipeline_last_stage(),
)
overlap = DistributedDataParallelConfig(
    overlap_grad_reduce=True, use_distributed_optimizer=True, overlap_param_gather=True
)
model = DistributedDataParallel(config, overlap, Float16Module(config, gpt.cuda()))
options = OptimizerConfig(
    optimizer="adam",
    lr=1e-4,
    bf16=True,
    params_dtype=torch.bfloat16,
    use_distributed_optimizer=True,
    overlap_param_gather=True,
)
optimizer = get_megatron_optimizer(options, [model])
config.finalize_model_grads_func = finalize_model_grads
config.no_sync_func, config.grad_sync_func = model.no_sync, model.start_grad_sync
config.param_sync_func = model.start_param_sync

tokens = torch.randint(0, VOCABULARY, (1, SEQUENCE), device="cuda")
positions = torch.arange(SEQUENCE, device="cuda")[None]
mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device="cuda").triu(1)


def loss_of(output):
    """The mean of the output, as Megatron's schedules ask for it."""
    loss = output.float().mean()
    return loss, {"loss": loss.detach()}


def forward(_, part):
    """One micro-batch through a stage."""
    return part(tokens, positions, mask, labels=tokens), loss_of


run = get_forward_backward_func()
for step in range(STEPS):
    model.zero_grad_buffer()
    optimizer.zero_grad()
    run(
        forward_step_func=forward,
        data_iterator=None,
        model=[model],
        num_microbatches=MICRO_BATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=1,
        forward_only=False,
    )
    optimizer.step()
    if dist.get_rank() == 0:
        print("step", step, flush=True)
dist.destroy_process_group()
