"""One machine spelled out, so that nothing here depends on a preset, and the paper's FFN during an all-reduce."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.cost import Collectives, ContentionModel, load_profile
from lagom_overlap.hardware import Cluster, Gpu, Link, LinkKind
from lagom_overlap.units import MIB
from lagom_overlap.workload import Attention, CommOp, CompOp, Gemm, Kernel, MemoryBound, OverlapGroup

sys.path.insert(0, str(Path(__file__).parent))
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def pcie() -> Cluster:
    return Cluster(
        name="pcie",
        gpu=Gpu(
            name="A40",
            num_sms=84,
            gemm_flops=115e12,
            hbm_bytes_per_s=600e9,
            l2_bytes=6_000_000,
            memory_bytes=48_000_000_000,
        ),
        gpus_per_node=8,
        num_nodes=2,
        intra=Link(kind=LinkKind.PCIE, bytes_per_s=24e9, hop_s=2e-6),
        inter=Link(kind=LinkKind.NETWORK, bytes_per_s=11.5e9, hop_s=5e-6),
    )


@pytest.fixture(scope="session")
def model(pcie: Cluster) -> ContentionModel:
    """Communicators of the paper's NCCL, which have as many channels as a test asks for."""
    return ContentionModel(pcie, replace(load_profile("plausible"), collectives=Collectives.PAPER))


def _kernel(alone_s: float, num_blocks: int, blocks_per_sm: int, total_bytes: float) -> Kernel:
    """theta such that ceil(mu / (84 TB)) waves and the transfer at 600 GB/s take `alone_s`."""
    waves = -(-num_blocks // (84 * blocks_per_sm))
    return Kernel(
        num_blocks=num_blocks,
        blocks_per_sm=blocks_per_sm,
        wave_s=(alone_s - total_bytes / 600e9) / waves,
        block_bytes=total_bytes / num_blocks,
    )


@pytest.fixture(scope="session")
def ffn() -> OverlapGroup:
    """Phi-2's FFN at 2048 tokens with times measured on an A40 (microsoft/vidur @513ddc1), during an AR of 32 MiB.

    Tiles of 128 x 256; each wave of 84 tiles reloads the panels of its super-tile.
    """
    panel = 2 * (84 * 128 * 256) ** 0.5 * 2
    up = 640 / 84 * panel * 2560 + 2048 * 10240 * 2
    down = 160 / 84 * panel * 10240 + 2048 * 2560 * 2
    kernels = (
        _kernel(0.935e-3, 640, 1, max(up, 2 * (2048 * 2560 + 10240 * 2560 + 2048 * 10240))),
        _kernel(0.145e-3, 84 * 128, 16, 2048 * 10240 * 4 / 1.02),
        _kernel(1.087e-3, 160, 1, max(down, 2 * (2048 * 10240 + 10240 * 2560 + 2048 * 2560))),
    )
    return OverlapGroup(
        name="ffn",
        computations=tuple(CompOp(name=f"ffn{i}", work=kernel) for i, kernel in enumerate(kernels)),
        comms=(CommOp(name="ar", collective=Collective(CollectiveKind.ALL_REDUCE, 32 * MIB, 8)),),
    )


@pytest.fixture(scope="session")
def layer() -> OverlapGroup:
    """A transformer layer's products, attention and elementwise operators during an all-gather and a reduce-scatter.

    The reduce-scatter waits for three computations.
    """
    works = (
        MemoryBound(42_000_000),
        Gemm(4096, 7680, 2560),
        Attention(batch=2, num_heads=32, seq_len=2048, head_dim=80),
        Gemm(4096, 2560, 2560),
        Gemm(4096, 10240, 2560),
        MemoryBound(168_000_000),
        Gemm(4096, 2560, 10240),
    )
    return OverlapGroup(
        name="layer",
        computations=tuple(CompOp(name=f"comp{i}", work=work) for i, work in enumerate(works)),
        comms=(
            CommOp(name="ag", collective=Collective(CollectiveKind.ALL_GATHER, 64 * MIB, 8)),
            CommOp(name="rs", collective=Collective(CollectiveKind.REDUCE_SCATTER, 48 * MIB, 8)),
        ),
        starts_after=(0, 3),
    )
