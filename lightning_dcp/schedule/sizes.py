"""Which CP sizes a scheduler may use together."""

from __future__ import annotations

from lightning_dcp.errors import Problem
from lightning_dcp.schedule.plan import divisors


def allowed_sizes(
    ranks: int, smallest: int = 1, largest: int | None = None, ranks_per_node: int | None = None
) -> tuple[int, ...]:
    """The divisors of the plane from ``smallest`` to ``largest``, ascending, whose groups stay inside a node.

    Groups are aligned, so one of c ranks never crosses from node to node if c divides the ranks of a node; larger ones
    are made of whole nodes where the plane allows it. A size that would cross without need is left out, but never the
    largest one asked for, which long samples may need.
    """
    sizes = tuple(c for c in divisors(ranks) if smallest <= c <= (largest or ranks))
    if ranks_per_node is None or ranks_per_node >= ranks:
        return sizes
    inside = [c for c in sizes if ranks_per_node % c == 0]
    beyond = [c for c in sizes if c > ranks_per_node]
    whole = [c for c in beyond if c % ranks_per_node == 0]
    return tuple(sorted({*inside, *(whole or beyond), *sizes[-1:]}))


def size_chains(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Sets of sizes of which each divides the next, so that blocks of ranks nest; each holds the largest size.

    Two ways down from the largest size are tried: by the smallest steps (48, 24, 12, 6, 3, 1) and by the largest
    (48, 16, 8, 4, 2, 1). On planes of a power of two they are the same.
    """
    chains = []
    for pick in (max, min):
        chain = [sizes[-1]]
        while smaller := [c for c in sizes if c < chain[-1] and chain[-1] % c == 0]:
            direct = [c for c in smaller if not any(d % c == 0 and d != c for d in smaller)]
            chain.append(pick(direct))
        chains.append(tuple(reversed(chain)))
    return sorted(set(chains))


def size_problems(ranks: int, smallest: int, largest: int | None) -> list[Problem]:
    """What is wrong with a smallest and a largest size."""
    problems = []
    for name, size in (("min_context_parallel_size", smallest), ("max_context_parallel_size", largest)):
        if size is not None and (type(size) is not int or size not in divisors(ranks)):
            found = f"not a divisor of the plane of {ranks} ranks"
            problems.append(Problem(f"{name}={size!r}", found, f"use one of {', '.join(map(str, divisors(ranks)))}"))
    if not problems and largest is not None and smallest > largest:
        asked = f"min_context_parallel_size={smallest}, max_context_parallel_size={largest}"
        problems.append(Problem(asked, "a smallest size above the largest", "swap them"))
    return problems
