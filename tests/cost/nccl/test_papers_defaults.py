"""What the paper's profile takes for untouched, against what NCCL 2.18.3's real host code logged on those clusters."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.cost import Collectives, ContentionModel, load_profile
from lagom_overlap.hardware import load_preset
from lagom_overlap.units import MIB

LAYOUTS = {
    # preset, ranks: the layout of which it is, GPUs on the root of an AMD CPU
    ("a40_nvlink", 8): "a40_nvlink8_direct_amd",
    ("a40_nvlink", 16): "a40_nvlink8_ib2x400_direct_amd",
    ("a40_pcie", 8): "a40_pcie8_direct_amd",
    ("a40_pcie", 16): "a40_pcie8_ib1x100_direct_amd",
}


@pytest.mark.parametrize(("preset", "num_ranks"), LAYOUTS)
@pytest.mark.parametrize("kind", [CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER])
def test_the_default_is_what_nccl_2_18_3_logged(
    golden: Path, preset: str, num_ranks: int, kind: CollectiveKind
) -> None:
    with (golden / "papers_defaults.csv").open(encoding="utf-8", newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["nccl"] == "2.18.3"
            and row["topology"] == LAYOUTS[preset, num_ranks]
            and row["collective"] == kind.value
            and int(row["bytes"]) >= 2 * MIB
        ]
    assert len(rows) == 10
    profile = replace(load_profile("plausible"), collectives=Collectives.PAPER)
    model = ContentionModel(load_preset(preset), profile)
    for row in rows:
        config = model.default_config(Collective(kind, int(row["bytes"]), num_ranks))
        found = (config.algorithm, config.protocol, config.num_channels, config.chunk_bytes)
        expected = (row["algorithm"].lower(), row["protocol"].lower(), int(row["channels"]), int(row["chunk_bytes"]))
        assert tuple(map(str, found)) == tuple(map(str, expected))
