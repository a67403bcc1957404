"""Rounds of persistent kernels against a simulation cluster by cluster, and what one H100 was measured to do."""

import csv
import heapq
from pathlib import Path

import pytest

from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.cost.kernels import persistent_of_time
from lagom_overlap.cost.persistent import (
    TileGrid,
    hopper_grid,
    nvjet_grid,
    nvjet_grid_of_time,
    persistent_waves,
    resident_clusters,
    rounds,
)
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import load_preset
from lagom_overlap.workload import Gemm, Kernel

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h100_2026-11-22"
H100 = load_preset("h100_dgx").gpu


def simulated(num_tiles: int, launched: int, resident: int, own_tiles: int) -> int:
    """One cluster after the other, each with a clock of its own; tiles in the order of a strided grid."""
    held = [list(range(c, min(num_tiles, launched * own_tiles), launched)) for c in range(launched)]
    pool = num_tiles - sum(map(len, held))
    slots = [0] * resident
    waiting = [len(own) for own in held]
    running: list[tuple[int, int]] = []
    end = 0
    while waiting or running:
        while waiting and slots:
            heapq.heappush(running, (heapq.heappop(slots) + waiting.pop(0), 0))
        now, _ = heapq.heappop(running)
        end = max(end, now)
        if pool:
            pool -= 1
            heapq.heappush(running, (now + 1, 0))
        else:
            heapq.heappush(slots, now)
    return end


@pytest.mark.parametrize("own_tiles", [0, 1, 2, 3])
@pytest.mark.parametrize("resident", [1, 7, 20, 29, 30])
def test_rounds_are_those_of_a_simulation_cluster_by_cluster(resident: int, own_tiles: int) -> None:
    """Where all clusters bring as many tiles; with shorter ones their places matter, see the next tests."""
    for num_tiles in (90, 91, 120, 300, 301, 720):
        assert rounds(num_tiles, 30, resident, own_tiles) == simulated(num_tiles, 30, resident, own_tiles)


def test_tiles_that_are_all_fetched_take_the_quotient_and_a_static_grid_a_second_pass() -> None:
    assert [rounds(256, 66, free, 0) for free in (66, 65, 64, 63)] == [4, 4, 4, 5]
    assert [rounds(264, 66, free, 4) for free in (66, 65, 33, 32)] == [4, 8, 8, 12]


def test_two_tiles_each_cost_a_product_what_one_h100_was_measured_to_lose() -> None:
    """Rounds read off the surface: 4096^3 (256 pairs of tiles, 4 rounds), 4096 x 2560 x 2560 (128, 2 rounds)."""
    lost = {1: 65, 2: 64, 4: 62, 16: 54, 48: 39}
    assert [rounds(256, 66, free, 2) for free in lost.values()] == [5, 5, 6, 6, 7]
    assert [rounds(128, 66, free, 2) for free in lost.values()] == [2, 3, 4, 4, 4]


def test_the_clusters_that_fit_are_those_that_were_counted_on_the_gpu() -> None:
    with (RESULTS / "resident_clusters.csv").open(newline="") as file:
        counted = [{name: int(cell) for name, cell in row.items()} for row in csv.DictReader(file)]
    assert len(counted) == 90
    for row in counted:
        found = resident_clusters(H100, row["held_sms"], row["cluster_blocks"])
        assert found * row["cluster_blocks"] == row["resident_blocks"], row


def test_without_known_gpcs_the_free_sms_count_as_one() -> None:
    assert resident_clusters(load_preset("h200").gpu, 5, 4) == 127 // 4


def test_a_name_of_cublas_says_tile_and_cluster() -> None:
    name = "nvjet_sm90_tst_320x128_64x3_1x4_h_bz_coopB_NNT"
    grid = nvjet_grid(name, 120, (1024, 14336))
    assert grid == TileGrid(num_tiles=45 * 8, num_blocks=120, cluster=4, own_tiles=2)
    guessed = nvjet_grid_of_time(name, 120, 45 * 8 * 320 * 128)
    assert guessed == TileGrid(
        num_tiles=87 * 4, num_blocks=120, cluster=4, own_tiles=2
    )  # 3 rounds, a tenth of one idle
    assert nvjet_grid("gemm_kernel", 512, (4096, 4096)) is None
    assert nvjet_grid(name, 122, (1024, 14336)) is None


def test_a_persistent_kernel_gives_its_time_alone_back_and_moves_its_bytes() -> None:
    model = ContentionModel(load_preset("h100_dgx"), load_profile("plausible"))
    grid = TileGrid(num_tiles=512, num_blocks=132, cluster=2, own_tiles=2)
    kernel = persistent_of_time(H100, model.profile, alone_s=180e-6, grid=grid, total_bytes=1e8)
    assert model.kernel_seconds(kernel) == pytest.approx(180e-6)
    assert kernel.num_blocks * kernel.block_bytes == pytest.approx(1e8)
    slowdowns = [model.kernel_seconds(kernel, num_channels=n) / 180e-6 for n in (1, 4)]
    assert slowdowns == pytest.approx([5 / 4, 6 / 4], rel=0.03)


def test_a_carve_out_saves_the_late_rounds_where_it_holds_what_the_gpcs_lose() -> None:
    """16 SMs, spread over the GPCs, leave 54 pairs: 24 SMs must be free for nothing to come late."""
    assert resident_clusters(H100, 16, 2) == 54
    untouched, short, enough = (
        ContentionModel(load_preset("h100_dgx"), load_profile("plausible"), n) for n in (0, 16, 24)
    )
    times = [
        model.kernel_seconds(model.kernel(Gemm(8192, 8192, 8192)), num_channels=16)
        for model in (untouched, short, enough)
    ]
    assert times[2] < min(times[:2])
    kernel = enough.kernel(Gemm(8192, 8192, 8192))
    assert kernel.grid == 108
    assert enough.kernel_seconds(kernel, num_channels=16) == enough.kernel_seconds(kernel)


def test_the_grid_for_hopper_launches_no_more_clusters_than_tiles() -> None:
    assert hopper_grid((256, 256), 1, 132).num_blocks == 2
    grid = hopper_grid((4096, 4096), 1, 132)
    assert (grid.num_blocks, persistent_waves(grid, H100).count()) == (132, 4)


def test_clusters_without_a_grid_and_grids_that_are_no_clusters_are_refused() -> None:
    for fields in ({"cluster": 2}, {"own_tiles": 1}, {"grid": 131, "cluster": 2}, {"grid": 132, "own_tiles": -1}):
        with pytest.raises(JobError):
            Kernel(num_blocks=1, blocks_per_sm=1, wave_s=1.0, block_bytes=0.0, **fields)  # type: ignore[arg-type]
