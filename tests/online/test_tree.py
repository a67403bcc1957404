"""Who reports to whom, judged by counting."""

import pytest

from lagom_overlap.online.ranks.tree import MOST_CHILDREN, post_of


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 33, 34, 35, 100, 1057, 1058, 5000])
def test_every_rank_but_the_root_reports_to_one_rank_before_it(num_ranks: int) -> None:
    posts = [post_of(rank, num_ranks) for rank in range(num_ranks)]
    children = [child for post in posts for child in post.children]
    assert sorted(children) == list(range(1, num_ranks))
    assert all(posts[child].parent == post.rank < child for post in posts for child in post.children)
    assert posts[0].parent == -1
    assert max(len(post.children) for post in posts) <= MOST_CHILDREN
    for post in posts:
        assert post.height == max((posts[child].height + 1 for child in post.children), default=0)


def test_a_subtree_is_a_range_of_ranks() -> None:
    def below(rank: int) -> list[int]:
        return [rank, *(other for child in post_of(rank, 500).children for other in below(child))]

    assert all(below(rank) == list(range(rank, post_of(rank, 500).end)) for rank in range(500))


def test_few_ranks_all_report_to_rank_0_and_16384_need_three_levels() -> None:
    assert post_of(0, 33).children == tuple(range(1, 33))
    assert post_of(0, 33).height == 1
    assert post_of(0, 34).height == 2
    assert post_of(0, 16_384).height == 3
    assert len(post_of(0, 16_384).children) == MOST_CHILDREN


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_is_none_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank is {rank}, must be from 0 to 3"):
        post_of(rank, 4)
