"""Jobs whose models have layers of several kinds: read, checked by one line each, and simulated."""

import tomllib

import pytest

from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.reading import parse_job
from lagom_overlap.jobfile.step import JobStep
from lagom_overlap.workload import Phase
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.parallel import RecomputeModule

JOB = """
[job]
name = "mla"
[model]
name = "deepseek-v3"
seq_len = 4096
[cluster]
preset = "h100_dgx"
[parallel]
data = 64
pipeline = 16
expert = 64
global_batch = 1024
zero_stage = 1
recompute = "selective"
recompute_modules = ["mla_up_proj", "moe"]
pipeline_layout = "Et*4|(t*4|)*14tmL"
"""


def _step(text: str) -> JobStep:
    step = Job(parse_job(tomllib.loads(text), "job")).step
    assert step is not None
    return step


def _built(text: str) -> IssuedStep:
    return _step(text).issued


def test_a_job_of_a_pipeline_with_named_recomputation_and_a_prediction_is_read() -> None:
    step = Job(parse_job(tomllib.loads(JOB), "job")).step
    assert step is not None
    assert step.layout.recompute_modules == (RecomputeModule.MLA_UP_PROJ, RecomputeModule.MOE)
    times = step.times
    assert [stage.rank for stage in times.stages] == list(range(16))
    busy = [stage.busy_s for stage in times.stages]
    assert busy[1] == busy[14] > busy[0]  # four mixtures against three dense layers and one
    # Three passes of 2 FLOPs: 36.62 B matrix parameters that a token visits, and of the prediction attention 0.187 B,
    # nine experts 0.396 B, projection 0.103 B, head 0.927 B; attention of 62 layers in full, 192 and 128 columns.
    by_hand = 6 * (36.62e9 + 0.187e9 + 0.398e9 + 0.103e9 + 0.927e9) + 62 * 3 * 2 * 4096 * 128 * (192 + 128)
    assert times.model_flops == pytest.approx(1024 * 4096 * by_hand, rel=1e-3)


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ('"moe"]', '"experts"]', "parallel.recompute_modules.*allowed: core_attn, mla_up_proj, layernorm, mlp, moe, "),
        ('= "selective"', '= "full"', "recompute_modules needs recompute = 'selective', not 'full'"),
        ("Et*4|(t*4|)*14tmL", "Et*4|(t*4|)*14tL", "has 61 layers t and 0 predictions m, must have .* 61 and 1"),
        ("Et*4|(t*4|)*14tmL", "Et*8|(t*8|)*6t*5mL", "has 8 chunks, must have pipeline x chunks = 16 x 1 = 16"),
        ("seq_len = 4096", "seq_len = 4096\nmtp_layers = 2", "model.mtp_layers is 2, but model 'deepseek-v3' has 1"),
        ('"deepseek-v3"', '"llama-3-8b"', "has 61 layers t and 1 predictions m, must have .* 32 and 0"),
        ("data = 64", "data = 64\nwhole_experts = 1", "parallel.whole_experts is 1"),
        ("data = 64", "data = 64\nflash_attention = false", "flash_attention is false, must be true: .* latent layers"),
        ("zero_stage = 1", "zero_stage = 3", "multi-token prediction, which is modelled for Megatron-LM"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_one_line(old: str, new: str, wrong: str) -> None:
    with pytest.raises(JobError, match=wrong) as error:
        _built(JOB.replace(old, new))
    assert "\n" not in str(error.value)


def test_modules_that_a_model_lacks_are_refused() -> None:
    dense = JOB.replace("deepseek-v3", "llama-3-8b").replace("expert = 64\n", "")
    dense = "\n".join(line for line in dense.splitlines() if not line.startswith("pipeline_layout"))
    with pytest.raises(JobError, match="recompute_modules has 'mla_up_proj', but model 'llama-3-8b' has no latent"):
        _ = Job(parse_job(tomllib.loads(dense), "job")).step


def test_predictions_can_be_left_out() -> None:
    text = JOB.replace("seq_len = 4096", "seq_len = 4096\nmtp_layers = 0").replace("tmL", "tL")
    step = Job(parse_job(tomllib.loads(text), "job")).step
    assert step is not None
    assert step.model.mtp_layers == 0
    assert not [op for op in step.issued.iteration.ops if "mtp" in op.name]


def test_what_captures_lack_is_refused_by_one_line() -> None:
    named = pytest.importorskip("lagom_overlap.capturing.models.named")
    with pytest.raises(JobError, match=r"model 'deepseek-v3' has layers of kind 'latent\+experts': captured are"):
        named.capture_named("deepseek-v3", {"fsdp": 8}, micro_batch=1, seq_len=128, rank=0)


LLAMA = """
[job]
name = "dense"
[model]
name = "llama-3-8b"
seq_len = 2048
[cluster]
preset = "PRESET"
[parallel]
data = 4
pipeline = 2
global_batch = 4
EXTRA
[precision]
products = "PRODUCTS"
"""


def _dense(preset: str, products: str, extra: str = "") -> str:
    return LLAMA.replace("PRESET", preset).replace("PRODUCTS", products).replace("EXTRA", extra)


@pytest.mark.parametrize(
    ("preset", "products", "allowed"),
    [("a100_dgx", "fp8", "parameter"), ("h100_dgx", "mxfp8", "parameter, fp8, fp8_current, fp8_rowwise")],
)
def test_a_format_that_the_gpu_does_not_multiply_is_refused(preset: str, products: str, allowed: str) -> None:
    with pytest.raises(JobError, match=rf"precision\.products is {products}, must be {allowed} on .* \(gpu\.fp8"):
        _built(_dense(preset, products))


@pytest.mark.parametrize(("preset", "products"), [("h100_dgx", "fp8_current"), ("b200", "mxfp8")])
def test_a_format_that_the_gpu_has_is_taken(preset: str, products: str) -> None:
    assert _built(_dense(preset, products)).iteration.ops


@pytest.mark.parametrize("key", ["attention", "head"])
def test_attention_and_heads_in_mxfp8_take_megatron_on_blackwell(key: str) -> None:
    def job(preset: str, found: str, extra: str = "", products: str = "mxfp8") -> str:
        return f'{_dense(preset, products, extra)}{key} = "{found}"\n'

    assert "mxfp8" in repr(_step(job("b200", "mxfp8")).precision)
    for text, allowed in (
        (job("b200", "fp8"), "parameter, mxfp8"),
        (job("h100_dgx", "mxfp8", products="fp8"), "parameter"),
        (job("b200", "mxfp8", 'framework = "megatron_deepspeed"', products="fp8"), "parameter"),
    ):
        with pytest.raises(JobError, match=rf"precision\.{key} is .*, must be {allowed} on .* with framework "):
            _step(text)
    for products in ("parameter", "fp8"):
        with pytest.raises(JobError, match=f"{key} is mxfp8, needs precision.products = mxfp8, not {products}"):
            _step(job("b200", "mxfp8", products=products))


def test_a_format_of_flash_attention_needs_one() -> None:
    text = _dense("b200", "mxfp8", "flash_attention = false") + 'attention = "mxfp8"\n'
    with pytest.raises(JobError, match=r"precision.attention is mxfp8, needs parallel.flash_attention = true"):
        _step(text)


@pytest.mark.parametrize("extra", ['recompute = "full"', 'zero_stage = 3\nframework = "deepspeed"'])
def test_a_last_chunk_without_layers_has_its_memory_counted(extra: str) -> None:
    step = Job(
        parse_job(tomllib.loads(_dense("h100_dgx", "parameter", f'pipeline_layout = "Et*32|L"\n{extra}')), "job")
    ).step
    assert step is not None
    first, last = step.memories
    assert first.total_bytes > last.total_bytes > 0


def test_the_head_takes_its_time_in_the_chunk_of_its_letter() -> None:
    """The last chunk holds nothing but two heads: its forward is their kernels alone, nothing else runs there."""
    text = JOB.replace("Et*4|(t*4|)*14tmL", "Et*3|(tt|)*29m|L").replace("[parallel]", "[parallel]\nchunks = 2")
    text = text.replace("pipeline = 16", 'pipeline = 16\nschedule = "interleaved"\noverlap_p2p = true')
    step = Job(parse_job(tomllib.loads(text), "job")).step
    assert step is not None
    simulator = step.simulator
    heads = [
        op
        for op in simulator.step(15).iteration.computations
        if op.origin.microbatch == 1 and op.origin.phase in (Phase.FORWARD, Phase.LOSS)
        if op.name.startswith(("mb1.head.", "mb1.mtp0."))
    ]
    alone_s = sum(simulator.price.alone_s(op) for op in heads)
    runs = simulator.times().runs[15]
    slot = next(run for run in runs if run.slot.forward and run.slot.chunk == 1 and run.slot.micro_batch == 1)
    assert len(heads) >= 5
    assert slot.end_s - slot.start_s == pytest.approx(alone_s, rel=0.03)
