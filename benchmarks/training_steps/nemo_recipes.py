"""What NeMo's recipes of 24.03 to 25.09 switch on that its tables of results do not print.

NeMo 1.0 (24.03 to 24.09), NVIDIA/NeMo-Framework-Launcher @056a90e and @0da9ad9: Apex's distributed Adam with
`overlap_grad_sync` and `overlap_param_sync`, gradients reduced in BF16 (`grad_sync_dtype`, in
`conf/peft/llama/sft.yaml` and `examples/training`; Nemotron 8B and 22B have none: FP32). Fine-tuning has no user
buffers (`ub_tp_comm_overlap` False there). NeMo 2.0 (from 24.12), NVIDIA/NeMo @8cfedd7: the same of Megatron-Core's
(`pretrain_performance_optimizations` of each recipe: `grad_reduce_in_fp32` False), the loss is Transformer Engine's
from 25.04 on (`scripts/performance/helpers.py`, 9657892, April 2025); Mixtral and Llama 4 drop tokens at a
capacity of 1 (`MegatronTokenDropCallback`) and send them by all-to-all. Layers are CUDA graphs on B200 and GB200 for
Mixtral 8x7B and Llama 4 Scout (`recommended_model_configs`). GPT-3 175B has no dropout there (`GPTConfig175B`).

Fine-tuning on SQuAD packs its questions into sequences of the printed length (`packed_sequence`), and attention does
not reach from one into another. SQuAD v1.1 has 120 words of context, 10 of question and 3 of answer in the mean (arXiv
1606.05250: 87,599 questions), some 190 tokens: attention is priced for 256. Its table prints no interleaving; that of
the same model's pre-training is assumed, one layer a chunk.
"""

from dataclasses import replace
from typing import Final

from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel import AttentionKernel, Dispatcher
from lagom_overlap.workload.precision import DType
from training_steps.recipes import Recipe, Release

PACKED_TOKENS: Final = 256
_SECOND: Final[Release] = (24, 12, 0)
"""The first release of NeMo 2.0 in such a table."""
_FUSED_LOSS: Final[Release] = (25, 4, 0)
_FUSED_ATTENTION: Final[Release] = (24, 9, 0)
_WIDE_GRADIENTS: Final = ("nemotron-3-8b", "nemotron-22b")
_GRAPHED: Final = ("mixtral-8x7b", "llama-4-scout")


def nemo_recipe_of(model: TransformerModel, release: Release | None, gpu: str, *, tunes: bool = False) -> Recipe:
    """The recipe of a row of NeMo's; `tunes`: of a fine-tuning."""
    late = release is not None and release >= _SECOND
    fused = late and release is not None and release >= _FUSED_LOSS
    reduction = DType.FP32 if model.name in _WIDE_GRADIENTS and not late else DType.BF16
    early = release is not None and release < _FUSED_ATTENTION
    plain = Recipe(
        reduction=reduction,
        fused_loss=fused,
        overlaps_tensor=late or not tunes,
        attention=AttentionKernel.FLASH_2 if early else None,
    )
    if not (late and model.num_experts):
        return plain
    drops = model.name.startswith(("mixtral", "llama-4"))
    dispatcher = Dispatcher.CAPACITY if drops else Dispatcher.ALL_TO_ALL
    return replace(plain, dispatcher=dispatcher, graphed=model.name in _GRAPHED and gpu in ("b200", "gb200"))


def nemo_model(model: TransformerModel, release: Release | None) -> TransformerModel:
    """The model as NeMo trains it."""
    late = release is not None and release >= _SECOND
    return replace(model, dropout=False) if late and model.dropout else model
