from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from lagom_overlap.errors import JobError, UnknownNameError
from lagom_overlap.workload.models import load_model, model_names


def test_the_papers_models_are_known() -> None:
    assert {"llama-3-8b", "mpt-7b", "phi-2", "deepseek-moe-16b", "olmoe-1b-7b"} <= set(model_names())
    assert all(load_model(name).name == name for name in model_names())


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        # The counts that transformers 4.x gives for the published configs; model cards say 2.7 B, 8 B and 6.7 B.
        ("phi-2", 2_779_683_840),
        ("llama-3-8b", 8_030_261_248),
        ("mpt-7b", 6_649_286_656),
        ("llama-2-7b", 6_738_415_616),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3-405b", 405_853_388_800),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, num_params: int) -> None:
    assert load_model(name).num_params == num_params


@pytest.mark.parametrize("name", ["phi-2", "mpt-7b"])
def test_a_plain_layer_has_twelve_hidden_squared_parameters(name: str) -> None:
    model = load_model(name)
    assert model.ffn == 4 * model.hidden
    assert model.layer_matrix_params == 12 * model.hidden**2


def test_a_grouped_query_gated_layer_by_hand() -> None:
    # Llama 3 8B: q and o 4096 x 4096, k and v 4096 x 1024, gate, up and down 4096 x 14336, two norms of 4096.
    by_hand = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    assert load_model("llama-3-8b").layer_params == by_hand == 218_112_000


def test_biases_and_norms_of_phi_2_by_hand() -> None:
    # q, k, v, dense and fc2 have 2560 biases each, fc1 10240; one layer norm of weight and bias.
    assert load_model("phi-2").layer_params - 12 * 2560**2 == 5 * 2560 + 10240 + 2 * 2560


def test_a_tied_matrix_counts_once_in_all_and_twice_where_it_is_used() -> None:
    model = load_model("mpt-7b")
    untied = replace(model, tied_embeddings=False)
    assert untied.num_params - model.num_params == 50432 * 4096
    assert untied.head_params == model.head_params == 50432 * 4096 + 4096


def test_an_unknown_model_names_the_nearest_one() -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown model 'phi2' \(did you mean 'phi-2'\?\); all \d+ of them: lagom list models$"
    ):
        load_model("phi2")


@pytest.mark.parametrize("field", ["num_layers", "hidden", "ffn", "num_heads", "num_kv_heads", "head_dim", "vocab"])
def test_a_model_without_size_is_refused_by_field(field: str) -> None:
    with pytest.raises(JobError, match=f"'phi-2': {field} is 0, must be at least 1"):
        replace(load_model("phi-2"), **{field: 0})


def test_key_heads_must_divide_the_heads() -> None:
    with pytest.raises(JobError, match="num_kv_heads is 5, must divide num_heads 32"):
        replace(load_model("phi-2"), num_kv_heads=5)


def test_a_layer_has_one_or_two_norms() -> None:
    with pytest.raises(JobError, match="norms_per_layer is 3"):
        replace(load_model("phi-2"), norms_per_layer=3)


@pytest.mark.parametrize(("name", "billions"), [("gpt-22b", 22.0), ("gpt-175b", 174.6), ("gpt-530b", 529.6)])
def test_gpt_sizes_are_those_that_the_megatron_papers_print(name: str, billions: float) -> None:
    assert load_model(name).num_params == pytest.approx(billions * 1e9, rel=0.005)


def test_a_mixture_of_experts_counts_all_experts_and_visits_a_few() -> None:
    # OLMoE's card: 6.9 B parameters, 1.3 B active. The norms on queries and keys (2 x 16 x 2048) are not ours.
    model = load_model("olmoe-1b-7b")
    assert model.num_params == 6_919_161_856 - 2 * 16 * 2048
    active = model.num_layers * model.active_layer_params + 2 * model.vocab * model.hidden
    assert active == pytest.approx(1.3e9, rel=0.02)


@pytest.mark.parametrize("experts_per_token", [0, 65])
def test_experts_per_token_must_be_some_of_the_experts(experts_per_token: int) -> None:
    with pytest.raises(JobError, match="experts_per_token is"):
        replace(load_model("olmoe-1b-7b"), experts_per_token=experts_per_token)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    # As their papers and model cards say.
    [
        ("qwen3-235b-a22b", 235, 22),
        ("nemotron-4-15b", 15.6, None),
        ("nemotron-4-340b", 341, None),
        ("grok-1", 314, None),
    ],
)
def test_sizes_are_the_published_ones_to_their_digits(name: str, billions: float, active: float | None) -> None:
    model = load_model(name)
    assert model.num_params / 1e9 == pytest.approx(billions, rel=0.006)
    if active is not None:
        used = model.num_layers * model.active_layer_params + 2 * model.vocab * model.hidden
        assert used / 1e9 == pytest.approx(active, rel=0.01)


@pytest.mark.parametrize(
    ("name", "num_params", "active_billions"),
    [
        # 671,026,419,200 on the model's card are these and 58 x 256 biases of its routers, which no gradient trains;
        # the paper's 37 B.
        ("deepseek-v3", 671_026_404_352, 37),
        ("deepseek-v2-lite", 15_706_484_224, 2.4),  # its card; its paper's 2.4 B leaves the embedding out
        ("kimi-k2", 1_026_408_209_408, 32.6),  # 1.04 T and 32.6 B in its paper, Table 2
        ("moonlight-16b-a3b", 15_960_108_544, 2.9),
    ],
)
def test_latent_models_have_the_published_sizes(name: str, num_params: int, active_billions: float) -> None:
    model = load_model(name)
    assert model.num_params == num_params
    embedding = model.vocab * model.hidden if name == "deepseek-v2-lite" else 0
    assert (model.num_active_params - embedding) / 1e9 == pytest.approx(active_billions, rel=0.03)


def test_deepseek_v3s_prediction_has_14_billion_parameters_with_the_tables_that_it_shares() -> None:
    # The model's card: "671B of the main model weights and 14B of the multi-token prediction module weights", which
    # holds copies of both tables.
    model = load_model("deepseek-v3")
    assert (model.mtp_params + 2 * model.vocab * model.hidden) / 1e9 == pytest.approx(14, rel=0.05)


@pytest.mark.parametrize(
    ("pattern", "wrong"),
    [
        ("attention+latent", "pattern has 'attention+latent'; allowed: a mixer"),
        ("mlp+attention", "pattern has 'mlp+attention'; allowed: a mixer"),
        ("none+mlp", "pattern has 'none.mlp'; allowed: a mixer"),
        ("99999*attention", "pattern has '99999.attention': must be 1 to 10000 layers"),
        ("latent+mlp", "pattern has layers of kind latent, which need latent"),
        ("window+mlp", "pattern has layers of kind window, which need window"),
        ("mamba", "pattern has layers of kind mamba, which need mamba"),
        (" ", "pattern is ' ', must name at least one layer"),
    ],
)
def test_a_pattern_that_names_no_layers_is_refused_by_one_line(pattern: str, wrong: str) -> None:
    with pytest.raises(JobError, match=f"^model 'llama-3-8b': {wrong.replace('+', '.')}") as error:
        replace(load_model("llama-3-8b"), pattern=pattern)
    assert "\n" not in str(error.value)


def test_a_model_file_names_unknown_keys_of_its_tables(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    text = (resources.files("lagom_overlap.workload") / "data" / "deepseek-v3.toml").read_text(encoding="utf-8")
    file.write_text(text.replace("v_head_dim", "value_dim"), encoding="utf-8")
    with pytest.raises(JobError, match=r"'latent.value_dim' .did you mean 'v_head_dim'.*; allowed: kv_lora_rank, "):
        load_model(str(file))
    file.write_text(text.replace("v_head_dim = 128", "v_head_dim = 127"), encoding="utf-8")
    with pytest.raises(JobError, match="heads of 192 and 127 columns, must be an even number together"):
        load_model(str(file))


@pytest.mark.parametrize(
    ("name", "billions", "active", "rel"),
    [
        # arXiv 2508.10925, Table 1: totals, and active ones without the embedding.
        ("gpt-oss-20b", 20.91, 3.61, 0.003),
        ("gpt-oss-120b", 116.83, 5.13, 0.003),
        # Meta's cards, vision towers of some 0.9 B left out.
        ("llama-4-scout", 108.6 - 0.9, 17.2 - 1.03, 0.01),
        ("llama-4-maverick", 401.6 - 0.9, 17.2 - 1.03, 0.01),
    ],
)
def test_windowed_and_alternating_models_have_the_published_sizes(
    name: str, billions: float, active: float, rel: float
) -> None:
    model = load_model(name)
    assert model.num_params / 1e9 == pytest.approx(billions, rel=rel)
    assert (model.num_active_params - model.vocab * model.hidden) / 1e9 == pytest.approx(active, rel=2 * rel)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        # NVIDIA's cards: 31.6 B and 3.2 B active, 3.6 B with the embedding; 120.6 B and 12.7 B; 8.1 B; 56.3 B.
        ("nemotron-3-nano-30b-a3b", 31.58, 3.58),
        ("nemotron-3-super-120b-a12b", 120.6, 12.7),
        ("nemotron-h-8b", 8.1, 8.1),
        ("nemotron-h-56b", 56.3, 56.3),
    ],
)
def test_mamba_hybrids_have_the_published_sizes(name: str, billions: float, active: float) -> None:
    model = load_model(name)
    assert model.num_params / 1e9 == pytest.approx(billions, rel=0.002)
    assert model.num_active_params / 1e9 == pytest.approx(active, rel=0.01)


def test_a_mamba_layers_parameters_by_hand() -> None:
    # Nemotron-H-8B: z and x of 8192 columns, B and C of 8 x 128, a step size for each of 128 heads; four taps and a
    # bias of each convolved column; A, D and a bias of each head; the gated norm; the layer's norm.
    model = load_model("nemotron-h-8b")
    kind = model.layer_kinds[0]
    convolved = 8192 + 2 * 8 * 128
    projections = 4096 * (8192 + convolved + 128) + 8192 * 4096
    assert str(kind) == "mamba"
    assert model.params_of(kind).total == projections + 5 * convolved + 3 * 128 + 8192 + 4096


FILE = """
name = "mine"
num_layers = 2
hidden = 64
ffn = 256
num_heads = 4
num_kv_heads = 4
head_dim = 16
vocab = 1000
gated = true
pattern = "mamba mlp"
[mamba]
num_heads = 8
head_dim = 16
state_dim = 16
num_groups = 2
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("hidden = 64", 'hidden = "64"', "hidden is '64', must be a whole number"),
        ("hidden = 64", "hidden = 64.5", "hidden is 64.5, must be a whole number"),
        ("hidden = 64", "hidden = [64]", r"hidden is \[64\], must be a whole number"),
        ("hidden = 64", "hidden = 1e9", "hidden is 1000000000.0, must be a whole number"),
        ("hidden = 64", "hidden = 9_000_000_000", "hidden is 9000000000, must be at most 1073741824"),
        ("hidden = 64", "", "missing key 'hidden'"),
        ("gated = true", "gated = 1", "gated is 1, must be true or false"),
        ('pattern = "mamba mlp"', "pattern = 3", "pattern is 3, must be text"),
        ("state_dim = 16", "state_dim = true", "mamba.state_dim is True, must be a whole number"),
        ("state_dim = 16", "", "missing key 'mamba.state_dim'"),
        ("state_dim = 16", "state_dim = 16\nchunk = 1_000_000_000", "mamba.chunk is 1000000000, must be at most 4096"),
        ("state_dim = 16", "state_dim = 16\nchunk = 0", "mamba.chunk is 0, must be at least 1"),
    ],
)
def test_a_model_files_mistake_is_named_by_key_value_and_what_is_allowed(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE, encoding="utf-8")
    assert load_model(str(path)).num_layers == 2
    path.write_text(FILE.replace(old, new), encoding="utf-8")
    with pytest.raises(JobError, match=words) as error:
        load_model(str(path))
    assert "\n" not in str(error.value)
    assert "Expected" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "published", "norms"),
    # Counts of the published checkpoints (safetensors' metadata); `norms`: on queries and keys, which are not ours.
    [
        ("llama-2-13b", 13_015_864_320, 0),
        ("llama-2-70b", 68_976_648_192, 0),
        ("llama-3.2-1b", 1_235_814_400, 0),
        ("llama-3.2-3b", 3_212_749_824, 0),
        ("mistral-7b", 7_248_023_552, 0),
        ("mixtral-8x7b", 46_702_792_704, 0),
        ("qwen3-4b", 4_022_468_096, 36 * 256),
        ("qwen3-8b", 8_190_735_360, 36 * 256),
        ("qwen3-14b", 14_768_307_200, 40 * 256),
        ("qwen3-32b", 32_762_123_264, 64 * 256),
        ("qwen3-30b-a3b", 30_532_122_624, 48 * 256),
        ("deepseek-v2", 235_741_434_880, 0),
        ("deepseek-v2-lite", 15_706_484_224, 0),
        ("gpt-oss-20b", 20_914_757_184, 0),
        ("gpt-oss-120b", 116_829_156_672, 0),
    ],
)
def test_models_have_the_parameters_of_their_checkpoints(name: str, published: int, norms: int) -> None:
    assert load_model(name).num_params == published - norms


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    # As tables, cards and papers round them; active without the embedding's table.
    [
        ("nemotron-22b", 22, None),
        ("nemotron-h-8b", 8.1, None),
        ("nemotron-h-56b", 56, None),
        ("nemotron-3-nano-30b-a3b", 31.6, 3.2),
        ("nemotron-3-super-120b-a12b", 120.6, 12.2),
        ("nemotron-3-ultra-550b-a55b", 550, 55),
        ("llama-4-maverick", 400, 16.1),
        ("deepseek-v2", 236, 21),
    ],
)
def test_models_have_the_size_that_their_makers_state(name: str, billions: float, active: float | None) -> None:
    model = load_model(name)
    assert model.num_params / 1e9 == pytest.approx(billions, rel=0.035)
    if active is not None:
        used = model.num_active_params - model.vocab * model.hidden
        assert used / 1e9 == pytest.approx(active, rel=0.01)


def test_positions_that_are_scaled_need_positions() -> None:
    with pytest.raises(JobError, match="scaled_rotary is true, must be false where rotary is"):
        replace(load_model("gpt-oss-20b"), rotary=False)
