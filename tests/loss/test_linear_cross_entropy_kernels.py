"""Kernels of other packages, without a GPU: dense stand-ins under the real signatures check what they are handed."""

import importlib.machinery
import sys
import types
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from lightning_dcp.errors import ConfigurationError
from lightning_dcp.loss import linear_cross_entropy, linear_log_probs
from lightning_dcp.loss.linear_cross_entropy import cut_cross_entropy as cce
from lightning_dcp.loss.linear_cross_entropy import inputs, liger, loss_kernel_names, matmul, statistics
from lightning_dcp.loss.linear_cross_entropy.call import LossCall
from lightning_dcp.loss.linear_cross_entropy.kernels import KERNELS, choose_loss_kernel
from lightning_dcp.loss.linear_cross_entropy.logits import LogitTransform
from lightning_dcp.loss.linear_cross_entropy.objective import Objective
from tests.loss.oracle import gradients, head, textbook_loss

CALL = LossCall("cuda", torch.bfloat16, LogitTransform(), Objective())
NONE = Objective(reduction="none")
CALLS = []
"""Packages that were called since the test began."""


@pytest.fixture(autouse=True)
def _fresh():
    CALLS.clear()
    for lookup in (liger._function, cce._function):
        lookup.cache_clear()
    yield
    for lookup in (liger._function, cce._function):
        lookup.cache_clear()


# --- liger-kernel: the signatures of 0.6.2 and 0.8.5 (transformers/functional.py)


def dense_liger(input, weight, target, bias, ignore_index, z_loss, smoothing, reduction, softcap, accum_dtype):
    """What fused_linear_cross_entropy_forward demands, and then the same by all logits."""
    CALLS.append("liger")
    assert input.dim() == 2 and weight.dim() == 2 and target.shape == input.shape[:1] and target.dtype == torch.int64
    assert input.dtype == weight.dtype and (bias is None or bias.dtype == weight.dtype)
    assert input.is_contiguous() and weight.is_contiguous() and accum_dtype == torch.float32
    assert (target != ignore_index).any() and reduction in ("mean", "sum")  # it divides by the number of targets
    assert not torch.is_autocast_enabled("cpu")
    assert input.requires_grad or not (weight.requires_grad or (bias is not None and bias.requires_grad))
    return textbook_loss(
        input.float(), weight.float(), target, bias=None if bias is None else bias.float(), ignore_index=ignore_index,
        label_smoothing=smoothing, z_loss=z_loss, reduction=reduction, softcap=softcap,
    )  # fmt: skip


def liger_0_6_2(
    input, weight, target, bias=None, ce_weight=None, ignore_index: int = -100, lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0, reduction: str = "mean", softcap=None, return_z_loss: bool = False, accum_dtype=None,
):  # fmt: skip
    assert ce_weight is None and not return_z_loss
    return dense_liger(
        input, weight, target, bias, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, accum_dtype
    )


def liger_0_8_5(
    input, weight, target, bias=None, ce_weight=None, ignore_index: int = -100, lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0, reduction: str = "mean", softcap=None, return_z_loss: bool = False, accum_dtype=None,
    use_token_scaling: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
):  # fmt: skip
    assert (use_token_scaling, return_token_accuracy, return_predicted_tokens, chunk_mem_const) == (False,) * 3 + (1,)
    return liger_0_6_2(
        input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap,
        return_z_loss, accum_dtype,
    )  # fmt: skip


def liger_0_5_10(
    input, weight, target, bias=None, ce_weight=None, ignore_index: int = -100, lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0, reduction: str = "mean", softcap=None, return_z_loss: bool = False,
):  # fmt: skip
    raise AssertionError("too old to be called")


def add_module(monkeypatch, name, **contents):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    for key, value in contents.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


def add_liger(monkeypatch, function):
    add_module(monkeypatch, "liger_kernel")
    add_module(monkeypatch, "liger_kernel.transformers")
    add_module(monkeypatch, "liger_kernel.transformers.functional", liger_fused_linear_cross_entropy=function)


@pytest.fixture(params=[liger_0_6_2, liger_0_8_5])
def with_liger(request, monkeypatch):
    add_liger(monkeypatch, request.param)


# --- cut-cross-entropy: the signature of 25.1.1 (linear_cross_entropy.py)


def cut_25_1_1(
    e, c, targets, ignore_index: int = -100, softcap=None, reduction: str = "mean", shift: bool = False,
    filter_eps="high", impl="cce",
):  # fmt: skip
    CALLS.append("cut_cross_entropy")
    assert e.size()[0:-1] == targets.size() and e.size(-1) == c.size(1)
    assert e.dtype == c.dtype and e.dtype in (torch.float16, torch.bfloat16)
    assert reduction == "none" and not shift and filter_eps is None and impl == "cce"
    assert (targets != ignore_index).any()  # a grid of no programs cannot be launched
    assert e.is_contiguous() and not torch.is_autocast_enabled("cpu")
    return textbook_loss(e.float(), c.float(), targets, ignore_index=ignore_index, softcap=softcap, reduction=reduction)


@pytest.fixture
def with_cut(monkeypatch):
    add_module(monkeypatch, "cut_cross_entropy", linear_cross_entropy=cut_25_1_1)


# --- choice


def test_what_can_be_asked_for():
    assert loss_kernel_names() == ("auto", "liger", "cut_cross_entropy", "torch")


def test_auto_takes_the_first_that_can_serve(with_liger, with_cut):
    for changes, chosen in (
        ({}, "liger"),
        ({"dtype": torch.float32}, "liger"),
        ({"bias": True}, "liger"),
        ({"objective": Objective(0.1, 0.1, "sum"), "transform": LogitTransform(softcap=30.0)}, "liger"),
        ({"objective": NONE}, "cut_cross_entropy"),
        ({"token_weights": True}, "cut_cross_entropy"),
        ({"hidden_grad": False}, "cut_cross_entropy"),
        ({"hidden_grad": False, "head_grad": False}, "liger"),
        ({"objective": NONE, "dtype": torch.float32}, "torch"),
        ({"objective": NONE, "bias": True}, "torch"),
        ({"token_weights": True, "objective": Objective(0.1)}, "torch"),
        ({"token_weights": True, "objective": Objective(z_loss=0.1)}, "torch"),
        ({"device": "cpu"}, "torch"),
        ({"dtype": torch.float64}, "torch"),
        ({"transform": LogitTransform(temperature=0.5)}, "torch"),
        ({"transform": LogitTransform(logit_scale=0.5)}, "torch"),
        ({"entropy": True}, "torch"),
        ({"logsumexp": True}, "torch"),
        ({"tp_group": True}, "torch"),
        ({"chunk_tokens": True}, "torch"),
    ):
        assert choose_loss_kernel(replace(CALL, **changes)) == chosen, changes
    assert choose_loss_kernel(CALL, "torch") == "torch"


def test_auto_is_our_own_without_the_packages(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert choose_loss_kernel(CALL) == "torch"
    assert [KERNELS[name](CALL) for name in ("liger", "cut_cross_entropy")] == [
        ["the package liger-kernel is not installed"],
        ["the package cut-cross-entropy is not installed"],
    ]


def test_packages_that_are_broken_or_too_old_say_so(monkeypatch):
    add_liger(monkeypatch, liger_0_5_10)
    assert "too old" in KERNELS["liger"](CALL)[0]
    liger._function.cache_clear()
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", None)
    assert "ModuleNotFoundError" in KERNELS["liger"](CALL)[0]
    add_module(monkeypatch, "cut_cross_entropy")
    assert "AttributeError" in KERNELS["cut_cross_entropy"](CALL)[0]


def test_a_kernel_asked_for_gives_all_reasons(with_liger, with_cut):
    hidden, weight, bias, targets = head(4)
    options = {"temperature": 2.0, "z_loss": 0.1, "label_smoothing": 0.1, "chunk_tokens": 2}
    for name, count in (("liger", 5), ("cut_cross_entropy", 7)):
        with pytest.raises(ConfigurationError) as caught:
            linear_cross_entropy(hidden, weight, targets, bias=bias, kernel=name, reduction="none", **options)
        (problem,) = caught.value.problems
        assert problem.asked == f"kernel={name!r}" and len(problem.found.split("; ")) == count
        assert problem.remedy.endswith("auto, torch")


# --- results


@pytest.fixture
def on_cuda(monkeypatch):
    """Kernels are chosen as for CUDA tensors; what is chosen then runs on the CPU."""
    real = inputs._call
    monkeypatch.setattr(inputs, "_call", lambda *args: replace(real(*args), device="cuda"))


def check_half(got, expected, tensors):
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    wide = gradients(expected, tensors)
    for own, wanted in zip(gradients(got, tensors), wanted_of(wide), strict=True):
        torch.testing.assert_close(own, wanted, rtol=2**-7, atol=1e-6)


def wanted_of(grads):
    return [grad.bfloat16() for grad in grads]


@pytest.mark.parametrize("kernel", ["auto", "liger"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 2.0}])
def test_liger_is_handed_the_call(on_cuda, with_liger, kernel, reduction, options):
    hidden, weight, bias, targets = head(2, 4, dtype=torch.bfloat16)
    got = linear_cross_entropy(hidden, weight, targets, bias=bias, kernel=kernel, reduction=reduction, **options)
    assert CALLS == ["liger"]
    own = linear_cross_entropy(hidden, weight, targets, bias=bias, kernel="torch", reduction=reduction, **options)
    check_half(got, own, (hidden, weight, bias))


@pytest.mark.parametrize("kernel", ["auto", "cut_cross_entropy"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_cut_cross_entropy_is_handed_the_call(on_cuda, with_cut, kernel, reduction):
    hidden, weight, _, targets = head(2, 4, dtype=torch.bfloat16)
    common = {"token_weights": torch.linspace(0, 1, 8).reshape(2, 4), "reduction": reduction, "softcap": 2.0}
    got = linear_cross_entropy(hidden, weight, targets, kernel=kernel, **common)
    assert CALLS == ["cut_cross_entropy"]
    check_half(got, linear_cross_entropy(hidden, weight, targets, kernel="torch", **common), (hidden, weight))


def test_log_probs_come_from_cut_cross_entropy(on_cuda, with_liger, with_cut):
    hidden, weight, _, targets = head(2, 4, dtype=torch.bfloat16)
    got = linear_log_probs(hidden, weight, targets)
    assert CALLS == ["cut_cross_entropy"] and got.logsumexp is None and got.entropy is None
    own = linear_log_probs(hidden, weight, targets, kernel="torch")
    check_half(got.log_prob, own.log_prob, (hidden, weight))
    assert (got.log_prob[targets == -100] == 0).all()
    linear_log_probs(hidden, weight, targets, with_entropy=True)
    assert CALLS == ["cut_cross_entropy"]


@pytest.mark.parametrize("options", [{"reduction": "mean"}, {"token_weights": torch.ones(8)}])
def test_autocast_reaches_the_packages_as_casts(on_cuda, with_liger, with_cut, options):
    hidden, weight, _, targets = head(8, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = linear_cross_entropy(hidden, weight, targets, **options)
        own = linear_cross_entropy(hidden, weight, targets, kernel="torch", **options)
    assert len(CALLS) == 1
    torch.testing.assert_close(got, own, rtol=0, atol=1e-6)
    for mine, wanted in zip(gradients(got, (hidden, weight)), gradients(own, (hidden, weight)), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, wanted, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("kernel", ["auto", "liger", "cut_cross_entropy"])
def test_a_batch_without_targets_is_computed_by_our_own(on_cuda, with_liger, with_cut, kernel):
    hidden, weight, _, targets = head(4, dtype=torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100), kernel=kernel)
    assert CALLS == [] and loss.isnan()
    assert all((grad == 0).all() for grad in gradients(loss, (hidden, weight)))


# --- products of half-precision operands on CUDA


def test_products_on_cuda_come_out_in_float32(monkeypatch):
    """``aten::mm.dtype`` has no CPU implementation: one is lent to it, and torch checks the call by its schema."""
    widths = []

    def widening(a, b, out_dtype):
        assert a.dtype == b.dtype == torch.bfloat16 and out_dtype == torch.float32
        widths.append(a.shape)
        return a.float() @ b.float()

    monkeypatch.setattr(statistics, "operand_dtype", lambda dtype, _: dtype)
    hidden, weight, bias, targets = head(8, dtype=torch.bfloat16)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("mm.dtype", widening, "CPU")
        got = linear_cross_entropy(hidden, weight, targets, bias=bias, chunk_tokens=3)
        grads = gradients(got, (hidden, weight, bias))
    assert len(widths) == 3 * (1 + 3)
    wide = [x.detach().float().requires_grad_() for x in (hidden, weight, bias)]
    expected = F.cross_entropy(F.linear(*wide), targets)
    assert got.item() == pytest.approx(expected.item(), abs=1e-6)
    for own, wanted in zip(grads, gradients(expected, wide), strict=True):
        assert own.dtype == torch.bfloat16
        torch.testing.assert_close(own.float(), wanted, rtol=2**-6, atol=2**-9)


@pytest.mark.parametrize(("capability", "held"), [((9, 0), torch.bfloat16), ((7, 5), torch.float32)])
def test_which_operands_are_widened(monkeypatch, capability, held):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    matmul._can_widen.cache_clear()
    assert matmul.operand_dtype(torch.bfloat16, cpu) == torch.float32
    assert matmul.operand_dtype(torch.float64, cuda) == torch.float64
    assert matmul.operand_dtype(torch.bfloat16, cuda) == held
    monkeypatch.setattr(torch.version, "hip", "6.4")
    matmul._can_widen.cache_clear()
    assert matmul.operand_dtype(torch.bfloat16, cuda) == torch.float32
    matmul._can_widen.cache_clear()
