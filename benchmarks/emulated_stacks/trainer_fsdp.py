"""A small Llama by Hugging Face's Trainer, FSDP2 through accelerate.

accelerate launch --num_processes 2 --multi_gpu trainer_fsdp.py STEPS
"""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCABULARY, SEQUENCE = 32000, 512


class Tokens(Dataset):
    """Random tokens, the same in every run."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        tokens = torch.randint(0, VOCABULARY, (SEQUENCE,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


model = LlamaForCausalLM(
    LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
    )
)
sharding = {
    "fsdp_version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
}
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=2,
        max_steps=int(sys.argv[1]),
        bf16=True,
        report_to=[],
        save_strategy="no",
        fsdp=True,
        fsdp_config=sharding,
    )
    Trainer(model=model, args=arguments, train_dataset=Tokens()).train()
