"""No sample of a pack has any influence on another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dcp.attention.options import AttentionOptions
from lightning_dcp.attention.sdpa import ContextParallelAttention
from lightning_dcp.batch.view import view
from lightning_dcp.models.decoder import Decoder
from lightning_dcp.models.pack import ActivePack
from lightning_dcp.models.region import Regions
from lightning_dcp.parallel.context import CPContext
from tests.attention.dense import KINDS, Inputs
from tests.attention.support import (
    KERNELS,
    SCHEMES,
    Case,
    Round,
    attend_on,
    attend_played,
    join_shares,
    local_leaves,
    played_contexts,
    share_of,
)
from tests.parallel.support import sample_slices
from tests.support.ranks import RankPool

PACK = Inputs((13, 29, 2, 7))
VALUES = ("kept", "other", "nan")
"""Of the first sample."""


def assert_only_the_first_changed(versions: list[dict[str, np.ndarray]], where: list[slice], what: Any) -> None:
    """Each array differs from the first version's in the first sample, and in no bit elsewhere."""
    before, *changed = versions
    first, *others = where
    for after in changed:
        for name in before:
            assert not np.array_equal(before[name][first], after[name][first]), (name, what)
            for other in others:
                assert np.isfinite(before[name][other]).all()
                assert np.array_equal(before[name][other], after[name][other]), (name, other, what)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_other_values_in_the_first_sample_leave_the_rest_bit_identical(ranks: RankPool, size: int) -> None:
    cases = [
        Case(PACK, size, layout, kernel, scheme)
        for layout, kernel, scheme in product(("zigzag", "random"), KERNELS, SCHEMES)
    ]
    rounds: list[Round] = [
        {0: replace(case, inputs=replace(PACK, first_sample=first))} for case in cases for first in VALUES
    ]
    got = [attended.arrays for _, attended in attend_on(ranks, size, rounds)]
    for i, case in enumerate(cases):
        assert_only_the_first_changed(got[3 * i : 3 * i + 3], sample_slices(PACK.lengths), case)


@pytest.mark.parametrize("kind", sorted(name for name, kind in KINDS.items() if not kind.sinks))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_kind_of_attention_crosses_samples(scheme: str, kind: str) -> None:
    for size, kernel in ((1, "varlen"), (2, "auto"), (3, "reference"), (8, "auto")):
        case = Case(PACK, size, "zigzag", kernel, scheme, KINDS[kind])
        versions = [attend_played(replace(case, inputs=replace(PACK, first_sample=first))) for first in VALUES]
        arrays = [version.arrays for version in versions]
        if case.kind.window_size == (0, 0):  # one key has all the weight: scores do not matter
            arrays = [{name: array[name] for name in ("out", "dv")} for array in arrays]
        assert_only_the_first_changed(arrays, sample_slices(PACK.lengths), case)


def test_the_gradient_of_sinks_is_all_that_samples_share() -> None:
    case = Case(PACK, 2, kind=KINDS["sinks"])
    versions = [attend_played(replace(case, inputs=replace(PACK, first_sample=first))).arrays for first in VALUES]
    assert not np.array_equal(versions[0].pop("dsinks"), versions[1].pop("dsinks"))
    assert np.isnan(versions[2].pop("dsinks")).all()
    assert_only_the_first_changed(versions, sample_slices(PACK.lengths), case)


def on_played_ranks(size: int, job: Callable[[CPContext], Any]) -> list[Any]:
    """A job on each rank of a played group that has the pack."""
    played, context = played_contexts(Case(PACK, size))
    return played.run(lambda exchange: job(context(exchange)))


def _through_torchs_function(context: CPContext, scheme: str, kernel: str, first: str) -> tuple[dict[str, Any], int]:
    leaves, grad = local_leaves(replace(PACK, first_sample=first), context)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in leaves)
    with ContextParallelAttention(context, AttentionOptions(scheme, kernel)) as mode:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out = out[0].transpose(0, 1)
    out.backward(grad)
    return share_of(context, out, [t.grad for t in leaves]), mode.calls


@pytest.mark.parametrize("kernel", ["auto", "cpu_flash", "reference"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_nothing_leaks_through_torchs_function(size: int, scheme: str, kernel: str) -> None:
    versions = []
    for first in VALUES:
        results = on_played_ranks(size, partial(_through_torchs_function, scheme=scheme, kernel=kernel, first=first))
        assert [calls for _, calls in results] == [1] * size
        versions.append(join_shares(PACK, [share for share, _ in results]).arrays)
    assert_only_the_first_changed(versions, sample_slices(PACK.lengths), (size, scheme, kernel))


# --- a whole model


class Layers(nn.Module):
    """Two layers of attention over per-token vectors, as models write it; a mask is passed on as models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.ModuleList([nn.Linear(8, 24) for _ in range(2)])

    def forward(self, x: Tensor, position_ids: Tensor | None = None, attention_mask: Tensor | None = None) -> Tensor:
        for layer in self.qkv:
            q, k, v = layer(x).unflatten(-1, (6, 4)).transpose(1, 2).chunk(3, dim=1)
            mixed = F.scaled_dot_product_attention(q, k, v, attention_mask, is_causal=True)
            x = x + mixed.transpose(1, 2).flatten(2)
        return x


def _region_of_vectors(context: CPContext, mask: bool, first: str) -> list[dict[str, np.ndarray]]:
    """Per sample: outputs and gradients of the inputs of a region that is called with whole samples."""
    generator = torch.Generator().manual_seed(0)
    rows, longest = len(PACK.lengths), max(PACK.lengths)
    x = torch.randn(rows, longest, 8, dtype=torch.float64, generator=generator)
    weights = torch.randn(rows, longest, 8, dtype=torch.float64, generator=generator)
    if first != "kept":
        x[0] = torch.nan if first == "nan" else torch.randn(longest, 8, dtype=torch.float64, generator=generator)
    real = torch.arange(longest)[None, :] < torch.tensor(PACK.lengths)[:, None]
    x.requires_grad_()
    batch = {"input_ids": real.long(), "attention_mask": real.long()}
    model = Layers().double()
    regions = Regions({"model": model})
    regions.install()
    pack = ActivePack(view(batch), context, max_tokens=100)
    with regions.active(pack):
        # all ones, as a library makes them where it is given none
        out = model(x, attention_mask=torch.ones_like(real, dtype=torch.long) if mask else None)
    with regions.backward_of(pack):
        (out * weights)[real].sum().backward()
    return [{"out": out[i, :n].detach().numpy(), "dx": x.grad[i, :n].numpy()} for i, n in enumerate(PACK.lengths)]


@pytest.mark.parametrize("mask", [False, True], ids=["no mask", "mask of ones"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_nothing_leaks_through_a_region(size: int, mask: bool) -> None:
    by_rank = [on_played_ranks(size, partial(_region_of_vectors, mask=mask, first=first)) for first in VALUES]
    for rank in range(size):
        before, *changed = (version[rank] for version in by_rank)
        for after in changed:
            for sample, (own, other) in enumerate(zip(before, after, strict=True)):
                for name in own:
                    assert np.array_equal(own[name], other[name]) == (sample > 0), (sample, name)
                    assert sample == 0 or np.isfinite(own[name]).all()


def _region_of_tokens(context: CPContext, changed: bool) -> list[np.ndarray]:
    """The logits of each sample, and the gradients of the parameters by the samples after the first."""
    ids = torch.nn.utils.rnn.pad_sequence(
        [torch.arange(n) * (i + 3) % 17 for i, n in enumerate(PACK.lengths)], batch_first=True
    )
    if changed:
        ids[0] = (ids[0] * 5 + 1) % 17
    torch.manual_seed(0)
    model = Decoder(17, hidden_size=16, num_layers=2, num_heads=2, ffn_hidden_size=24).double()
    real = torch.arange(ids.shape[1])[None, :] < torch.tensor(PACK.lengths)[:, None]
    regions = Regions({"model": model})
    regions.install()
    pack = ActivePack(view({"input_ids": ids, "attention_mask": real.long()}), context, max_tokens=100)
    with regions.active(pack):
        logits = model(ids)
    with regions.backward_of(pack):
        logits[1:].square().sum().backward()
    samples = [logits[i, :n].detach().numpy() for i, n in enumerate(PACK.lengths)]
    return samples + [p.grad.numpy() for p in model.parameters()]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_tokens_of_one_document_change_no_logit_and_no_gradient_of_another(size: int) -> None:
    versions = (on_played_ranks(size, partial(_region_of_tokens, changed=changed)) for changed in (False, True))
    samples = len(PACK.lengths)
    for before, after in zip(*versions, strict=True):
        assert not np.array_equal(before[0], after[0])
        for own, other in zip(before[1:samples], after[1:samples], strict=True):
            assert np.array_equal(own, other)
        for own, other in zip(before[samples:], after[samples:], strict=True):  # sums over all samples
            np.testing.assert_allclose(own, other, rtol=0, atol=1e-12)
