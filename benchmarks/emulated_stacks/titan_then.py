"""torchtitan's own trainer of a release that published a row, on random tokens of Llama 3's full vocabulary.

It runs in a checkout of torchtitan: of December 2024 (with `train.py` at its top) or of June 2025 (with
`torchtitan/train.py`). All flags are torchtitan's; LAYERS (32) is how many of the model's layers are built. Nothing of
torchtitan is changed but what it reads: tokens come from a random generator, and no tokenizer is asked.

    cd TORCHTITAN; torchrun --nproc-per-node 8 titan_then.py --model.flavor 8B --training.steps 3 ...
"""

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path.cwd()))
LAYERS = int(os.environ.get("LAYERS", "32"))
TOKENIZER = SimpleNamespace(n_words=128256, eos_id=128001)


class RandomTokens:
    """Batches without an end; has a state, as torchtitan's loaders have."""

    def __init__(self, batch, length, is_dict):
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(0, TOKENIZER.n_words, (batch, length + 1), generator=generator)
        self._inputs, self._labels, self._is_dict = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous(), is_dict

    def __iter__(self):
        while True:
            yield {"input": self._inputs.clone()} if self._is_dict else self._inputs.clone(), self._labels.clone()

    def state_dict(self):
        """Nothing to keep."""
        return {}

    def load_state_dict(self, _):
        """Nothing to restore."""


def train_december_2024():
    """`train.py` at the top of the repository; modules without a package."""
    train = importlib.import_module("train")
    models = importlib.import_module("torchtitan.models")
    config = train.JobConfig()
    config.parse_args()
    models.models_config[config.model.name][config.model.flavor].n_layers = LAYERS
    train.build_tokenizer = lambda *_: TOKENIZER
    train.build_hf_data_loader = lambda _name, _path, _tokenizer, batch, length, *_: RandomTokens(batch, length, False)
    train.main(config)


def train_june_2025():
    """`torchtitan/train.py`, with a specification for each model."""
    train = importlib.import_module("torchtitan.train")
    specs = importlib.import_module("torchtitan.protocols.train_spec")

    def on_random_tokens(spec):
        if spec.name != "llama3":
            return spec
        for shape in spec.config.values():
            shape.n_layers = LAYERS

        def load(*, job_config, **_):
            return RandomTokens(job_config.training.local_batch_size, job_config.training.seq_len, True)

        return replace(spec, build_tokenizer_fn=lambda _: TOKENIZER, build_dataloader_fn=load)

    specs.apply_to_train_specs(on_random_tokens)
    trainer = train.Trainer(importlib.import_module("torchtitan.config_manager").ConfigManager().parse_args())
    trainer.train()
    trainer.close()


if Path("train.py").exists():
    train_december_2024()
else:
    train_june_2025()
torch.distributed.destroy_process_group()
