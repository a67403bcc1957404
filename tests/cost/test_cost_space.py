from dataclasses import replace
from itertools import pairwise

import pytest

from lagom_overlap.collective import (
    Algorithm,
    Collective,
    CollectiveKind,
    CommConfig,
    Protocol,
    SpaceLimits,
    Transport,
    chunk_bytes_of_slice,
)
from lagom_overlap.cost import Collectives, ContentionModel, load_profile
from lagom_overlap.errors import SpaceError
from lagom_overlap.hardware import load_preset
from lagom_overlap.units import KIB, MIB

AR = Collective(CollectiveKind.ALL_REDUCE, 32 * MIB, 8)
AG = Collective(CollectiveKind.ALL_GATHER, 32 * MIB, 8)
A2A = Collective(CollectiveKind.ALL_TO_ALL, 32 * MIB, 8)


def implementations(model: ContentionModel, collective: Collective) -> set[tuple[str | None, str | None]]:
    return {(s.algorithm, s.protocol) for s in model.space(collective).subspaces}


def test_only_an_all_reduce_has_trees_and_only_a_switch_has_ll128(
    nvlink_model: ContentionModel, pcie_model: ContentionModel
) -> None:
    """Pairs of A40 on bridges meet over PCIe, where NCCL has no LL128; the paper's model has it on any NVLink."""
    protocols = {"simple", "ll", "ll128"}
    switched = ContentionModel(load_preset("a100_dgx"), nvlink_model.profile)
    paper = replace(nvlink_model, profile=replace(nvlink_model.profile, collectives=Collectives.PAPER))
    for model in (switched, paper):
        assert implementations(model, AR) == {(a, p) for a in ("ring", "tree") for p in protocols}
        assert implementations(model, AG) == {("ring", p) for p in protocols}
        assert implementations(model, A2A) == {(None, "simple"), (None, "ll")}
    for model in (nvlink_model, pcie_model):
        assert implementations(model, AG) == {("ring", "simple"), ("ring", "ll")}


@pytest.mark.parametrize("collective", [AR, AG, A2A])
def test_every_configuration_of_a_space_can_run(nvlink_model: ContentionModel, collective: Collective) -> None:
    space = nvlink_model.space(collective, SpaceLimits(num_threads=(96, 512, 640)))
    assert all(nvlink_model.collective(collective, config).seconds() > 0 for config in space)


@pytest.mark.parametrize("collective", [AR, AG, A2A])
def test_the_default_lies_in_the_first_subspace(nvlink_model: ContentionModel, collective: Collective) -> None:
    default = nvlink_model.default_config(collective)
    space = nvlink_model.space(collective, SpaceLimits(num_threads=(256, default.num_threads)))
    assert default in space.subspaces[0]


def test_the_paper_s_slices_are_there_as_chunks(nvlink_model: ContentionModel) -> None:
    chunks = nvlink_model.space(AG).subspaces[0].chunk_bytes
    assert {chunk_bytes_of_slice(684 * KIB), chunk_bytes_of_slice(1366 * KIB)} <= set(chunks)
    assert (chunks[0], chunks[-1]) == (32 * KIB, 2 * MIB)
    assert all(a < b for a, b in pairwise(chunks) if a and b)


def test_threads_stay_with_the_engine_unless_asked_for(nvlink_model: ContentionModel) -> None:
    assert {s.num_threads for s in nvlink_model.space(AR).subspaces} == {(None,)}
    asked = nvlink_model.space(AR, SpaceLimits(num_threads=(512, 640))).subspaces
    assert {(s.algorithm, s.protocol): s.num_threads for s in asked}[Algorithm.RING, Protocol.SIMPLE] == (512,)


def test_limits_are_sorted_and_kept(nvlink_model: ContentionModel) -> None:
    space = nvlink_model.space(
        AR,
        SpaceLimits(
            algorithms=(Algorithm.RING,),
            protocols=(Protocol.SIMPLE,),
            num_channels=(61, 2, 2),
            chunk_bytes=(MIB, 64 * KIB),
        ),
    )
    assert [(s.num_channels, s.chunk_bytes) for s in space.subspaces] == [((2, 61), (64 * KIB, MIB))]


def test_a_limit_on_algorithms_does_not_touch_point_to_point(nvlink_model: ContentionModel) -> None:
    assert implementations(nvlink_model, A2A) == {
        (s.algorithm, s.protocol) for s in nvlink_model.space(A2A, SpaceLimits(algorithms=(Algorithm.RING,))).subspaces
    }


def test_protocols_that_cannot_take_the_chunks_are_left_out(nvlink_model: ContentionModel) -> None:
    assert {s.protocol for s in nvlink_model.space(AG, SpaceLimits(chunk_bytes=(MIB,))).subspaces} == {Protocol.SIMPLE}


@pytest.mark.parametrize(
    ("collective", "limits", "words"),
    [
        (AG, {"algorithms": [Algorithm.TREE]}, "algorithms allows only tree, but all_gather has ring"),
        (AG, {"algorithms": [Algorithm.NVLS]}, "algorithms allows only nvls"),
        (A2A, {"protocols": [Protocol.LL128]}, "protocols allows only ll128"),
        (AR, {"transports": [Transport.SHM]}, "transports allows shm, but .* has p2p, copy_engine"),
        (AR, {"num_channels": [8, 84]}, r"num_channels allows 84; on A40 \(simulated\) it must lie in 1..83"),
        (AR, {"num_channels": [0]}, "num_channels allows 0"),
        (AR, {"num_channels": []}, "num_channels allows no value"),
        (AR, {"num_threads": [100]}, "num_threads allows 100"),
        (AR, {"chunk_bytes": [4 * MIB]}, "chunk_bytes allows 4194304"),
        (AR, {"algorithms": [Algorithm.TREE], "chunk_bytes": [MIB]}, "nothing is left to try for all_reduce"),
        (AG, {"protocols": [Protocol.SIMPLE], "num_threads": [640]}, "at most 608 threads"),
    ],
)
def test_limits_that_cannot_be_are_refused_in_words(
    nvlink_model: ContentionModel, collective: Collective, limits: dict[str, list[object]], words: str
) -> None:
    with pytest.raises(SpaceError, match=words):
        nvlink_model.space(collective, SpaceLimits(**limits))


def test_copy_engines_are_one_more_subspace_of_what_they_carry() -> None:
    model = ContentionModel(load_preset("h100_dgx"), load_profile("plausible"))
    for collective, copies in ((AG, [CommConfig(transport=Transport.COPY_ENGINE)]), (AR, [])):
        both = model.space(collective, SpaceLimits(transports=(Transport.COPY_ENGINE, Transport.P2P)))
        assert list(both) == [*model.space(collective), *copies]
        assert model.space(collective, SpaceLimits(transports=(Transport.P2P,))) == model.space(collective)
        assert replace(model.default_config(collective), num_threads=None) in both
    with pytest.raises(SpaceError, match="transports allows no value"):
        model.space(AG, SpaceLimits(transports=()))


def test_channels_whose_fifo_lies_in_host_memory_are_shared_memory(nvlink_model: ContentionModel) -> None:
    cluster = nvlink_model.cluster
    shared = ContentionModel(replace(cluster, intra=replace(cluster.intra, host_fifo=True)), load_profile("plausible"))
    assert shared.space(AR, SpaceLimits(transports=(Transport.SHM,))) == shared.space(AR)
    with pytest.raises(SpaceError, match=r"transports allows p2p, but .* has shm, copy_engine"):
        shared.space(AR, SpaceLimits(transports=(Transport.P2P,)))
