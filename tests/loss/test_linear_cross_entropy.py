"""Fused linear cross-entropy against torch's own on all logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from lightning_dcp.batch import PackedBatch
from lightning_dcp.batch.labels import shifted_labels
from lightning_dcp.loss import linear_cross_entropy, linear_log_probs
from lightning_dcp.parallel.layout import build_layout
from tests.loss.oracle import gradients, head, textbook_logits, textbook_loss

EXACT = 1e-10


def check_same(got, expected, inputs, tolerance=EXACT):
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance, equal_nan=True)
    for own, wanted in zip(gradients(got, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(own, wanted, rtol=0, atol=tolerance)


# --- values and gradients


@settings(max_examples=120)
@given(
    shape=st.sampled_from([(1,), (7,), (2, 5), (1, 6), (2, 2, 3)]),
    vocabulary=st.sampled_from([1, 2, 11, 13]),
    with_bias=st.booleans(),
    weighted=st.booleans(),
    transform=st.fixed_dictionaries(
        {
            "softcap": st.sampled_from([None, 2.0]),
            "logit_scale": st.sampled_from([1.0, 0.25]),
            "temperature": st.sampled_from([1.0, 0.7, 3.0]),
        }
    ),
    options=st.fixed_dictionaries(
        {
            "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
            "z_loss": st.sampled_from([0.0, 0.3]),
            "reduction": st.sampled_from(["none", "sum", "mean"]),
        }
    ),
    way=st.sampled_from([{"fused": False}, {}, {"chunk_tokens": 1}, {"chunk_tokens": 3}, {"chunk_tokens": 100}]),
)
def test_any_options_give_the_textbooks_loss_and_gradients(
    shape, vocabulary, with_bias, weighted, transform, options, way
):
    hidden, weight, bias, targets = head(*shape, vocabulary=vocabulary, bias=with_bias)
    targets.view(-1)[0] = 0  # at least one
    weights = torch.linspace(0, 2, targets.numel(), dtype=torch.float64).reshape(shape) + 0.1 if weighted else None
    common = {"bias": bias, "token_weights": weights, **options, **transform}
    got = linear_cross_entropy(hidden, weight, targets, **common, **way)
    check_same(got, textbook_loss(hidden, weight, targets, **common), (hidden, weight, bias))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("case", ["some", "all", "none at all"])
@pytest.mark.parametrize("way", [{}, {"chunk_tokens": 2}, {"fused": False}])
def test_ignored_targets_are_torchs_own(smoothing, reduction, case, way):
    hidden, weight, bias, targets = head(0 if case == "none at all" else 6)
    targets = torch.full_like(targets, 4) if case == "all" else targets
    ignore_index = 4
    targets = torch.where(targets == -100, ignore_index, targets)
    got = linear_cross_entropy(
        hidden,
        weight,
        targets,
        bias=bias,
        ignore_index=ignore_index,
        label_smoothing=smoothing,
        reduction=reduction,
        **way,
    )
    expected = F.cross_entropy(
        F.linear(hidden, weight, bias),
        targets,
        ignore_index=ignore_index,
        label_smoothing=smoothing,
        reduction=reduction,
    )
    assert got.isnan().any() == (reduction == "mean" and case != "some")
    check_same(got, expected, (hidden, weight, bias))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_log_probs_logsumexp_and_entropy(fused, softcap):
    hidden, weight, bias, targets = head(3, 4)
    transform = {"softcap": softcap, "logit_scale": 0.5, "temperature": 0.8}
    way = {"chunk_tokens": 5} if fused else {"fused": False}
    got = linear_log_probs(
        hidden, weight, targets, bias=bias, with_entropy=True, with_logsumexp=True, **transform, **way
    )
    log_probs = textbook_logits(hidden, weight, bias, **transform).log_softmax(-1)
    picked = log_probs.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets >= 0)
    lse = textbook_logits(hidden, weight, bias, **transform).logsumexp(-1)
    entropy = torch.distributions.Categorical(logits=log_probs).entropy()
    for own, wanted in zip(got, (picked, lse, entropy), strict=True):
        check_same(own, wanted, (hidden, weight, bias))
    check_same(sum(got), picked + lse + entropy, (hidden, weight, bias))


def test_only_what_is_asked_for_is_given():
    hidden, weight, _, targets = head(4)
    log_prob, lse, entropy = linear_log_probs(hidden, weight, targets)
    assert log_prob.shape == targets.shape and lse is None and entropy is None
    asked = linear_log_probs(hidden, weight, targets, with_entropy=True)
    assert asked.entropy.shape == targets.shape and asked.logsumexp is None
    check_same(asked.log_prob, log_prob, (hidden, weight))


def test_gradients_are_those_of_finite_differences():
    hidden, weight, bias, targets = head(4, width=3, vocabulary=5)

    def all_at_once(hidden, weight, bias):
        got = linear_log_probs(
            hidden, weight, targets, bias=bias, softcap=2.0, temperature=0.6, logit_scale=1.3, chunk_tokens=3,
            with_entropy=True, with_logsumexp=True,
        )  # fmt: skip
        smooth = linear_cross_entropy(hidden, weight, targets, bias=bias, label_smoothing=0.3, z_loss=0.1)
        return *got, smooth

    assert torch.autograd.gradcheck(all_at_once, (hidden, weight, bias))


# --- token weights (CASES L0.8, L0.10)


def test_a_first_weight_of_0_leaves_the_rest():
    hidden, weight, _, _ = head(3)
    targets, weights = torch.tensor([-100, 4, 7]), torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    for reduction, divisor in (("sum", 1), ("none", 1), ("mean", 3)):
        loss = linear_cross_entropy(hidden, weight, targets, token_weights=weights, reduction=reduction).sum()
        (got,) = torch.autograd.grad(loss, weight)
        error = F.linear(hidden, weight).softmax(-1) - F.one_hot(targets.clamp(min=0), 11)
        torch.testing.assert_close(got, (error * weights[:, None]).T @ hidden / divisor, rtol=0, atol=EXACT)
        assert got.abs().max() > 0.1


@pytest.mark.parametrize("way", [{}, {"fused": False}])
def test_weights_and_targets_may_change_after_the_forward(way):
    hidden, weight, _, targets = head(6)
    weights = torch.rand(6, dtype=torch.float64)
    expected = torch.autograd.grad(textbook_loss(hidden, weight, targets, token_weights=weights.clone()), weight)[0]
    loss = linear_cross_entropy(hidden, weight, targets, token_weights=weights, **way)
    weights.zero_()
    targets.fill_(3)
    torch.testing.assert_close(torch.autograd.grad(loss, weight)[0], expected, rtol=0, atol=EXACT)


def test_weights_get_their_gradient():
    hidden, weight, _, targets = head(6)
    weights = torch.rand(6, dtype=torch.float64, requires_grad=True)
    got = linear_cross_entropy(hidden, weight, targets, token_weights=weights)
    check_same(got, textbook_loss(hidden, weight, targets, token_weights=weights), (weights,))


def test_weights_of_ignored_tokens_do_not_count():
    hidden, weight, _, targets = head(6)
    weights = torch.where(targets == -100, torch.nan, 2.0).double()
    got = linear_cross_entropy(hidden, weight, targets, token_weights=weights)
    check_same(got, textbook_loss(hidden, weight, targets), (hidden, weight))


def test_the_divisor_is_the_number_of_targets():
    hidden, weight, _, targets = head(10, ignored=False)
    targets[:6] = -100  # a prompt
    total, mean = (linear_cross_entropy(hidden, weight, targets, reduction=kind) for kind in ("sum", "mean"))
    assert (total / mean).item() == pytest.approx(4, abs=1e-12)


# --- targets of shards (CASES P1.1)


def test_targets_shifted_before_they_are_cut():
    ids = torch.arange(10, 18)
    batch = PackedBatch({"input_ids": ids[None], "labels": ids[None]}, torch.tensor([0, 8]))
    targets = shifted_labels(batch)
    hidden, weight, _, _ = head(1, 8, vocabulary=20)
    layout = build_layout("zigzag", (8,), 2)
    shards = [layout.pack_index(rank) for rank in range(2)]
    assert [targets[0, shard].tolist() for shard in shards] == [[11, 12, 17, -100], [13, 14, 15, 16]]
    parts = [linear_cross_entropy(hidden[:, at], weight, targets[:, at], reduction="sum") for at in shards]
    check_same(sum(parts), textbook_loss(hidden, weight, targets, reduction="sum"), (hidden, weight))
    log_probs = torch.cat([linear_log_probs(hidden[:, at], weight, targets[:, at]).log_prob for at in shards], 1)
    whole = textbook_logits(hidden, weight).log_softmax(-1)
    expected = whole.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets >= 0)
    check_same(log_probs, expected[:, torch.cat(shards)], (hidden, weight))


# --- temperatures


@pytest.mark.parametrize("shape", [(), (1,), (2,), (2, 1), (2, 3), (6,)])
def test_equal_temperatures_are_one_number(shape):
    hidden, weight, bias, targets = head(2, 3)
    targets_of_shape = targets.reshape(1, 6) if shape == (6,) else targets
    states = hidden.reshape(1, 6, 5) if shape == (6,) else hidden
    got = linear_cross_entropy(states, weight, targets_of_shape, bias=bias, temperature=torch.full(shape, 0.5))
    check_same(got, textbook_loss(hidden, weight, targets, bias=bias, temperature=0.5), (hidden, weight, bias))


@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 3)])
def test_temperatures_of_samples_and_tokens_unfused(shape):
    hidden, weight, bias, targets = head(2, 3)
    temperature = (torch.rand(shape, dtype=torch.float64) + 0.5).requires_grad_()
    spread = temperature.reshape(*shape, *[1] * (3 - len(shape)))
    got = linear_cross_entropy(hidden, weight, targets, bias=bias, temperature=temperature, fused=False, softcap=3.0)
    expected = textbook_loss(hidden, weight, targets, bias=bias, temperature=spread, softcap=3.0)
    check_same(got, expected, (hidden, weight, bias, temperature))


# --- tensors of other kinds


def test_strides_do_not_matter():
    hidden, weight, bias, targets = head(4, 3)
    wide = hidden.detach().permute(1, 0, 2).contiguous().permute(1, 0, 2).requires_grad_()
    tall = weight.detach().T.contiguous().T.requires_grad_()
    assert not wide.is_contiguous() and not tall.is_contiguous()
    double = torch.stack([bias.detach(), bias.detach()], 1)[:, 0].requires_grad_()
    got = linear_cross_entropy(wide, tall, targets.T.contiguous().T, bias=double, chunk_tokens=5)
    expected = textbook_loss(hidden, weight, targets, bias=bias)
    assert got.item() == pytest.approx(expected.item(), abs=EXACT)
    for own, wanted in zip(
        gradients(got, (wide, tall, double)), gradients(expected, (hidden, weight, bias)), strict=True
    ):
        torch.testing.assert_close(own, wanted, rtol=0, atol=EXACT)


@pytest.mark.parametrize("wanted", range(8))
def test_only_some_inputs_want_a_gradient(wanted):
    inputs = [x.detach().requires_grad_(bool(wanted >> i & 1)) for i, x in enumerate(head(5)[:3])]
    targets = head(5)[3]
    got = linear_cross_entropy(inputs[0], inputs[1], targets, bias=inputs[2], label_smoothing=0.1)
    assert got.requires_grad == bool(wanted)
    if wanted:
        expected = textbook_loss(inputs[0], inputs[1], targets, bias=inputs[2], label_smoothing=0.1)
        check_same(got, expected, [x for x in inputs if x.requires_grad])


def test_without_gradients():
    hidden, weight, bias, targets = head(5)
    with torch.no_grad():
        got = linear_cross_entropy(hidden, weight, targets, bias=bias)
    assert not got.requires_grad
    assert got.item() == pytest.approx(textbook_loss(hidden, weight, targets, bias=bias).item(), abs=EXACT)


def test_words_that_are_masked_out():
    hidden, weight, bias, targets = head(5, ignored=False)
    targets = targets % 8
    bias = torch.cat([bias.detach()[:8], torch.full((3,), -torch.inf, dtype=torch.float64)]).requires_grad_()
    got = linear_log_probs(hidden, weight, targets, bias=bias, with_entropy=True)
    loss = linear_cross_entropy(hidden, weight, targets, bias=bias)
    check_same(loss, textbook_loss(hidden, weight, targets, bias=bias), (hidden, weight, bias))
    fewer = torch.distributions.Categorical(logits=F.linear(hidden, weight[:8], bias[:8])).entropy()
    check_same(got.entropy, fewer, (hidden, weight, bias))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype, fused):
    hidden, weight, bias, targets = head(9, dtype=dtype)
    wide = [x.detach().float().requires_grad_() for x in (hidden, weight, bias)]
    got = linear_cross_entropy(hidden, weight, targets, bias=bias, fused=fused)
    expected = textbook_loss(wide[0], wide[1], targets, bias=wide[2])
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(expected.item(), abs=1e-6)  # of bfloat16 logits it would be off by 1e-2
    for own, wanted in zip(gradients(got, (hidden, weight, bias)), gradients(expected, wide), strict=True):
        assert own.dtype == dtype
        torch.testing.assert_close(own, wanted.to(dtype), rtol=2**-7 if dtype == torch.bfloat16 else 2**-10, atol=1e-6)


def test_weight_gradients_are_added_up_in_float32():
    """256 steps of 1/256 onto 1 in bfloat16 stay 1."""
    hidden = torch.ones(512, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.zeros(512, dtype=torch.long), reduction="sum", chunk_tokens=1)
    assert torch.autograd.grad(loss, weight)[0].tolist() == [[-256.0], [256.0]]


@pytest.mark.parametrize("fused", [True, False])
def test_autocast_rounds_the_operands_of_the_product(fused):
    hidden, weight, bias, targets = head(9, dtype=torch.float32)
    rounded = [x.detach().bfloat16().float().requires_grad_() for x in (hidden, weight, bias)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = linear_cross_entropy(hidden, weight, targets, bias=bias, fused=fused)
        inside = gradients(got, (hidden, weight, bias))
    grads = gradients(got, (hidden, weight, bias))
    if fused:  # autocast must not act on the products of its backward
        assert all(torch.equal(one, other) for one, other in zip(inside, grads, strict=True))
    expected = textbook_loss(rounded[0], rounded[1], targets, bias=rounded[2])
    assert got.dtype == torch.float32 and got.item() == pytest.approx(expected.item(), abs=1e-6)
    for own, wanted in zip(grads, gradients(expected, rounded), strict=True):
        assert own.dtype == torch.float32
        # through the cast of an unfused operand gradients pass in bfloat16, as those of linear do
        torch.testing.assert_close(own, wanted, rtol=0 if fused else 2**-8, atol=1e-6)


def test_autocast_leaves_float64_alone():
    hidden, weight, bias, targets = head(9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = linear_cross_entropy(hidden, weight, targets, bias=bias)
    check_same(got, textbook_loss(hidden, weight, targets, bias=bias), (hidden, weight, bias))


def test_large_logits_keep_their_precision():
    """Shifted by the largest logit first, as log_softmax does: else 1e4 + log(2) loses its digits in float32."""
    hidden, targets = torch.full((3, 1), 1e4), torch.tensor([0, 1, -100])
    weight = torch.ones(2, 1)
    got = linear_log_probs(hidden, weight, targets, with_entropy=True)
    torch.testing.assert_close(got.log_prob, -torch.tensor([2.0, 2.0, 1.0]).log(), rtol=0, atol=1e-7)
    torch.testing.assert_close(got.entropy, torch.full((3,), 2.0).log(), rtol=0, atol=1e-7)


def test_a_step_of_sgd_gives_the_same_weights():
    hidden, weight, bias, targets = head(2, 6)
    stepped = []
    for loss in (linear_cross_entropy, textbook_loss):
        linear = torch.nn.Linear(5, 11, dtype=torch.float64)
        linear.load_state_dict({"weight": weight.detach(), "bias": bias.detach()})
        optimizer = torch.optim.SGD(linear.parameters(), lr=1)
        loss(hidden, linear.weight, targets, bias=linear.bias).backward()
        optimizer.step()
        stepped.append([p.detach() for p in linear.parameters()])
    for own, wanted in zip(*stepped, strict=True):
        torch.testing.assert_close(own, wanted, rtol=0, atol=EXACT)
