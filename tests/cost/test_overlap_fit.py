from dataclasses import replace

import numpy as np
import pytest

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig
from lagom_overlap.cost.overlap_fit import (
    FittedOverlap,
    Observation,
    OverlapConstants,
    OverlapTimes,
    Way,
    WayConstants,
    comp_alone_from_makespan,
    fit_overlaps,
    infer_from_default,
    num_slices,
    predict,
    scaled,
    work_and_wait,
)
from lagom_overlap.units import MIB

AG, RS = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
NATIVE = CommConfig()


def ways(*numbers):
    return WayConstants(**dict(zip(WayConstants.__slots__, numbers, strict=True)))


CONSTANTS = OverlapConstants(
    ways={
        Way(AG, True): ways(0.7e-9, 0.5e-3, 0.9e-9, 2e-3),
        Way(RS, True): ways(1.6e-9, 0.8e-3, 0.7e-9, 6e-3),
        Way(AG, False): ways(1.4e-9, 0, 0.7e-9, 0),
        Way(RS, False): ways(2.4e-9, 0, 0.9e-9, 0),
    },
    channel_power=0.6,
    queueing=1.5,
)


def overlap(alone_s, *comms, starts=()):
    return FittedOverlap(
        comp_alone_s=alone_s,
        collectives=tuple(Collective(kind, mib * MIB, 2) for kind, mib, _ in comms),
        configs=tuple(config for _, _, config in comms),
        starts=starts,
    )


def sliced(channels, mib):
    return CommConfig(num_channels=channels, chunk_bytes=mib * MIB)


def brute_force(held, constants, step_s=2e-6):
    """The same overlap walked through in small steps of time."""
    now, done, makespan, comp_end = 0.0, 0.0, 0.0, None
    pending = list(zip(held.collectives, held.configs, held.starts, strict=True))
    progress = 0.0
    while pending or done < held.comp_alone_s:
        computes = done < held.comp_alone_s
        runs = bool(pending) and done >= pending[0][2] * held.comp_alone_s - 1e-12
        rate = 1.0
        if runs:
            work, wait = work_and_wait(pending[0][0], pending[0][1], constants)
            whole = constants.queueing * work + wait if computes else work + wait
            rate = 1 - work / whole if computes else 0.0
            progress += step_s / whole
        now += step_s
        if computes:
            done += rate * step_s
            if done >= held.comp_alone_s:
                comp_end = now
        if runs and progress >= 1:
            pending, progress, makespan = pending[1:], 0.0, now
    return max(makespan, comp_end or 0.0), comp_end or 0.0


@pytest.mark.parametrize("alone_s", [0.0, 0.02, 0.1, 0.4])
@pytest.mark.parametrize("starts", [(0.0, 0.0), (0.25, 0.5)])
def test_a_prediction_equals_a_walk_in_small_steps(alone_s, starts):
    held = overlap(alone_s, (AG, 32, sliced(2, 8)), (RS, 16, NATIVE), starts=starts)
    found = predict(held, CONSTANTS)
    assert (found.makespan_s, found.comp_s) == pytest.approx(brute_force(held, CONSTANTS), abs=5e-4)


def test_a_hidden_collective_costs_the_computation_its_work():
    work, wait = work_and_wait(Collective(AG, 32 * MIB, 2), sliced(4, 8), CONSTANTS)
    found = predict(overlap(10.0, (AG, 32, sliced(4, 8))), CONSTANTS)
    assert found.makespan_s == found.comp_s == pytest.approx(10 + work)
    assert found.comm_s[0] == pytest.approx(1.5 * work + wait)


def test_slices_and_channels_are_counted_by_hand():
    collective = Collective(AG, 33 * MIB, 2)
    assert num_slices(collective, sliced(8, 16)) == 3
    work, wait = work_and_wait(collective, sliced(8, 16), CONSTANTS)
    assert work == pytest.approx(0.7e-9 * 33 * MIB + 3 * 0.5e-3)
    assert wait == pytest.approx((0.9e-9 * 33 * MIB + 3 * 2e-3) / 3**0.6)  # three slices fill three channels


SETTINGS = (NATIVE, sliced(1, 8), sliced(2, 2), sliced(4, 2), sliced(4, 16), sliced(1, 64))


def observations(noise, configs=SETTINGS):
    rng = np.random.default_rng(3)
    shapes = [
        (0.0, ((AG, 32),)),
        (0.0, ((RS, 32),)),
        (0.1, ((AG, 32), (RS, 32))),
        (0.3, ((RS, 16), (AG, 48))),
        (0.2, ((AG, 48),)),
        (0.2, ((RS, 48),)),
    ]
    found = []
    for alone_s, comms in shapes:
        for config in configs:
            held = overlap(alone_s, *((kind, mib, config) for kind, mib in comms))
            times = predict(held, CONSTANTS)
            factor = np.exp(noise * rng.standard_normal(4)).tolist()
            comm_s = tuple(x * f for x, f in zip(times.comm_s, factor[2:], strict=False))
            found.append(
                Observation(held, OverlapTimes(times.makespan_s * factor[0], times.comp_s * factor[1], comm_s))
            )
    return found


def test_known_constants_are_recovered_from_noisy_overlaps():
    fit = fit_overlaps(observations(0.03))
    truth = {f"{way} {name}": getattr(held, name) for way, held in CONSTANTS.ways.items() for name in held.__slots__}
    truth |= {"channel_power": 0.6, "queueing": 1.5}
    assert fit.mean_abs_error < 0.05
    known = [held for held in fit.table if held.identified]
    assert len(known) >= 10
    for held in known:
        assert held.value == pytest.approx(truth[held.name], rel=max(0.1, 4 * held.error)), held.name


def test_held_out_shapes_and_settings_are_predicted():
    fit = fit_overlaps(observations(0.03))
    unseen = overlap(0.25, (AG, 24, sliced(2, 4)), (RS, 40, sliced(4, 4)))
    assert predict(unseen, fit.constants).makespan_s == pytest.approx(predict(unseen, CONSTANTS).makespan_s, rel=0.05)


def test_one_default_setting_cannot_tell_slices_from_bytes():
    fit = fit_overlaps(observations(0.01, configs=(sliced(2, 64),)))
    assert {"all_gather sliced work_s_per_byte", "all_gather sliced work_s_per_slice"} & set(fit.unidentified)
    assert "channel_power" in fit.unidentified


def test_the_computation_alone_is_inferred_from_one_default_run():
    default = overlap(0.17, (AG, 32, NATIVE), (RS, 32, NATIVE))
    makespan_s = predict(default, CONSTANTS).makespan_s
    blind = replace(default, comp_alone_s=0.0)
    assert comp_alone_from_makespan(blind, CONSTANTS, makespan_s) == pytest.approx(0.17, rel=1e-4)


@pytest.mark.parametrize(("dearer", "alone_s"), [(0.6, 0.25), (1.0, 0.25), (1.7, 0.25), (7.0, 2.0)])
def test_what_the_default_costs_in_this_job_is_read_from_its_own_times(dearer, alone_s):
    costly = {
        way: held if way.sliced else ways(*(dearer * getattr(held, name) for name in held.__slots__))
        for way, held in CONSTANTS.ways.items()
    }
    default = overlap(alone_s, (AG, 32, NATIVE), (RS, 32, NATIVE))
    times = predict(default, replace(CONSTANTS, ways=costly))
    blind = replace(default, comp_alone_s=0.0)
    assert infer_from_default(blind, CONSTANTS, times).comp_alone_s == pytest.approx(alone_s, rel=0.005)
    assert infer_from_default(blind, CONSTANTS, times).scale == pytest.approx(dearer, rel=0.01)


def test_on_a_busier_machine_work_grows_with_the_scale_and_a_slices_wait_with_its_root():
    dearer = scaled(CONSTANTS, 4.0)
    for way, held in CONSTANTS.ways.items():
        assert dearer.ways[way].work_s_per_byte == pytest.approx(4 * held.work_s_per_byte)
        assert dearer.ways[way].work_s_per_slice == pytest.approx(4 * held.work_s_per_slice)
        assert dearer.ways[way].wait_s_per_byte == pytest.approx(4 * held.wait_s_per_byte)
        assert dearer.ways[way].wait_s_per_slice == pytest.approx(2 * held.wait_s_per_slice)


def test_a_makespan_shorter_than_its_collectives_says_nothing():
    with pytest.raises(ValueError, match="alone"):
        comp_alone_from_makespan(overlap(0.0, (AG, 32, NATIVE)), CONSTANTS, 1e-3)


def test_a_way_that_was_never_measured_is_no_guess():
    fit = fit_overlaps(observations(0.0, configs=(sliced(1, 8), sliced(2, 2))))
    with pytest.raises(KeyError):
        predict(overlap(0.1, (AG, 32, NATIVE)), fit.constants)
