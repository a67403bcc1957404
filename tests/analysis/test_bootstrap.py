"""Against the plain way: draw every run of every resample one by one."""

import numpy as np
import pytest

from lagom_overlap.analysis.bootstrap import NUM_RESAMPLES, Uniform, heaviest, resampled_medians, resampled_sums

MANY = 40


def edges_of(*cells):
    return np.cumsum([0, *map(len, cells)])


def drawn_one_by_one(values, statistic, num):
    rng = np.random.default_rng(5)
    return np.array([statistic(rng.choice(values, len(values))) for _ in range(num)])


@pytest.mark.parametrize("size", [2, 3, 8, 25])
def test_medians_are_spread_as_those_of_resamples_drawn_one_by_one(size):
    values = np.sort(np.random.default_rng(size).integers(1000, 9000, size))
    uniform = Uniform(0)
    ours = np.concatenate([resampled_medians(values, edges_of(values), uniform)[:, 0] for _ in range(MANY)])
    odd = values.size - (values.size + 1) % 2
    draws = np.random.default_rng(5).choice(values, (NUM_RESAMPLES * MANY, odd))
    plain = np.median(draws, axis=1)
    # Of 12,000 draws each a share has a standard error of at most 0.0065: four of the difference are 0.026.
    for bound in np.quantile(plain, [0.05, 0.25, 0.5, 0.75, 0.95]):
        assert np.mean(ours <= bound) == pytest.approx(np.mean(plain <= bound), abs=0.026)


def test_sums_are_spread_as_those_of_resamples_drawn_one_by_one():
    cells = [np.array([100, 300, 900]), np.array([7]), np.arange(50) ** 2]
    uniform = Uniform(1)
    values = np.concatenate(cells)
    sums = np.concatenate([resampled_sums(values, edges_of(*cells), uniform) for _ in range(MANY)])
    assert set(sums[:, 1]) == {7.0}
    for cell, held in zip(cells, sums.T, strict=True):
        plain = drawn_one_by_one(cell, np.sum, NUM_RESAMPLES * MANY)
        error = 4 * np.sqrt(2) * plain.std() / np.sqrt(len(plain))
        assert held.mean() == pytest.approx(plain.mean(), abs=error + 1e-9)
        assert held.std() == pytest.approx(plain.std(), rel=0.05, abs=1e-9)


def test_cells_do_not_share_their_draws():
    cell = np.arange(100)
    sums = resampled_sums(np.concatenate((cell, cell)), edges_of(cell, cell), Uniform(2))
    assert abs(np.corrcoef(sums.T)[0, 1]) < 0.25  # 300 resamples: standard error 0.058


def test_a_large_cell_is_thinned_to_a_wider_interval_around_the_same_sum():
    cell = np.random.default_rng(3).integers(0, 1000, 5000)
    sums = resampled_sums(cell, edges_of(cell), Uniform(4))[:, 0]
    assert sums.mean() == pytest.approx(cell.sum(), rel=0.01)
    assert sums.std() > 2 * cell.std() * np.sqrt(len(cell))


def test_the_heaviest_cells_are_kept_in_order():
    assert heaviest(np.array([1.0, 3.0, 2.0])).tolist() == [0, 1, 2]
    weight = np.ones(3000)
    weight[[2999, 5]] = 9
    kept = heaviest(weight)
    assert len(kept) == 2000
    assert {5, 2999} <= set(kept.tolist())
    assert np.all(np.diff(kept) > 0)


def test_the_words_are_splitmix64s():
    # The first five of seed 1234567, as published with Java's SplittableRandom and by Vigna.
    assert Uniform(1234567).words(5).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_draws_are_uniform_and_go_on_where_they_stopped():
    uniform = Uniform(9)
    drawn = np.concatenate([uniform.draw(3, 1000).ravel() for _ in range(10)])
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert np.unique(drawn).size == drawn.size
    counts = np.histogram(drawn, 20, (0, 1))[0]
    assert np.sum((counts - 1500) ** 2 / 1500) < 43.8  # chi-square, 19 degrees of freedom, 0.1 %
    assert np.array_equal(Uniform(9).draw(30_000), drawn)
