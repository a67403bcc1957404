from dataclasses import replace

import pytest

from lagom_overlap.errors import JobError, UnknownNameError
from lagom_overlap.workload.models import load_model, model_names


def test_the_papers_dense_models_are_known() -> None:
    assert model_names() == ["llama-3-8b", "mpt-7b", "phi-2"]
    assert all(load_model(name).name == name for name in model_names())


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        # The counts that transformers 4.x gives for the published configs; model cards say 2.7 B, 8 B and 6.7 B.
        ("phi-2", 2_779_683_840),
        ("llama-3-8b", 8_030_261_248),
        ("mpt-7b", 6_649_286_656),
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
    with pytest.raises(UnknownNameError, match=r"unknown model 'phi2' \(did you mean 'phi-2'\?\); allowed: llama-3-8b"):
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
