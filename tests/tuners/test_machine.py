"""The models of the machine: forms, fits and surrogates, against closed forms and a plain implementation."""

from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest
from foreign_overlap import CHANNELS, CHUNKS, DEFAULT, SPACE, overlap
from machine_reference import Beside, Pace, comm_times, finish_times, fit, fit_body, fit_wire
from machine_reference import Surrogate as PlainSurrogate
from machine_reference import Wires as PlainWires
from toy_overlap import problem

from lagom_overlap.collective import Algorithm, CommConfig, ConfigSpace, Protocol, Subspace, Transport
from lagom_overlap.tuners.machine.group_model import (
    HOST_TOLL,
    MISFITS,
    NUM_PARAMS,
    TOLL_SD,
    Evidence,
    GroupModel,
    Knowledge,
    Prior,
    Wires,
    compute_model_of,
    wire_prior,
)
from lagom_overlap.tuners.machine.posterior import Lesson, Pool, Posterior, first_posterior
from lagom_overlap.tuners.machine.search_space import (
    Floats,
    Record,
    Surfaces,
    implementation,
    lattice_of,
    record_of,
    search_space_of,
    usual,
)
from lagom_overlap.tuners.machine.surrogate import Allocation, Surrogate
from lagom_overlap.tuners.problem import Measurement
from lagom_overlap.workload import CompOp, Kernel


def test_a_fit_of_a_straight_line_is_the_closed_form() -> None:
    # Observed a + b t with sd 1 and a wide prior: ordinary least squares.
    t, observed = np.arange(5.0), np.array([1.0, 3.1, 4.9, 7.2, 8.8])

    def predict(params: Floats) -> Floats:
        return params[..., 0, None] + params[..., 1, None] * t

    wide = Prior(np.zeros(2), np.full(2, 1e4))
    found = fit(predict, observed, sd=np.ones(5), prior=wide, start=np.zeros((1, 2)))
    slope, offset = np.polyfit(t, observed, 1)
    assert found.params[0] == pytest.approx([offset, slope], abs=1e-6)
    design = np.stack([np.ones(5), t], axis=1)
    assert found.covariance[0] == pytest.approx(np.linalg.inv(design.T @ design), rel=1e-3)


def test_computations_beside_collectives_take_what_is_worked_by_hand() -> None:
    # Two kernels of 1 s and 3 s; during the first collective (1 s) twice as long, during the second (4 s) 1.5 times.
    # After 1 s: half of kernel 0 is done. It ends 0.75 s into the second; of kernel 1, 3.25 s at 1.5 are 2.1667 s.
    # The rest of it, 0.8333 s, runs alone: Y = 5.8333 s.
    pace = Pace.of(np.array([1.0, 3.0]))
    under = [np.array([[2.0, 6.0]]), np.array([[1.5, 4.5]])]
    finish = finish_times(pace, under, [np.array([1.0]), np.array([4.0])])
    assert finish == pytest.approx([5 + 3 - 3.25 / 1.5])


def test_computations_that_end_before_the_communication_are_not_slowed_any_more() -> None:
    pace = Pace.of(np.array([1.0]))
    assert finish_times(pace, [np.array([[1.5]])], [np.array([9.0])]) == pytest.approx([1.5])


def test_the_wire_tends_to_latency_plus_bytes_over_the_link() -> None:
    prior = wire_prior(lattice_of(SPACE, DEFAULT, [implementation(DEFAULT)]), np.array([1e8]), np.array([1e-2]))
    params = prior.mean.copy()
    params[[3, 6, 7]] = np.log(2e-5), -50.0, 0.0
    kind = np.zeros(1, dtype=np.intp)
    time_s = comm_times(params, np.array([1e8]), np.array([1e6]), np.array([1e9]), kind)
    assert time_s == pytest.approx(2e-5 + 1e8 / np.exp(params[0]), rel=1e-3)


def model_of(
    num_comms: int,
    num_runs: int,
    seed: int = 1,
    *,
    space: ConfigSpace = SPACE,
    knowledge: Knowledge = Knowledge.GRIDS,
) -> tuple[GroupModel, Record]:
    """The toy, with kernels where their grids are to be known, measured without noise at random places."""
    default = next(iter(space)) if space is not SPACE else DEFAULT
    made = problem(space, num_comms=num_comms, default=default)
    computations = tuple(CompOp(name=f"k{i}", work=work) for i, work in enumerate(_kernels()))
    if knowledge is Knowledge.GRIDS:
        made = replace(made, group=replace(made.group, computations=computations))
    search_space, run, rng = search_space_of(made, Surfaces()), overlap(num_comms), Random(seed)
    runs = {}
    for _ in range(num_runs):
        places = tuple(rng.randrange(len(lattice)) for lattice in search_space.lattices)
        outcome = run("g", search_space.assignment_at(places))
        assert isinstance(outcome, Measurement)
        runs[places] = [outcome]
    compute_model = compute_model_of(made.group, 32, 2e-3, by_host=knowledge is Knowledge.HOST)
    return GroupModel(search_space, compute_model), record_of(runs)


def prior_of(model: GroupModel, record: Record) -> Prior:
    return wire_prior(model.search_space.lattices[0], model.search_space.wire_bytes, record.comm_s[0])


def belief_of(num_comms: int, num_runs: int, pool: Pool, name: str, seed: int = 1) -> tuple[Posterior, Record]:
    model, record = model_of(num_comms, num_runs, seed)
    posterior = Posterior(model, prior_of(model, record), "w")
    posterior.update(record, 1e-3, pool, name)
    return posterior, record


def surrogate_of(num_comms: int) -> Surrogate:
    posterior, _ = belief_of(num_comms, 3, Pool(), "g")
    return posterior.surrogate()


def _kernels() -> tuple[Kernel, ...]:
    return (
        Kernel(num_blocks=600, blocks_per_sm=1, wave_s=1e-4, block_bytes=1e3),
        Kernel(num_blocks=300, blocks_per_sm=1, wave_s=2e-4, block_bytes=1e4),
    )


def test_a_surrogate_follows_what_was_measured() -> None:
    posterior, record = belief_of(2, 4, Pool(), "g")
    comm_s, comp_s = posterior.surrogate().times(record.places)
    assert comm_s == pytest.approx(record.comm_s.sum(axis=1), rel=0.01)
    assert comp_s == pytest.approx(record.comp_s, rel=0.02)


def test_a_group_that_hears_of_others_on_its_wire_surrogates_better() -> None:
    run, places = overlap(1), np.arange(len(SPACE))[:, None]
    truth = np.array([run("g", (config,)).comm_s[0] for config in SPACE])  # type: ignore[union-attr]

    def error(pool: Pool) -> float:
        posterior, _ = belief_of(1, 1, pool, "late", seed=7)
        comm_s, _ = posterior.surrogate().times(places)
        return float(np.abs(np.log(comm_s / truth)).mean())

    taught = Pool()
    for seed in range(4):
        belief_of(1, 5, taught, f"early{seed}", seed)
    assert error(taught) < 0.7 * error(Pool())


def test_allocation_finds_the_best_of_all_pairs_of_its_candidates() -> None:
    surrogate = surrogate_of(2)
    found = Allocation(surrogate, [set(), set()], 0.0).best([])
    assert found is not None
    pairs = np.array(list(product(*(front.tolist() for front in surrogate.fronts))))
    assert surrogate.makespans(found[None])[0] == pytest.approx(surrogate.makespans(pairs).min(), rel=1e-9)


def test_allocation_of_three_is_within_a_percent_of_the_best_of_all_triples() -> None:
    surrogate = surrogate_of(3)
    found = Allocation(surrogate, [set(), set(), set()], 0.03).best([[0, 0, 0]])
    assert found is not None
    triples = np.array(list(product(*(front.tolist() for front in surrogate.fronts))))
    assert surrogate.makespans(found[None], 0.03)[0] <= 1.01 * surrogate.makespans(triples, 0.03).min()


def test_candidates_lose_hardly_anything_of_the_whole_lattice() -> None:
    surrogate = surrogate_of(1)
    places = np.arange(len(SPACE))[:, None]
    makespans = surrogate.makespans(places)
    assert makespans[surrogate.fronts[0]].min() <= 1.002 * makespans.min()


def test_barred_places_are_not_allocated() -> None:
    surrogate = surrogate_of(1)
    free = Allocation(surrogate, [set()], 0.0).best([[0]])
    assert free is not None
    excluded = Allocation(surrogate, [{int(free[0])}], 0.0).best([[0]])
    assert excluded is not None
    assert int(excluded[0]) != int(free[0])


# The library against the plain model

KINDS = ConfigSpace(
    tuple(
        Subspace(algorithm=Algorithm.RING, protocol=protocol, num_channels=CHANNELS, chunk_bytes=CHUNKS)
        for protocol in (Protocol.SIMPLE, Protocol.LL128, Protocol.LL)
    )
)


@pytest.mark.parametrize("knowledge", Knowledge)
@pytest.mark.parametrize(("num_comms", "space"), [(1, SPACE), (3, SPACE), (3, KINDS)])
def test_the_library_fits_what_the_plain_model_fits(num_comms: int, space: ConfigSpace, knowledge: Knowledge) -> None:
    # Times that the model can explain, nearly: as the plain one has them under other constants than the prior's.
    model, record = model_of(num_comms, 5, space=space, knowledge=knowledge)
    misfit = MISFITS[knowledge]
    prior, rng = prior_of(model, record), np.random.default_rng(1)
    wire = prior.mean + prior.sd * rng.standard_normal(len(prior.mean))
    true_s = PlainWires(model.search_space, record, wire, 10.0, misfit).comm_s
    comm_s = np.array([[true_s[j][place] for j, place in enumerate(row)] for row in record.places])
    record = replace(record, comm_s=comm_s * np.exp(0.01 * rng.standard_normal(comm_s.shape)))
    found = Evidence(model, record, 0.01).fit_wire(prior, prior.mean)
    plain = fit_wire(model.search_space, record, 0.01, prior, prior.mean, misfit)
    assert found.cost[0] == pytest.approx(plain.cost[0], rel=0.002)
    assert (found.params[0] - plain.params[0]) / prior.sd == pytest.approx(0, abs=0.05)
    assert np.sqrt(np.diagonal(found.covariance[0]) / np.diagonal(plain.covariance[0])) == pytest.approx(1, rel=0.02)
    own, sms = model.compute_model.prior, np.array([len(model.compute_model.sm_counts) // 2])
    truth = Beside(
        compute_model=model.compute_model, sms=sms[0], params=own.mean + own.sd * rng.standard_normal(NUM_PARAMS)
    )
    plain_body = PlainSurrogate(model.search_space, record, 0.01, wire=plain.params[0], beside=truth)
    record = replace(record, comp_s=plain_body.uncorrected_s(record.places) * (1 + 0.01 * rng.standard_normal(5)))
    evidence, start = Evidence(model, record, 0.01), own.mean[None]
    body = evidence.fit_body(Wires(evidence, plain.params[0]), sms, own, start)
    like = fit_body(model.search_space, record, 0.01, model.compute_model, sms, own, start, plain.params[0])
    assert body.cost == pytest.approx(like.cost, rel=0.01)


@pytest.mark.parametrize(
    ("num_comms", "num_runs", "space"), [(1, 3, SPACE), (4, 6, SPACE), (2, 4, KINDS), (9, 5, SPACE)]
)
@pytest.mark.parametrize("knowledge", Knowledge)
@pytest.mark.parametrize("seed", range(3))
def test_the_library_surrogates_what_the_plain_model_surrogates(
    num_comms: int, num_runs: int, space: ConfigSpace, seed: int, knowledge: Knowledge
) -> None:
    model, record = model_of(num_comms, num_runs, seed, space=space, knowledge=knowledge)
    sm = len(model.compute_model.sm_counts) // 2
    rng, prior, sigma = np.random.default_rng(seed), prior_of(model, record), 0.02
    wire = prior.mean + 0.5 * prior.sd * rng.standard_normal(len(prior.mean))
    body = model.compute_model.prior.mean + 0.5 * model.compute_model.prior.sd * rng.standard_normal(NUM_PARAMS)
    evidence = Evidence(model, record, sigma)
    wires = Wires(evidence, wire)
    plain_s = PlainWires(model.search_space, record, wire, sigma, MISFITS[knowledge]).comm_s
    assert wires.comm_s == pytest.approx(np.array(plain_s), rel=1e-9)
    surrogate = Surrogate(evidence, wires, sm, body)
    beside = Beside(compute_model=model.compute_model, sms=np.array(sm), params=body)
    plain = PlainSurrogate(model.search_space, record, sigma, wire=wire, beside=beside)
    places = rng.integers(0, len(model.search_space.lattices[0]), (200, num_comms))
    for found, expected in zip(surrogate.times(places), plain.times(places), strict=True):
        assert found == pytest.approx(expected, rel=1e-9)
    assert set(surrogate.fronts[0].tolist()) == plain.front(0)


# Who pays for chunks, and steps that nobody told of

GLOO = ConfigSpace((Subspace(num_channels=(1, 2, 4, 8), chunk_bytes=(2**19, 2**21, 2**23)),))
SLICE_S = 2e-4


def sliced(num_channels: int, chunk_bytes: int) -> tuple[float, float]:
    """X and Y of 32 MiB whose every slice takes time from the cores that compute: both fall with the slice."""
    num_slices = 2**25 / chunk_bytes
    comm_s = 0.02 + 1.6 * SLICE_S * num_slices / num_channels
    beside = min(1.0, 0.05 / comm_s)
    return comm_s, 0.05 + SLICE_S * num_slices * beside


def times_after(places: list[tuple[int, int]]) -> tuple[Floats, Floats, Floats]:
    """The surrogates X and Y of all places after measurements at some (channels, chunk), and the true Y."""
    made = problem(GLOO)
    search_space = search_space_of(made, Surfaces())
    number = {
        (config.num_channels, config.chunk_bytes): place
        for place, config in enumerate(search_space.lattices[0].configs)
    }
    runs = {}
    for place in places:
        comm_s, comp_s = sliced(*place)
        runs[number[place],] = [Measurement(makespan_s=max(comm_s, comp_s), comp_s=comp_s, comm_s=(comm_s,))]
    posterior = first_posterior(made, search_space, next(iter(runs.values()))[0])
    posterior.update(record_of(runs), 0.01, Pool(), "g")
    comm_s, comp_s = posterior.surrogate().times(np.arange(len(number))[:, None])
    return comm_s, comp_s, np.array([sliced(*place)[1] for place in number])


def test_where_slices_take_the_processor_a_larger_one_is_surrogate_to_be_gentler() -> None:
    # Four of twelve places, none with the largest slice at 2 or 8 channels.
    _, comp_s, true_s = times_after([(4, 2**21), (2, 2**19), (8, 2**19), (4, 2**23)])
    by_chunk, true = comp_s.reshape(4, 3), true_s.reshape(4, 3)
    assert (np.diff(by_chunk[1:], axis=1) < 0).all()
    assert np.abs(np.log(by_chunk / true)).mean() < 0.05


def test_on_a_gpu_next_to_nothing_is_believed_of_a_toll_per_chunk() -> None:
    made = problem(GLOO)
    gpu, host = (compute_model_of(made.group, 8, 1e-3, by_host=by_host).prior for by_host in (False, True))
    assert (gpu.mean[-1], gpu.sd[-1]) == (0.0, TOLL_SD)
    assert (host.mean[-1], host.sd[-1]) == HOST_TOLL
    assert 0.1 * min(HOST_TOLL) > TOLL_SD


def test_collectives_in_slices_without_algorithms_are_made_by_the_host() -> None:
    ring = ConfigSpace((Subspace(algorithm=Algorithm.RING, num_channels=CHANNELS, chunk_bytes=CHUNKS),))
    siblings = ConfigSpace((Subspace(num_channels=CHANNELS),))
    for space, knowledge in ((GLOO, Knowledge.HOST), (ring, Knowledge.NONE), (siblings, Knowledge.NONE)):
        made = problem(space, default=next(iter(space)))
        once = Measurement(makespan_s=1.0, comp_s=1.0, comm_s=(0.5,))
        assert first_posterior(made, search_space_of(made, Surfaces()), once).compute_model.knowledge is knowledge


def test_what_steps_at_a_number_of_channels_is_expected_at_every_chunk_of_it() -> None:
    # Unknown waves: 30 % longer than the curve at 8 channels; what is said of 8 channels and another chunk follows, of
    # half the channels little.
    model, record = model_of(1, 1, knowledge=Knowledge.NONE)
    lattice, prior = model.search_space.lattices[0], model.compute_model.prior
    wanted = ((8, 2**21), (8, 2**15), (2, 2**21))
    places = [lattice.place[replace(DEFAULT, num_channels=nc, chunk_bytes=chunk)] for nc, chunk in wanted]
    record = replace(record, places=np.array([places[:1]], dtype=np.intp), comm_s=np.array([[2e-3]]))

    def times(comp_s: float) -> Floats:
        evidence = Evidence(model, replace(record, comp_s=np.array([comp_s])), 1e-3)
        wires = Wires(evidence, prior_of(model, record).mean)
        return Surrogate(evidence, wires, 0, prior.mean).times(np.array(places)[:, None])[1]

    moved = np.log(times(2.6e-3) / times(2e-3)) / np.log(1.3)
    assert moved[0] > 0.95
    assert moved[1] > 0.7
    assert moved[2] < 0.5


def test_what_a_group_learns_moves_the_prior_of_another_but_not_its_own() -> None:
    prior = Prior(np.zeros(2), np.ones(2))
    pool = Pool()
    pool.learn("wire", "a", Lesson(precision=np.array([100.0, 1e-9]), mean=np.array([0.5, 9.0]), prior_sd=np.ones(2)))
    assert pool.prior("wire", "a", prior) is None
    assert pool.prior("another wire", "b", prior) is None
    taught = pool.prior("wire", "b", prior)
    assert taught is not None
    # Weight 1 / (1/100 + 1/16) against the prior's 1.
    weight = 1 / (0.01 + 0.0625)
    assert taught.mean[0] == pytest.approx(0.5 * weight / (1 + weight))
    assert taught.mean[1] == pytest.approx(0.0, abs=1e-6)
    assert taught.sd[0] < 0.4
    assert taught.sd[1] == pytest.approx(1.0)


def test_a_groups_prior_holds_what_the_others_know_now_and_nothing_of_its_own() -> None:
    prior, rng = Prior(np.zeros(2), np.ones(2)), np.random.default_rng(1)

    def lesson() -> Lesson:
        return Lesson(precision=rng.uniform(1, 50, 2), mean=rng.normal(size=2), prior_sd=np.ones(2))

    last = {name: lesson() for name in "abc"}
    pool, others = Pool(), Pool()
    for name in "abcabc":
        pool.learn("wire", name, lesson())
    for name, each in last.items():
        pool.learn("wire", name, each)
    for name in "bc":
        others.learn("wire", name, last[name])
    found, expected = pool.prior("wire", "a", prior), others.prior("wire", "new", prior)
    assert found is not None
    assert expected is not None
    assert found.mean == pytest.approx(expected.mean, rel=1e-9)
    assert found.sd == pytest.approx(expected.sd, rel=1e-9)


def test_a_huge_space_is_thinned_and_keeps_its_ends_and_the_default() -> None:
    default = CommConfig(num_channels=37, num_threads=320, chunk_bytes=2048 * 77)
    space = ConfigSpace(
        (
            Subspace(
                num_channels=tuple(range(1, 129)),
                num_threads=tuple(range(96, 641, 32)),
                chunk_bytes=tuple(2048 * k for k in range(1, 1025)),
            ),
        )
    )
    lattice = lattice_of(space, default, [(None, None, None)])
    assert len(lattice) < 600
    assert default in lattice.place
    assert {config.num_channels for config in lattice.configs} >= {1, 128, 37}
    assert {config.num_threads for config in lattice.configs} == {320}
    assert all(config in space for config in lattice.configs)


def test_what_has_no_knobs_is_one_place_that_nearly_fills_the_link() -> None:
    channels = Subspace(num_channels=CHANNELS, chunk_bytes=CHUNKS)
    offered = ConfigSpace((channels, Subspace(transport=Transport.COPY_ENGINE)))
    kinds = [(None, None, None), (None, None, Transport.COPY_ENGINE)]
    lattice = lattice_of(offered, CommConfig(num_channels=8, chunk_bytes=2**21), kinds)
    assert (lattice.channels[-1], lattice.chunk_bytes[-1]) == (1, CHUNKS[-1])
    wire_bytes = np.array([2.0**28])
    prior = wire_prior(lattice, wire_bytes, np.array([1e-3]))
    times_s = comm_times(prior.mean, wire_bytes, lattice.channels, lattice.chunk_bytes, lattice.kind)
    assert times_s[-1] < 1.2 * times_s.min()


def test_usual_is_the_mean_of_repeats_without_those_of_a_late_rank() -> None:
    assert usual([3.0]) == 3.0
    assert usual([1.0, 1.1]) == pytest.approx(1.05)
    assert usual([1.0, 1.5]) == 1.0
    assert usual([1.5, 1.0, 1.04]) == pytest.approx(1.02)
