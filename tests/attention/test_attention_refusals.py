"""What attention refuses: everything that does not fit, in one message."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_dcp.attention import AttentionKind, attention, context_parallel_attention
from lightning_dcp.attention.engine import kind_problems
from lightning_dcp.errors import UnsupportedAttentionError
from lightning_dcp.parallel.blocks import AttentionMask
from lightning_dcp.parallel.context import CPContext, make_context
from lightning_dcp.parallel.groups import CPGroup

LENGTHS = (5, 3)


@pytest.fixture
def context() -> CPContext:
    """A pack of two samples on a group of one rank."""
    return make_context(CPGroup(None, (0,)), 0, LENGTHS)


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape) for shape in shapes]


SHAPES = [
    ((7, 4, 6), (8, 2, 6), (8, 2, 6), "7 queries, 8 keys and 8 values; this rank holds 8"),
    ((8, 4, 6), (9, 2, 6), (8, 2, 6), "8 queries, 9 keys and 8 values"),
    ((8, 4, 6), (8, 2, 6), (1, 2, 6), "8 queries, 8 keys and 1 values"),
    ((9, 4, 6), (9, 2, 6), (9, 2, 6), "9 queries, 9 keys and 9 values"),
    ((8, 4, 6), (8, 2, 5), (8, 2, 5), "heads differ"),
    ((8, 4, 6), (8, 2, 6), (8, 4, 6), "heads differ"),
    ((8, 4, 6), (8, 3, 6), (8, 3, 6), "4 query heads are no multiple of 3 key heads"),
    ((8, 2, 6), (8, 4, 6), (8, 4, 6), "2 query heads are no multiple of 4 key heads"),
    ((8, 4, 6), (8, 0, 6), (8, 0, 6), "4 query heads are no multiple of 0 key heads"),
    ((1, 8, 4, 6), (8, 2, 6), (8, 2, 6), r"not \[tokens, heads, head_dim\]"),
    ((8, 6), (8, 6), (8, 6), r"not \[tokens, heads, head_dim\]"),
]


@pytest.mark.parametrize(("q", "k", "v", "message"), SHAPES)
def test_shapes_that_do_not_fit(
    context: CPContext, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], message: str
) -> None:
    with pytest.raises(UnsupportedAttentionError, match=message):
        context_parallel_attention(*tensors(q, k, v), context)


KIND_PROBLEMS = {
    "window_size=(-2, 0)": AttentionKind(AttentionMask(window_size=(-2, 0))),
    "window_size=(1, 2, 3)": AttentionKind(AttentionMask(window_size=(1, 2, 3))),  # type: ignore[arg-type]
    "softcap=-1.0": AttentionKind(softcap=-1.0),
    "softcap=nan": AttentionKind(softcap=math.nan),
    "softcap=inf": AttentionKind(softcap=math.inf),
    "scale=nan": AttentionKind(scale=math.nan),
    "scale=inf": AttentionKind(scale=math.inf),
    "sinks of shape (3,)": AttentionKind(sinks=torch.zeros(3)),
    "sinks of shape (1, 4)": AttentionKind(sinks=torch.zeros(1, 4)),
    "causal or not is given for 3 samples; the pack has 2": AttentionKind(AttentionMask((True, False, True))),
}


@pytest.mark.parametrize("problem", KIND_PROBLEMS)
def test_kinds_without_sense(context: CPContext, problem: str) -> None:
    q, k, v = tensors((8, 4, 6), (8, 2, 6), (8, 2, 6))
    with pytest.raises(UnsupportedAttentionError) as caught:
        context_parallel_attention(q, k, v, context, KIND_PROBLEMS[problem])
    assert problem in str(caught.value)
    assert ";" not in str(caught.value).replace("; the pack has", "").replace("; expected", "")  # no other problem
    assert len(kind_problems(KIND_PROBLEMS[problem], 4, 2)) == 1


def test_kinds_with_sense_have_no_problem() -> None:
    mask = AttentionMask((True, False), (0, -1))
    assert kind_problems(AttentionKind(mask, -0.5, 3.0, torch.zeros(4)), 4, 2) == []


def test_all_problems_are_in_one_message(context: CPContext) -> None:
    q, k, v = tensors((8, 4, 6), (9, 3, 5), (8, 3, 5))
    kind = AttentionKind(AttentionMask((True,), (-5, 0)), math.nan, -2.0, torch.zeros(5))
    with pytest.raises(UnsupportedAttentionError) as caught:
        context_parallel_attention(q, k.double(), v, context, kind)
    for problem in (
        "8 queries, 9 keys and 8 values",
        "heads differ",
        "4 query heads are no multiple of 3 key heads",
        "q, k and v must be of one dtype of float64, float32, bfloat16, float16",
        "causal or not is given for 1 samples",
        "window_size=(-5, 0)",
        "softcap=-2.0",
        "scale=nan",
        "sinks of shape (5,)",
    ):
        assert problem in str(caught.value)


def test_an_unknown_scheme_is_told_those_there_are(context: CPContext) -> None:
    q, k, v = tensors((8, 4, 6), (8, 2, 6), (8, 2, 6))
    for scheme in ("rings", lambda *_: "rings"):
        with pytest.raises(UnsupportedAttentionError, match="'rings'; there are ring, all_gather, ulysses"):
            context_parallel_attention(q, k, v, context, scheme=scheme)


def test_a_kernel_that_cannot_compute_the_call_is_told_those_that_can(context: CPContext) -> None:
    q, k, v = tensors((8, 4, 6), (8, 2, 6), (8, 2, 6))
    capped = AttentionKind(softcap=2.0)
    assert context_parallel_attention(q, k, v, context, capped, kernel="auto").shape == (8, 4, 6)
    with pytest.raises(UnsupportedAttentionError, match=r"'cpu_flash'.*it has no soft-cap.*reference"):
        context_parallel_attention(q, k, v, context, capped, kernel="cpu_flash")
    with pytest.raises(UnsupportedAttentionError, match="unknown attention kernel 'flesh'"):
        context_parallel_attention(q, k, v, context, kernel="flesh")


def test_a_device_without_data_has_no_kernel(context: CPContext) -> None:
    q, k, v = (t.to("meta") for t in tensors((8, 4, 6), (8, 2, 6), (8, 2, 6)))
    with pytest.raises(UnsupportedAttentionError, match="device meta"):
        context_parallel_attention(q, k, v, context)


def test_all_problems_of_a_call_by_a_model_are_in_one_message() -> None:
    q, k, v = tensors((2, 4, 8, 6), (3, 2, 8, 6), (8, 6))
    with pytest.raises(UnsupportedAttentionError) as caught:
        attention(q, k, v)
    for problem in ("the key has shape (3, 2, 8, 6)", "the value has shape (8, 6)"):
        assert problem in str(caught.value)
    with pytest.raises(UnsupportedAttentionError) as caught:
        attention(q, q[:, :3], q[:, :3], window_size=(-3, 0), softcap=-1.0, sinks=torch.zeros(2))
    for problem in ("no multiple of 3 key heads", "window_size=(-3, 0)", "softcap=-1.0", "sinks of shape (2,)"):
        assert problem in str(caught.value)
