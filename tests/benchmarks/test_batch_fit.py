"""Which sequence length explains the Lagom paper's micro-batches, by counting."""

import pytest

from batch_fit import BatchSetting, inferred, peak_bytes, settings
from lagom_overlap.papers.workloads import load_table2
from lagom_overlap.workload.models import load_model
from lagom_overlap.workload.parallel import Recompute


def test_a_peak_is_the_sum_that_one_makes_by_hand() -> None:
    """Phi-2 under FSDP 8: 2 + 2 + 12 bytes per own parameter, two gathered layers, activations, logits."""
    row = next(w for w in load_table2() if w.name == "phi-2 FSDP 8")
    model, tokens = load_model("phi-2"), 2 * 4096
    setting = BatchSetting(4096, Recompute.NONE, flash_attention=True)
    params = model.num_params // 8
    layer = 4 * 2 * 2560 + 2 * (7680 + 2560 + 2 * 10240)  # norms, residuals; qkv, context, ffn in and out
    logits = 6 * model.vocab
    by_hand = 16 * params + 2 * 2 * model.layer_params + tokens * (32 * layer + logits)
    assert peak_bytes(row, setting, 2) == pytest.approx(by_hand, rel=0.01)


def test_the_inferred_length_is_the_one_that_explains_most_rows() -> None:
    """By counting: a row is explained if its batch fits 48 GB and twice the batch does not."""
    rows = {w.name: w for w in load_table2()}
    counts = {
        setting: sum(
            peak_bytes(row, setting, row.micro_batch) <= 48e9 < peak_bytes(row, setting, 2 * row.micro_batch)
            for row in rows.values()
        )
        for setting in settings()
    }
    found, left = inferred(load_table2())
    assert counts[found] == max(counts.values()) == 10
    assert (found.seq_len, found.recompute, len(left)) == (4096, Recompute.NONE, 4)
    assert {row.seq_len for row in rows.values()} == {4096}
    assert counts[BatchSetting(2048, Recompute.NONE, flash_attention=True)] == 0


def test_every_row_of_the_table_fits_as_it_is_run() -> None:
    for row in load_table2():
        setting = BatchSetting(row.seq_len, row.recompute, flash_attention=True)
        assert peak_bytes(row, setting, row.micro_batch) <= 48e9, row.name
