"""torchtitan's own Llama-3-8B with as many layers as LAYERS says (32), on its small tokenizer and any text.

    torchrun --nproc-per-node 8 -m torchtitan.train --module titan_llama --config llama3_8b --training.steps 3

A configuration of torchtitan's, as its `--module` takes one of others: nothing of torchtitan is changed. The folder
that it runs in has `tests/assets/tokenizer` of torchtitan's repository and a text in `tests/assets/c4_test/data.json`.
"""

import os

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.models.llama3 import config_registry
from torchtitan.tools.profiler import Profiler
from torchtitan.trainer import Trainer


def llama3_8b() -> Trainer.Config:
    """Sequence 8192, local batch 1; nothing is saved, validated or profiled."""
    config = config_registry.llama3_8b()
    del config.model_spec.model.layers[int(os.environ.get("LAYERS", "32")) :]
    config.hf_assets_path = "./tests/assets/tokenizer"
    config.dataloader.dataset = "c4_test"
    config.profiler = Profiler.Config()
    config.metrics = MetricsProcessor.Config(log_freq=1)
    config.checkpoint = CheckpointManager.Config()
    config.training.disable_cuda_graphs = True
    return config
