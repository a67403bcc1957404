"""Whether, of a trace: the groups simulated as they ran and with the change."""

import pytest
from gpu_traces import gpu_trace

from lagom_overlap.analysis.findings import analyse
from lagom_overlap.analysis.groups import overlap_groups
from lagom_overlap.analysis.what_if import traced_what_ifs
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.trace.gpu_trace import EventRole, KnobReach

COMM, COMP = EventRole.COMM, EventRole.COMPUTE


def answers(
    gpu: str = "NVIDIA A100-SXM4-80GB",
    reach: KnobReach = KnobReach.TUNER,
    channels: int = 16,
    num_without: int = -1,
):
    """GEMMs of 1 ms alone, of 1.15 ms during a hidden all-gather of 64 MiB; steps are marked if some are without it."""
    rows, names, grids, calls = [], [], [], []
    for n in range(12):
        at = n * 4_000_000
        rows += [
            (COMP, at, at + 1_000_000), (COMP, at + 2_000_000, at + 3_150_000), (COMM, at + 2_001_000, at + 2_400_000)
        ]  # fmt: skip
        names += ["ampere_bf16_s16816gemm_128x128", "ampere_bf16_s16816gemm_128x128", "ncclDevKernel_AllGather"]
        grids += [(432, 1, 1), (432, 1, 1), (channels, 1, 1)]
        calls.append({
            "kind": CollectiveKind.ALL_GATHER, "op": "all_gather", "communicator": "fsdp", "num_bytes": 64 << 20,
            "num_channels": channels, "reach": reach,
        })  # fmt: skip
    for n in range(12, 12 + num_without):
        rows.append((COMP, n * 4_000_000, n * 4_000_000 + 1_000_000))
        names.append("ampere_bf16_s16816gemm_128x128")
        grids.append((432, 1, 1))
    steps = [(n, n * 4_000_000, (n + 1) * 4_000_000) for n in range(12 + num_without)] if num_without >= 0 else ()
    fields = {"names": names, "grids": grids, "calls": calls, "gpu_name": gpu, "num_sms": 108}
    findings = analyse([gpu_trace(rows, steps=steps, **fields)])
    return {answer.change: answer for answer in traced_what_ifs(findings, overlap_groups(findings))}


def test_a_hidden_gather_may_have_fewer_channels_and_copy_engines_and_the_gain_is_bounded_by_its_stretch():
    found = answers()
    assert {"at most 8 channels", "copy-engine collectives (no CTA)"} <= set(found)
    assert "at most 16 channels" not in found  # it has no more
    for answer in found.values():
        assert answer.low_s < answer.gain_s < answer.high_s
        assert answer.gain_s <= 12 * 0.4e-3  # twelve collectives of 0.4 ms: no change can gain more than their time


@pytest.mark.parametrize("num_without", [12, 36])
def test_a_group_that_only_some_steps_have_gains_as_much_less_in_the_average_step(num_without: int):
    """Steps that only compute, as those do that accumulate gradients: a gain of each twelfth step is a twelfth."""
    all_steps, some = answers(num_without=0), answers(num_without=num_without)
    assert all_steps
    assert set(all_steps) == set(some)
    for change, answer in some.items():
        assert answer.gain_s * (12 + num_without) / 12 == pytest.approx(all_steps[change].gain_s, rel=1e-9)


def test_what_no_knob_reaches_is_not_asked():
    assert not answers(reach=KnobReach.NONE)


def test_a_gpu_without_a_preset_is_not_asked():
    assert not answers(gpu="Matrox Millennium")


@pytest.mark.parametrize("channels", [2, 16])
def test_one_trace_gives_the_same_answers_twice(channels: int):
    assert answers(channels=channels) == answers(channels=channels)
