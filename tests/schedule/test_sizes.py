"""Which CP sizes may be used, against every size tried one by one."""

from itertools import pairwise

import pytest

from lightning_dcp.schedule.sizes import allowed_sizes, size_chains, size_problems
from tests.schedule.oracles import sizes_of

PLANES = range(1, 65)


def crosses(ranks, c, nodes):
    """Whether some group of this size has ranks in two nodes."""
    return any(first // nodes != (first + c - 1) // nodes for first in range(0, ranks, c))


@pytest.mark.parametrize("ranks", PLANES)
def test_without_nodes_all_divisors_between_the_limits_are_allowed(ranks):
    assert list(allowed_sizes(ranks)) == sizes_of(ranks)
    for smallest in sizes_of(ranks):
        for largest in [c for c in sizes_of(ranks) if c >= smallest]:
            expected = [c for c in sizes_of(ranks) if smallest <= c <= largest]
            assert list(allowed_sizes(ranks, smallest, largest)) == expected


@pytest.mark.parametrize("ranks", PLANES)
def test_groups_that_fit_into_a_node_stay_inside(ranks):
    for nodes in range(1, ranks + 4):
        sizes = allowed_sizes(ranks, ranks_per_node=nodes)
        inside = [c for c in sizes if c <= nodes]
        assert not any(crosses(ranks, c, nodes) for c in inside), nodes
        assert inside == [c for c in sizes_of(ranks) if c <= nodes and not crosses(ranks, c, nodes)]
        assert sizes[-1] == ranks, "the whole plane can always be used"


@pytest.mark.parametrize("ranks", PLANES)
def test_groups_of_several_nodes_are_made_of_whole_nodes_where_the_plane_allows_it(ranks):
    for nodes in [n for n in sizes_of(ranks) if n < ranks]:
        large = [c for c in allowed_sizes(ranks, ranks_per_node=nodes) if c > nodes]
        assert large == [c for c in sizes_of(ranks) if c > nodes and c % nodes == 0]


def test_a_plane_in_one_node_has_all_sizes():
    assert allowed_sizes(12, ranks_per_node=12) == allowed_sizes(12, ranks_per_node=99) == (1, 2, 3, 4, 6, 12)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((16, 1, None, 4), (1, 2, 4, 8, 16)),
        ((12, 1, None, 4), (1, 2, 4, 12)),  # 3 and 6 would cross without need
        ((24, 2, 12, 6), (2, 3, 6, 12)),
        ((12, 1, None, 5), (1, 6, 12)),  # no size is made of whole nodes
        ((6, 3, 3, 4), (3,)),  # better across than not at all
        ((12, 1, 6, 8), (1, 2, 4, 6)),  # the largest one asked for, which long samples may need
        ((12, 1, 3, 8), (1, 2, 3)),
    ],
)
def test_some_sizes_by_hand(arguments, expected):
    assert allowed_sizes(*arguments) == expected


@pytest.mark.parametrize("ranks", PLANES)
def test_chains_nest_and_start_at_the_whole_plane(ranks):
    chains = size_chains(tuple(sizes_of(ranks)))
    assert 1 <= len(chains) <= 2
    for chain in chains:
        assert (chain[0], chain[-1]) == (1, ranks)
        assert all(b % a == 0 and a < b for a, b in pairwise(chain))
    if ranks & (ranks - 1) == 0:
        assert chains == [tuple(sizes_of(ranks))]


@pytest.mark.parametrize("ranks", PLANES)
def test_no_size_can_be_put_between_two_of_a_chain(ranks):
    for sizes in (tuple(sizes_of(ranks)), tuple(sizes_of(ranks))[1:], allowed_sizes(ranks, ranks_per_node=8)):
        for chain in size_chains(sizes) if sizes else []:
            assert chain[-1] == sizes[-1]
            for a, b in pairwise(chain):
                assert not any(a < c < b and c % a == 0 and b % c == 0 for c in sizes)
            assert not any(chain[0] % c == 0 for c in sizes if c < chain[0])


def test_the_two_chains_of_48_ranks():
    assert size_chains((1, 2, 3, 4, 6, 8, 12, 16, 24, 48)) == [(1, 2, 4, 8, 16, 48), (1, 3, 6, 12, 24, 48)]


@pytest.mark.parametrize("size", [0, -1, 3, 16, 2.0, "2", True])
def test_limits_that_are_no_divisors_are_refused_with_those_that_are(size):
    for name, limits in (("min_context_parallel_size", (size, None)), ("max_context_parallel_size", (1, size))):
        (problem,) = size_problems(8, *limits)
        assert problem.asked == f"{name}={size!r}"
        assert "1, 2, 4, 8" in problem.remedy


def test_limits_the_wrong_way_round_are_refused():
    (problem,) = size_problems(8, 4, 2)
    assert "min_context_parallel_size=4, max_context_parallel_size=2" in problem.asked
    assert size_problems(8, 2, 4) == size_problems(8, 4, 4) == size_problems(8, 1, None) == []


def test_two_bad_limits_are_two_problems():
    assert len(size_problems(8, 3, 5)) == 2
