"""Small models whose captures can be counted by hand."""

from lagom_overlap.capturing.fake_tensor import capture_step
from lagom_overlap.capturing.models.degrees import Degrees
from lagom_overlap.capturing.models.named import decoder_step
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.models import TransformerModel

SEQ_LEN = 16


def small_model(**changes: object) -> TransformerModel:
    """A Llama of three layers, small enough to count."""
    shape: dict[str, object] = {
        "name": "small",
        "num_layers": 3,
        "hidden": 32,
        "ffn": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab": 96,
        "gated": True,
    }
    return TransformerModel(**{**shape, **changes})


def capture_small(
    model: TransformerModel | None = None, *, rank: int = 0, num_micro_batches: int = 1, **degrees: int
) -> IssuedStep:
    """The capture of a small model on `degrees`."""
    given = Degrees(**degrees)
    return capture_step(
        lambda: decoder_step(
            model or small_model(), given, micro_batch=1, seq_len=SEQ_LEN, num_micro_batches=num_micro_batches
        ),
        num_ranks=given.num_ranks,
        rank=rank,
    )
