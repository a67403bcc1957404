from dataclasses import fields, replace

import pytest

from lagom_overlap.collective import Protocol
from lagom_overlap.cost import Profile, load_profile, profile_names
from lagom_overlap.errors import UnknownNameError
from lagom_overlap.hardware import LinkKind, load_gpu


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


@pytest.mark.parametrize(
    ("name", "channel_bytes_per_s", "sm_flops"),
    [
        ("a40 pcie", 22e9, None),
        ("H100 SXM", 36.7e9, None),
        ("MI300A", 9.9e9, 3.2e12),
        ("MI355X", 9.9e9, 4.7e12),  # of MI3 and MI35 the longer
        ("L4", 22e9, None),  # any.toml's
    ],
)
def test_the_file_with_the_longest_beginning_of_a_gpu_s_name_has_its_constants(
    plausible: Profile, name: str, channel_bytes_per_s: float, sm_flops: float | None
) -> None:
    found = plausible.for_gpu(replace(load_gpu("a40"), name=name))
    assert (found.channel_bytes_per_s, found.sm_flops) == (channel_bytes_per_s, sm_flops)


def test_what_a_fit_tries_goes_before_the_gpu_s_file(plausible: Profile) -> None:
    gpu, tried = load_gpu("h100"), replace(plausible.for_gpu(load_gpu("h100")), channel_bytes_per_s=1e9)
    fitted = replace(plausible, fitted={gpu.name: tried})
    assert fitted.for_gpu(gpu) is tried
    assert fitted.for_gpu(load_gpu("a100")) is plausible.for_gpu(load_gpu("a100"))


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
    ],
)
def test_a_profile_with_an_impossible_constant_is_refused(plausible: Profile, field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        replace(plausible, **{field: value})
