from dataclasses import replace

import pytest
from toy_tuning import changed

from lagom_overlap.collective import CommConfig
from lagom_overlap.report.tune.cells import sentences
from lagom_overlap.report.tune.verdict_words import (
    busy_sentence,
    change_text,
    config_text,
    fixed_sentence,
    headline,
    knob_text,
    next_commands,
    ratio_text,
    share_sentence,
)
from lagom_overlap.tuners.sequential import Decision, Judgement
from lagom_overlap.tuners.verdict import NO_PAIRS, PairedRatio, Verdict, judge
from lagom_overlap.units import MIB

EIGHTEEN = PairedRatio(num_pairs=13, median_ratio=1.18, q25=1.15, q75=1.21, num_wins=13)


def verdict_of(ratio: PairedRatio, adopted: bool, **baselines: PairedRatio) -> Verdict:
    makespans = {"default": (1.0,) * 13, "tuned": (1.0,) * 13}
    return Verdict(
        over_default=ratio, over_baselines=baselines, best_fixed=None, adopted=adopted, makespans_s=makespans
    )


def test_an_adopted_verdict_is_one_sentence_with_all_its_numbers(report):
    text = headline(changed(report, verdict=verdict_of(EIGHTEEN, adopted=True)))
    assert text == (
        "Tuned is 1.18× faster than the native PyTorch call "
        "(median of 13 shuffled pairs, quartiles 1.15–1.21, 13/13 wins): adopted."
    )


def test_a_prediction_has_a_sentence_of_its_own_and_adopts_nothing(report):
    predicted = changed(
        report,
        backend="predicted_from_trace",
        verdict=verdict_of(EIGHTEEN, adopted=True, engine_default=EIGHTEEN),
        arm_words={"default": "what the trace ran (simulated)"},
    )
    assert headline(predicted) == (
        "A prediction, not an A/B: tuned would be 1.18× faster than what the trace ran (simulated). "
        "Nothing was run; only an A/B on the machine can adopt a setting."
    )
    assert sentences(predicted) == ()
    defaults = {problem.group.name: problem.default for problem in report.search.problems}
    assert "the search found nothing better than what the trace ran" in headline(
        changed(predicted, recommended=defaults)
    )


@pytest.mark.parametrize(
    ("backend", "description"),
    [("simulated", "simulated: A40"), ("fake_nccl", "fake NCCL 2.30"), ("recorded", "replayed: simulated: A40")],
)
def test_what_a_model_favours_is_predicted_and_never_adopted(report, backend, description):
    verdict = verdict_of(EIGHTEEN, adopted=True)
    text = headline(changed(report, verdict=verdict, backend=backend, backend_description=description))
    assert text.startswith("Predicted, not measured: tuned is 1.18× faster than")
    assert "adopted" not in text
    assert text.endswith("Only an A/B on the machine can adopt it.")


def test_a_gain_that_the_test_cannot_tell_is_said_not_to_be_adopted_and_why(report):
    ratio = PairedRatio(num_pairs=11, median_ratio=1.03, q25=0.996, q75=1.06, num_wins=7)
    unclear = Judgement(
        decision=Decision.NO_DIFFERENCE,
        num_pairs=11,
        ratio=1.03,
        low=0.98,
        high=1.07,
        noise=0.012,
        alpha=0.01,
        min_effect=0.005,
    )
    text = headline(changed(report, verdict=replace(verdict_of(ratio, adopted=False), judgement=unclear)))
    assert text == (
        "Not adopted: tuned is not measurably different from the native PyTorch call: 1.030× its speed "
        "(median of 11 shuffled pairs, quartiles 0.996–1.060, 7/11 wins). "
        "By the sequential test tuned is not proven faster or slower in 11 pairs: 1.030x (0.980 to 1.070); "
        "equal runs differ by 1.20 %. Nothing was changed."
    )


@pytest.mark.parametrize(
    ("backend", "description", "lines"),
    [
        ("gloo", "gloo", ["lagom run --online"]),
        ("nccl", "nccl", ["lagom run --config there", "lagom export there --format plugin", "# to undo"]),
        ("simulated", "simulated: A40", ["lagom run --online", "lagom run --config there", "# to undo"]),
        ("recorded", "replayed: simulated: A40", ["lagom run --online", "lagom run --config there", "# to undo"]),
    ],
)
def test_what_was_adopted_says_how_it_is_used_and_undone(report, backend, description, lines):
    adopted = verdict_of(EIGHTEEN, adopted=True)
    found = changed(report, verdict=adopted, backend=backend, backend_description=description)
    said = next_commands(found, "there")
    assert len(said) == len(lines)
    assert all(line.startswith(start) for line, start in zip(said, lines, strict=True))
    defaults = {problem.group.name: problem.default for problem in report.search.problems}
    for nothing in (changed(found, verdict=verdict_of(EIGHTEEN, adopted=False)), changed(found, recommended=defaults)):
        assert next_commands(nothing, "there")[0].endswith("nothing better was found here")
    assert next_commands(changed(found, interrupted=True), "there")[0].startswith("lagom resume there ")


def test_a_loss_is_called_slower(report):
    ratio = PairedRatio(num_pairs=11, median_ratio=0.87, q25=0.85, q75=0.9, num_wins=0)
    text = headline(changed(report, verdict=verdict_of(ratio, adopted=False)))
    assert text.startswith("Not adopted: tuned is slower than the native PyTorch call: 0.87× its speed (")


def test_a_search_that_ends_at_the_default_claims_nothing(report):
    defaults = {problem.group.name: problem.default for problem in report.search.problems}
    assert headline(changed(report, recommended=defaults)) == (
        "Not adopted: the search found nothing better than the native PyTorch call, which stays."
    )


def test_an_interrupted_run_says_so_and_counts_the_searchs_measurements_only(make_report):
    report = make_report(with_verdict=False)
    num = len(report.search.entries)
    assert f"interrupted after {num} measurements of the search" in headline(report)
    assert "interrupted" not in headline(changed(report, interrupted=False))


def test_a_tuned_assignment_that_failed_in_the_rounds_is_not_adopted(report):
    verdict = judge(
        {"default": (1.0, 1.0, 1.0), "tuned": (), "engine_default": (1.0, 1.0, 1.0)},
        tuned_differs=True,
        failures={"tuned": "no memory"},
    )
    assert verdict.over_default == NO_PAIRS
    failed = changed(report, verdict=verdict)
    assert headline(failed) == ("Not adopted: tuned failed in the A/B (no memory). The native PyTorch call stays.")
    assert share_sentence(failed) == ""
    assert fixed_sentence(failed) == ""


def test_engine_and_tuning_multiply_to_the_whole_where_times_are_exact(report):
    default, engine, tuned = (1.2,) * 11, (1.1,) * 11, (1.0,) * 11
    verdict = judge({"default": default, "engine_default": engine, "tuned": tuned}, tuned_differs=True, failures={})
    share = changed(report, verdict=verdict).engine_share
    assert share.engine.median_ratio * share.tuning.median_ratio == pytest.approx(share.whole.median_ratio)
    text = share_sentence(changed(report, verdict=verdict))
    assert "Engine alone (the engine's whole-message setting): 1.09× faster than the native PyTorch call" in text
    assert "Tuning alone: 1.10× faster than that" in text


def test_without_another_engine_the_whole_difference_is_tuning(report):
    text = share_sentence(changed(report, verdict=verdict_of(EIGHTEEN, adopted=True)))
    assert text.endswith("so the whole difference is tuning.")


def test_an_engine_that_failed_in_the_rounds_leaves_the_shares_unknown(report):
    verdict = replace(verdict_of(EIGHTEEN, adopted=True), failures={"engine_default": "no memory"})
    text = share_sentence(changed(report, verdict=verdict))
    assert "is not known" in text
    assert "no memory" in text


def test_the_best_fixed_setting_is_named(report):
    verdict = replace(verdict_of(EIGHTEEN, adopted=True, fixed_max=EIGHTEEN), best_fixed="fixed_max")
    assert fixed_sentence(changed(report, verdict=verdict)) == (
        "Tuned is 1.18× faster than all knobs maximal, the best setting without a search "
        "(quartiles 1.15–1.21, 13/13 wins)."
    )
    even = replace(EIGHTEEN, median_ratio=0.98, q25=0.97, q75=1.02)
    verdict = replace(verdict_of(EIGHTEEN, adopted=True, fixed_max=even), best_fixed="fixed_max")
    assert fixed_sentence(changed(report, verdict=verdict)).startswith(
        "Tuned is no better than all knobs maximal, the best setting without a search: "
    )


@pytest.mark.parametrize(
    ("ratio", "text"), [(1.18, "1.18×"), (0.5, "0.50×"), (1.004, "1.004×"), (0.9996, "1.000×"), (2.0, "2.00×")]
)
def test_ratios_near_one_get_a_third_digit(ratio, text):
    assert ratio_text(ratio) == text


def test_changes_are_signed_per_cents():
    assert change_text(2.0, 1.0) == "-50.0 %"
    assert change_text(1.0, 1.25) == "+25.0 %"
    assert change_text(1.0, 1.0) == "0.0 %"
    assert change_text(None, 1.0) == change_text(1.0, None) == change_text(0.0, 1.0) == ""


def test_a_knob_that_the_engine_decides_is_auto():
    assert knob_text(CommConfig(), "chunk_bytes") == "auto"
    assert config_text(CommConfig()) == "untouched"
    assert config_text(CommConfig(num_channels=8, chunk_bytes=2 * MIB)) == "8 channels, 2 MiB chunk"


def test_a_run_on_a_busy_machine_that_was_not_adopted_says_how_busy_it_was(report):
    ratio = PairedRatio(num_pairs=13, median_ratio=1.16, q25=0.86, q75=1.21, num_wins=8)
    busy = changed(
        report,
        backend="gloo",
        machine={"cores": "2", "load_1min": "18.1"},  # 8 ranks keep 16 threads busy: together with 2 cores, 18
        verdict=verdict_of(ratio, adopted=False),
    )
    assert busy_sentence(busy).startswith("The machine was busy: a load of 18.1 on 2 cores")
    assert busy_sentence(busy) in sentences(busy)
    for quiet in (
        changed(busy, machine={"cores": "2", "load_1min": "18.0"}),
        changed(busy, verdict=verdict_of(EIGHTEEN, adopted=True)),
        changed(busy, backend="simulated"),
        changed(busy, machine={}),
    ):
        assert busy_sentence(quiet) == ""
