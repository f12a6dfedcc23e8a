"""No sample of a pack has any influence on another, in any Hugging Face model; positions and labels are per sample."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dcp.batch.labels import shifted_labels
from lightning_dcp.errors import BatchError
from lightning_dcp.models.huggingface.adapter import TransformerAdapter
from lightning_dcp.models.huggingface.loss import take_labels
from tests.models.families import FAMILIES, build, lacking
from tests.models.regions import on_played_ranks, packed, padded
from tests.support.training import VOCAB

HERE = [name for name in FAMILIES if name not in lacking(FAMILIES)]
LENGTHS = (13, 9, 1, 6)


def samples_of(lengths: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (n,), generator=generator) for n in lengths]


def logits(model: Any, batch: Any) -> Tensor:
    return model(batch["input_ids"]).logits.detach()


def logits_with_ones(model: Any, batch: Any) -> Tensor:
    return model(batch["input_ids"], attention_mask=torch.ones_like(batch["input_ids"])).logits.detach()


@pytest.mark.parametrize("family", HERE)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_nothing_leaks(family: str, size: int) -> None:
    model, samples = build(family).double(), samples_of(LENGTHS)
    changed = [samples[0] % (VOCAB - 1) + 1, *samples[1:]]  # every token is another one
    before = on_played_ranks(model, packed(samples), size, logits)
    for call in (logits, logits_with_ones):
        after = on_played_ranks(model, packed(changed), size, call)
        for one, other in zip(before, after, strict=True):
            assert torch.equal(one[:, 13:], other[:, 13:])
            assert not torch.equal(one[:, :13], other[:, :13])


@pytest.mark.parametrize("family", HERE)
def test_a_sample_is_what_it_is_alone_wherever_it_lies(family: str) -> None:
    """In slots 1 and 3 of a pack, in either order of CP sizes (CASES P2.1, P2.2)."""
    model, (first, second, *_) = build(family).double(), samples_of(LENGTHS)
    alone = model(first.unsqueeze(0)).logits[0].detach()
    for sizes in ((1, 4, 2), (4, 1, 3)):
        for size in sizes:
            for out in on_played_ranks(model, packed([first, second, first]), size, logits):
                for start in (0, 22):
                    # float32 inside the model rounds in the same way for the same token, but attention adds in another order
                    torch.testing.assert_close(out[0, start : start + 13], alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "gpt-oss", "gemma2"])
@pytest.mark.parametrize("tokens", [2, 3, 4, 5, 8, 17])
def test_as_many_tokens_as_experts_heads_or_words(family: str, tokens: int) -> None:
    """Scores of a router, ``[T, E]`` or ``[1, T, E]``, are no attention scores, even where they are square."""
    model, samples = build(family).double(), samples_of((tokens, 2 * tokens))
    for size, batch in ((1, [samples[0]]), (2, [samples[1]]), (4, samples)):
        expected = [model(ids.unsqueeze(0)).logits[0].detach() for ids in batch]
        for out in on_played_ranks(model, packed(batch), size, logits):
            torch.testing.assert_close(out[0], torch.cat(expected), rtol=1e-6, atol=1e-6)


# --- labels


def test_targets_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES P1.1: the target of a shard's last token lies on another rank."""
    ids = torch.arange(10, 18)
    found: list[list[int]] = []

    def call(self: TransformerAdapter, call: Any) -> Any:
        asked = take_labels(call)
        assert asked is not None
        found.append(call.local_targets(asked.targets)[0].tolist())
        return call.run(all_ones=True)

    monkeypatch.setattr(TransformerAdapter, "call", call)
    model = build("llama", vocab_size=18).double()
    on_played_ranks(model, packed([ids]), 2, lambda m, batch: m(batch["input_ids"], labels=batch["labels"]))
    assert sorted(found) == sorted([[11, 12, 17, -100], [13, 14, 15, 16]])


LOSSES = {
    "labels": lambda model, batch: model(batch["input_ids"], labels=batch["labels"]).loss,
    "log-probs": lambda model, batch: _mean_log_prob(model(batch["input_ids"]).logits, batch),
}


def _mean_log_prob(out: Tensor, batch: Any) -> Tensor:
    """The mean log-probability of what follows, by hand, sample by sample."""
    starts = batch.cu_seqlens.tolist()
    terms = []
    for start, end in pairwise(starts):
        picked = out[0, start : end - 1].log_softmax(-1).gather(1, batch["labels"][0, start + 1 : end, None])
        terms.append(picked.squeeze(1))
    return -torch.cat(terms).mean()


@pytest.mark.parametrize("fused", [False, True], ids=["logits", "fused"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_pairs_are_those_of_each_sample(size: int, fused: bool) -> None:
    """CASES P1.2, P1.3: the same number from labels, from shifted ones, from log-probabilities; in any order of samples."""
    model, samples = build("llama").double(), samples_of((3, 2, 9))
    expected = torch.cat([_terms(model, ids) for ids in samples]).mean()
    for order in ((0, 1, 2), (2, 0, 1)):
        batch = packed([samples[i] for i in order])
        for call in LOSSES.values():
            for loss in on_played_ranks(model, batch, size, call, fused=fused):
                torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)


def _terms(model: Any, ids: Tensor) -> Tensor:
    out = model(ids.unsqueeze(0)).logits[0].detach()
    return -out[:-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)


def test_the_fused_loss_makes_no_logits() -> None:
    model, batch = build("llama").double(), packed(samples_of((3, 2)))
    (out,) = on_played_ranks(model, batch, 1, lambda m, b: m(b["input_ids"], labels=b["labels"]), fused=True)
    assert out.logits is None
    assert out.loss.dim() == 0


def test_targets_of_a_pack_of_two() -> None:
    """CASES P1.3, P1.8: [5, 6, 7] and [8, 9], packed, and padded to 4 each."""
    samples = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
    assert shifted_labels(packed(samples)).tolist() == [[6, 7, -100, 9, -100]]
    assert shifted_labels(padded(samples)).tolist() == [[6, 7, -100], [9, -100, -100]]
    both = packed(samples)
    both.fields["shift_labels"] = both["labels"]
    with pytest.raises(BatchError, match="both labels and shift_labels"):
        shifted_labels(both)


@pytest.mark.parametrize("size", [2, 4])
def test_padding_holds_zeros_and_gradients_reach_last_tokens(size: int) -> None:
    """CASES P1.7: samples of 7, 5, 1 and 13 tokens."""
    samples = samples_of((7, 5, 1, 13), seed=1)
    model, batch = build("llama").double(), padded(samples)
    call = lambda m, b: m(b["input_ids"], attention_mask=b["attention_mask"]).logits.detach()  # noqa: E731
    one = on_played_ranks(model, batch, 1, call)[0]
    for out in on_played_ranks(model, batch, size, call):
        real = batch["attention_mask"].bool()
        torch.testing.assert_close(out[real], one[real], rtol=1e-6, atol=1e-6)
        assert bool((out[~real] == 0).all())
    again = on_played_ranks(model, batch, size, call)
    first = on_played_ranks(model, batch, size, call)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


# --- positions


def seen_positions(model: Any, batch: Any, **given: Any) -> list[int]:
    """The positions that the model's rotary embedding gets."""
    seen: list[Tensor] = []

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((*args, *kwargs.values())[1])

    handle = model.model.rotary_emb.register_forward_pre_hook(note, with_kwargs=True)
    try:
        model(batch["input_ids"], **given)
    finally:
        handle.remove()
    return seen[0].tolist()


def test_positions_follow_each_call_s_group() -> None:
    """CASES P2.1: two samples of 4 at CP 2, then at CP 1."""
    model, batch = build("llama").double(), packed(samples_of((4, 4)))
    assert on_played_ranks(model, batch, 2, seen_positions) == [[[0, 3, 0, 3]], [[1, 2, 1, 2]]]
    assert on_played_ranks(model, packed(samples_of((4,))), 1, seen_positions) == [[[0, 1, 2, 3]]]


def test_positions_given_by_the_user_are_cut() -> None:
    model, batch = build("llama").double(), packed(samples_of((4, 4)))
    given = torch.arange(100, 108).unsqueeze(0)
    found = on_played_ranks(model, batch, 2, lambda m, b: seen_positions(m, b, position_ids=given))
    assert found == [[[100, 103, 104, 107]], [[101, 102, 105, 106]]]


def test_positions_with_an_axis_in_front() -> None:
    """CASES P2.3: three kinds of positions, as models of images and text have them; samples come from the plan."""
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel

    from tests.models.families import SIZES, enlarge
    from tests.models.oracle import DENSE

    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    section = {"rope_type": "default", "type": "default", "mrope_section": [1, 1, 0], "rope_theta": 10000.0}
    config = Qwen2VLTextConfig(**sizes, rope_scaling=section)
    config._attn_implementation = DENSE
    torch.manual_seed(0)
    model = enlarge(Qwen2VLTextModel(config)).double()
    samples = samples_of((8, 5))
    positions = torch.stack([torch.cat([torch.arange(8), torch.arange(5)]) * k for k in (1, 2, 3)]).unsqueeze(1)
    alone = [
        model(ids.unsqueeze(0), position_ids=positions[:, :, span]).last_hidden_state[0].detach()
        for ids, span in zip(samples, (slice(0, 8), slice(8, 13)), strict=True)
    ]
    call = lambda m, b: m(b["input_ids"], position_ids=positions).last_hidden_state.detach()  # noqa: E731
    for size in (1, 2, 4):
        for out in on_played_ranks(model, packed(samples), size, call):
            torch.testing.assert_close(out[0], torch.cat(alone), rtol=1e-6, atol=1e-6)
