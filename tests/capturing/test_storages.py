"""`aligned_dims` against the elements themselves: equal pieces of a view are equal pieces of its base."""

import itertools

import pytest

torch = pytest.importorskip("torch")

from lagom_overlap.capturing.storages import Layout, StorageTable, aligned_dims, num_bytes_of  # noqa: E402

pytestmark = pytest.mark.torch

BASE = torch.arange(2 * 6 * 4).view(2, 6, 4)

VIEWS = {
    "itself": BASE,
    "transposed": BASE.transpose(0, 2),
    "permuted": BASE.permute(1, 2, 0),
    "flattened head": BASE.view(12, 4),
    "flattened tail": BASE.view(2, 24),
    "flat": BASE.view(48),
    "split": BASE.view(2, 2, 3, 4),
    "split and swapped": BASE.view(2, 3, 2, 4).transpose(1, 2),
    "sliced next to": BASE[:, :, 1:3],
    "sliced along": BASE[:, 2:5],
    "selected": BASE[1],
    "expanded": BASE.unsqueeze(1).expand(2, 5, 6, 4),
    "strided": BASE[:, ::2],
}


@pytest.mark.parametrize("name", VIEWS)
def test_pieces_of_an_aligned_dimension_hold_elements_of_the_same_piece_of_the_base(name: str) -> None:
    view = VIEWS[name]
    for dim, base_dim in enumerate(aligned_dims(Layout.of(BASE), Layout.of(view))):
        if base_dim is None:
            continue
        for num in (2, 3):
            if view.shape[dim] % num or BASE.shape[base_dim] % num:
                continue
            pieces = zip(view.chunk(num, dim), BASE.chunk(num, base_dim), strict=True)
            assert all(set(a.flatten().tolist()) <= set(b.flatten().tolist()) for a, b in pieces)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("transposed", (2, 1, 0)),
        ("flattened head", (0, 2)),
        ("split", (0, 1, None, 2)),
        ("sliced next to", (0, 1, None)),
        ("sliced along", (0, None, 2)),
        ("expanded", (0, None, 1, 2)),
        ("selected", (1, 2)),
    ],
)
def test_dimensions_are_found_again_through_views(name: str, expected: tuple[int | None, ...]) -> None:
    assert aligned_dims(Layout.of(BASE), Layout.of(VIEWS[name])) == expected


def test_every_pair_that_could_be_cut_together_is_found_for_permutations() -> None:
    for order in itertools.permutations(range(3)):
        assert aligned_dims(Layout.of(BASE), Layout.of(BASE.permute(order))) == order


def test_a_dimension_of_length_one_is_none_of_the_base() -> None:
    base = torch.empty(4, 6)
    assert aligned_dims(Layout.of(base), Layout.of(base.unsqueeze(0))) == (None, 0, 1)


def test_an_expanded_dimension_is_read_once() -> None:
    assert num_bytes_of(BASE.unsqueeze(0).expand(9, 2, 6, 4)) == 48 * 8


def test_a_storage_that_is_freed_and_allocated_again_is_another_memory() -> None:
    table, tensor = StorageTable(), torch.empty(4)
    first = table.fresh(tensor).buffer
    storage = tensor.untyped_storage()
    storage.resize_(0)
    table.resized(storage)
    storage.resize_(16)
    table.resized(storage)
    assert table.fresh(tensor).buffer not in (None, first)


def test_what_was_there_before_is_resident_once_however_often_it_is_viewed() -> None:
    table, tensor = StorageTable(), torch.empty(4, 4)
    for view in (tensor, tensor.t(), tensor[1]):
        table.external(view)
    assert table.resident_bytes() == 64
