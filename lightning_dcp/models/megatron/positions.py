"""How a Megatron-Core model is told where tokens lie: what is wrong with the kind, or with the longest sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_dcp.errors import Problem

_POSITIONS = ("rope", "learned_absolute", "none")
_YARN = tuple(
    f"yarn_{name}"
    for name in (
        "rotary_scaling_factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "correction_range_round_to_int",
    )
)
"""What GPTModel reads of its config for ``yarn``; no TransformerConfig of the tested releases has it."""


def position_problems(kind: str, config: Any = None) -> Iterator[Problem]:
    """What stands against a ``position_embedding_type``.

    Args:
        kind: the type.
        config: of a model of the user's own, which may have the attributes that ``yarn`` needs.
    """
    lacking = [name for name in _YARN if not hasattr(config, name)]
    if kind == "yarn" and lacking:
        found = f"a TransformerConfig without {', '.join(lacking)}, which Megatron-Core's GPTModel reads for it"
        yield Problem("position_embedding_type='yarn'", found, "use 'rope', with rope_scaling (Llama 3's) if need be")
    elif kind not in (*_POSITIONS, "yarn"):
        found = "three positions a token, where samples have one" if kind == "mrope" else "an unknown value"
        yield Problem(f"position_embedding_type={kind!r}", found, f"use one of {list(_POSITIONS)}")


def length_problems(kind: str, longest: int | None) -> Iterator[Problem]:
    """What is wrong with a longest sample: learned positions are a table with a row for each of its tokens.

    Args:
        kind: the ``position_embedding_type``.
        longest: the ``max_sequence_length`` that was asked for, in tokens; None where nothing is said.
    """
    if longest is None and kind == "learned_absolute":
        remedy = "give the tokens of the longest sample as max_sequence_length"
        yield Problem("position_embedding_type='learned_absolute'", "no max_sequence_length", remedy)
    elif longest is not None and (not isinstance(longest, int) or isinstance(longest, bool) or longest < 1):
        remedy = "give the tokens of the longest sample"
        yield Problem(f"max_sequence_length={longest!r}", "not a positive whole number", remedy)


def rotary_problems(asked: str, head: int, percent: float) -> Iterator[Problem]:
    """Whether rotary embeddings fit into a head: they turn pairs of numbers, and Megatron-Core rounds up to whole ones.

    Args:
        asked: what says the size of a head.
        head: that size.
        percent: the share of a head that is turned.
    """
    turned = int(head * percent) if percent < 1.0 else head  # as RotaryEmbedding has it
    if turned + turned % 2 > head:
        found = f"heads of {head}, an odd size, and rotary embeddings turn pairs of numbers"
        remedy = "use heads of an even size: hidden_size / num_attention_heads, or kv_channels"
        yield Problem(asked, found, remedy)
