"""Named models against published sizes, and pipelines against their schedule."""

from collections import Counter
from importlib.util import find_spec

import pytest

torch = pytest.importorskip("torch")

from small_steps import small_model  # noqa: E402

from lagom_overlap.capturing.models import named  # noqa: E402
from lagom_overlap.capturing.models.decoder import Decoder  # noqa: E402
from lagom_overlap.capturing.models.degrees import Degrees  # noqa: E402
from lagom_overlap.capturing.models.named import capture_named, captured_names  # noqa: E402
from lagom_overlap.collective import CollectiveKind  # noqa: E402
from lagom_overlap.errors import JobError, UnknownNameError  # noqa: E402
from lagom_overlap.papers.models import evoformer, vision  # noqa: E402
from lagom_overlap.papers.models.evoformer import _GatedAttention  # noqa: E402
from lagom_overlap.papers.models.vision import WideResNet  # noqa: E402
from lagom_overlap.workload import Gemm, Phase  # noqa: E402
from lagom_overlap.workload.models import load_model  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]  # a shared machine may be slow

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")


@pytest.mark.parametrize("name", ["phi-2", "llama-3-8b", "mpt-7b", "olmoe-1b-7b", "llama-2-7b"])
def test_a_decoder_has_the_parameters_of_its_shapes(name: str) -> None:
    model = load_model(name)
    with torch.device("meta"):
        decoder = Decoder(model)
    assert sum(parameter.numel() for parameter in decoder.parameters()) == model.num_params


def test_attention_of_the_evoformer_is_algorithm_7_of_its_paper() -> None:
    """Jumper et al. 2021, Suppl. Algorithm 7: softmax(q k / sqrt(c) + b) v for each head, gated, then projected."""
    torch.manual_seed(0)
    heads, width, rows, length = 2, 8, 3, 5
    attention = _GatedAttention(width, heads, biased=True)
    x, bias = torch.randn(rows, length, width), torch.randn(length, length, heads)
    normed = attention.norm(x)
    query, key, value = attention.qkv(normed).split(width, -1)
    mixed = []
    for head in range(heads):
        own = slice(head * width // heads, (head + 1) * width // heads)
        scores = query[..., own] @ key[..., own].transpose(1, 2) / (width // heads) ** 0.5 + bias[..., head]
        mixed.append(scores.softmax(-1) @ value[..., own])
    by_hand = attention.out(torch.sigmoid(attention.gate(normed)) * torch.cat(mixed, -1))
    torch.testing.assert_close(attention(x, bias), by_hand)


def test_a_wide_resnet_has_the_parameters_of_torchvisions() -> None:
    """torchvision's wide_resnet50_2: 68,883,240 parameters."""
    with torch.device("meta"):
        model = WideResNet()
    assert sum(parameter.numel() for parameter in model.parameters()) == 68_883_240


@needs_transformers
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "billions"),
    [("phi-2", 2.78), ("llama-3-8b", 8.03), ("mpt-7b", 6.65), ("olmoe-1b-7b", 6.92), ("deepseek-v2-lite", 15.71)],
)
def test_hugging_face_models_have_their_published_sizes(name: str, billions: float) -> None:
    from lagom_overlap.capturing.models.hugging_face import hugging_face_step

    with torch.device("meta"):
        step = hugging_face_step(f"hf:{name}", Degrees(), micro_batch=1, seq_len=8)()
    assert sum(parameter.numel() for parameter in step.model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)


@needs_transformers
@pytest.mark.slow
def test_a_hugging_face_mixture_of_experts_exchanges_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from lagom_overlap.capturing.models import hugging_face

    plain = hugging_face.hugging_face_step
    monkeypatch.setattr(hugging_face, "hugging_face_step", lambda *a, **k: plain(*a, **k, num_layers=2))
    capture = capture_named("hf:deepseek-v2-lite", {"fsdp": 4, "expert": 2}, micro_batch=1, seq_len=32)
    kinds = Counter(comm.collective.kind for comm in capture.iteration.comms)
    assert kinds[CollectiveKind.ALL_TO_ALL] == 4  # one of the two layers is dense
    assert capture.groups["ep"] == (0, 1)


def test_a_vision_transformer_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = vision.vision_step
    monkeypatch.setattr(vision, "vision_step", lambda *a, **k: plain(*a, **k, num_layers=2))
    capture = capture_named("vit-l-14", {"fsdp": 2}, micro_batch=2, seq_len=1)
    assert Counter(comm.collective.kind for comm in capture.iteration.comms) == {
        CollectiveKind.ALL_GATHER: 2 * 2 + 1,
        CollectiveKind.REDUCE_SCATTER: 3,
    }


def test_an_evoformer_turns_and_gathers_as_axial_parallelism_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per block forward: six turns (MSA and pairs, there and back) and six gathers."""
    plain = evoformer.evoformer_step
    monkeypatch.setattr(evoformer, "evoformer_step", lambda *a, **k: plain(*a, **k, num_blocks=1))
    capture = capture_named("evoformer", {"axial": 2}, micro_batch=1, seq_len=16)
    forward = [comm for comm in capture.iteration.comms if comm.origin.phase is Phase.FORWARD]
    assert Counter(comm.collective.kind for comm in forward) == {
        CollectiveKind.ALL_TO_ALL: 6,
        CollectiveKind.ALL_GATHER: 6,
    }
    assert capture.groups == {"dap": (0, 1)}


def _pipeline(monkeypatch: pytest.MonkeyPatch, rank: int, **options: int | str) -> object:
    monkeypatch.setattr(named, "load_model", lambda _: small_model(num_layers=4))
    return capture_named("llama-3-8b", {"pipeline": 2, **options}, micro_batch=1, seq_len=8, rank=rank)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pipeline_stage_sends_and_receives_once_per_micro_batch_and_way(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    capture = _pipeline(monkeypatch, rank, micro_batches=3)
    comms = capture.iteration.comms
    assert {comm.collective.kind for comm in comms} == {CollectiveKind.SEND_RECV}
    assert Counter(comm.origin.microbatch for comm in comms) == {0: 2, 1: 2, 2: 2}
    assert {comm.collective.num_bytes for comm in comms} == {8 * 32 * 2}
    assert capture.groups == {"pp": (0, 1)}


@pytest.mark.parametrize(
    ("rank", "expected"),
    [(0, ["F0", "F1", "B0", "F2", "B1", "B2"]), (1, ["F0", "B0", "F1", "B1", "F2", "B2"])],
)
def test_micro_batches_run_in_the_order_of_one_forward_one_backward(
    monkeypatch: pytest.MonkeyPatch, rank: int, expected: list[str]
) -> None:
    """PipeDream-Flush on two stages and three micro-batches, by hand."""
    capture = _pipeline(monkeypatch, rank, micro_batches=3)
    products = [op for op in capture.iteration.computations if isinstance(op.work, Gemm)]
    seen = [f"{'F' if op.origin.phase is Phase.FORWARD else 'B'}{op.origin.microbatch}" for op in products]
    assert list(dict.fromkeys(seen)) == expected


def test_interleaved_chunks_each_bring_their_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = _pipeline(monkeypatch, 0, micro_batches=2, chunks=2, schedule="interleaved")
    layers = {op.origin.module.split(".")[2] for op in capture.iteration.ops if ".layers." in op.origin.module}
    assert layers == {"0", "2"}


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("llama-3-8b", {"tensor": 3}, "tensor is 3, must divide num_heads = 32"),
        ("llama-3-8b", {"expert": 2, "fsdp": 2}, "has no experts"),
        ("llama-3-8b", {"expert": 2}, "must divide replicate x fsdp = 1"),
        ("llama-3-8b", {"pipeline": 2, "fsdp": 2}, "give no fsdp"),
        ("llama-3-8b", {"pipeline": 3}, "must divide the model's 32 layers"),
        ("llama-3-8b", {"pipeline": 2, "schedule": "zigzag"}, "allowed: gpipe, 1f1b, interleaved"),
        ("llama-3-8b", {"fsdp": 0}, "fsdp is 0, must be at least 1"),
        ("llama-3-8b", {"axial": 2}, "has no pair representation"),
        ("olmoe-1b-7b", {"expert": 3, "fsdp": 3}, "must divide the model's 64 experts"),
        ("vit-l-14", {"tensor": 2}, "allowed: replicate, fsdp"),
        ("evoformer", {"axial": 3}, "must divide 128 sequences"),
        ("evoformer", {"fsdp": 2}, "axial alone"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(name: str, options: dict[str, int | str], words: str) -> None:
    with pytest.raises(JobError, match=words):
        capture_named(name, options, micro_batch=1, seq_len=256)


def test_an_unknown_model_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'llama-3-8b'"):
        capture_named("llama-3-8B", {}, micro_batch=1, seq_len=8)
    assert {"evoformer", "phi-2", "vit-l-14", "wide-resnet-50-2"} <= set(captured_names())


def test_a_vision_step_is_built_only_when_it_is_called() -> None:
    assert callable(vision.vision_step("vit-l-14", Degrees(fsdp=2), micro_batch=1))
