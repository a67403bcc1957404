from dataclasses import fields, replace

import pytest

from lagom_overlap.collective import Protocol
from lagom_overlap.cost import Profile, load_profile, profile_names
from lagom_overlap.errors import UnknownNameError
from lagom_overlap.hardware import LinkKind


def test_two_profiles_are_shipped() -> None:
    assert profile_names() == ["paper_scale", "plausible"]


def test_an_unknown_profile_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(UnknownNameError, match=r"cost profile 'plausable' \(did you mean 'plausible'\?\)"):
        load_profile("plausable")


def test_a_path_is_not_a_name() -> None:
    with pytest.raises(UnknownNameError):
        load_profile("../data/plausible")


def test_plausible_conserves_work_and_reads_the_equations_as_printed(plausible: Profile) -> None:
    assert (plausible.amplification, plausible.pollution) == (1.0, 0.0)
    assert (plausible.quantisation, plausible.overlap_norm) == (1.0, 1.0)


def test_paper_scale_is_plausible_with_more_contention_and_says_so(plausible: Profile) -> None:
    scaled = load_profile("paper_scale")
    changed = {f.name for f in fields(Profile) if getattr(scaled, f.name) != getattr(plausible, f.name)}
    assert changed == {"name", "label", "collectives", "links", "amplification", "pollution"}
    assert "fitted to the published end-to-end range, not physical" in scaled.label
    assert (scaled.amplification, scaled.pollution) == (3.0, 1.0)


def test_the_longest_prefix_of_a_gpu_name_wins(plausible: Profile) -> None:
    longer = replace(plausible, gpus={**plausible.gpus, "A4": plausible.gpus["H100"]})
    assert longer.for_gpu("a40 pcie") is longer.gpus["A40"]
    assert longer.for_gpu("H100 SXM") is longer.gpus["H100"]
    assert longer.for_gpu("L4") is longer.gpus["any"]


def test_every_kind_of_link_and_protocol_has_its_number(plausible: Profile) -> None:
    overheads = [plausible.slice_overhead_s.of(kind) for kind in LinkKind]
    assert overheads == [2.0e-6, 3.5e-6, 10.0e-6]
    assert [plausible.protocol_efficiency.of(protocol) for protocol in Protocol] == [0.5, 0.9375, 1.0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("thread_scale", 0.0),
        ("amplification", -1.0),
        ("quantisation", 1.5),
        ("max_traffic_share", 1.0),
        ("overlap_norm", 0.5),
        ("overlap_norm", float("nan")),
        ("gpus", {}),
    ],
)
def test_a_profile_with_an_impossible_constant_is_refused(plausible: Profile, field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        replace(plausible, **{field: value})
