"""What is refused, and that all of it is said at once."""

import pytest
import torch

from lightning_dcp.errors import ConfigurationError
from lightning_dcp.loss import linear_cross_entropy, linear_log_probs
from tests.loss.oracle import head, textbook_loss

HIDDEN, WEIGHT, BIAS, TARGETS = head(2, 3)


def refused(hidden=HIDDEN, weight=WEIGHT, targets=TARGETS, **options):
    with pytest.raises(ConfigurationError) as caught:
        linear_cross_entropy(hidden, weight, targets, **options)
    return caught.value.problems


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({"hidden": HIDDEN[..., :4]}, "hidden [2, 3, 5]"),
        ({"hidden": torch.tensor(1.0).double()}, "weight [V, H]"),
        ({"weight": WEIGHT[0]}, "weight [V, H]"),
        ({"weight": WEIGHT[:0], "targets": torch.full((2, 3), -100)}, "weight [V, H]"),
        ({"targets": TARGETS[0]}, "targets [2, 3]"),
        ({"targets": TARGETS.double()}, "targets"),
        ({"targets": TARGETS == 1}, "targets"),
        ({"targets": torch.full((2, 3), 11)}, "targets from 0 to 10"),
        ({"targets": torch.full((2, 3), -1)}, "targets from 0 to 10"),
        ({"targets": torch.full((2, 3), -100), "ignore_index": -1}, "targets from 0 to 10"),
        ({"bias": BIAS[:3]}, "bias [11]"),
        ({"bias": BIAS.float()}, "one floating dtype"),
        ({"weight": WEIGHT.half()}, "one floating dtype"),
        ({"hidden": HIDDEN.long(), "weight": WEIGHT.long()}, "one floating dtype"),
        ({"token_weights": torch.ones(6)}, "token_weights [2, 3]"),
        ({"token_weights": torch.ones(2, 3, dtype=torch.complex64)}, "token_weights"),
        ({"hidden": HIDDEN.to("meta")}, "device"),
        ({"targets": TARGETS.to("meta")}, "device"),
        ({"label_smoothing": 1.1}, "label_smoothing"),
        ({"label_smoothing": -0.1}, "label_smoothing"),
        ({"z_loss": -1.0}, "z_loss"),
        ({"z_loss": float("nan")}, "z_loss"),
        ({"softcap": 0.0}, "softcap"),
        ({"logit_scale": 0.0}, "logit_scale"),
        ({"logit_scale": float("inf")}, "logit_scale"),
        ({"reduction": "average"}, "reduction"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"chunk_tokens": 1.5}, "chunk_tokens"),
        ({"chunk_tokens": 2, "fused": False}, "chunk_tokens"),
        ({"kernel": "torch", "fused": False}, None),
        ({"kernel": "liger", "fused": False}, "kernel"),
        ({"kernel": "quick"}, "kernel"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": torch.tensor([1.0, -1.0]), "fused": False}, "temperature"),
        ({"temperature": torch.ones(3)}, "temperature"),
        ({"temperature": torch.ones(1, 3)}, "temperature"),
        ({"temperature": torch.ones(2, 3, 1)}, None),
        ({"temperature": torch.ones(2).bool()}, "temperature"),
    ],
)
def test_one_thing_wrong_is_one_problem(changes, asked):
    if asked is None:
        assert linear_cross_entropy(**({"hidden": HIDDEN, "weight": WEIGHT, "targets": TARGETS} | changes)).isfinite()
    else:
        (problem,) = refused(**changes)
        assert asked in problem.asked


def test_all_that_is_wrong_is_said_at_once():
    problems = refused(
        weight=WEIGHT.float(), targets=TARGETS + 20, bias=BIAS[1:], token_weights=torch.ones(2), temperature=-1,
        softcap=-1, z_loss=-1, label_smoothing=3, logit_scale=0, reduction="x", chunk_tokens=-2, kernel="x",
    )  # fmt: skip
    assert len(problems) == 12


@pytest.mark.parametrize("shape", [(2,), (2, 3)])
def test_temperatures_that_differ_need_the_unfused_way(shape):
    temperature = torch.linspace(1, 2, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    (problem,) = refused(temperature=temperature)
    assert "values from 1 to 2" in problem.found and "fused=False" in problem.remedy
    got = linear_cross_entropy(HIDDEN, WEIGHT, TARGETS, temperature=temperature, fused=False)
    spread = temperature.reshape(*shape, *[1] * (3 - len(shape)))
    assert got.item() == pytest.approx(textbook_loss(HIDDEN, WEIGHT, TARGETS, temperature=spread).item(), abs=1e-12)


def test_a_temperature_that_is_learned_needs_the_unfused_way():
    (problem,) = refused(temperature=torch.ones((), requires_grad=True))
    assert "requires a gradient" in problem.found and "fused=False" in problem.remedy


def test_log_probs_refuse_alike():
    with pytest.raises(ConfigurationError, match="2 problem"):
        linear_log_probs(HIDDEN, WEIGHT, TARGETS[0], softcap=-1.0)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused(layout):
    hidden = torch.nested.nested_tensor([torch.ones(2, 5), torch.ones(3, 5)], layout=layout)
    targets = torch.nested.nested_tensor([torch.zeros(2).long(), torch.zeros(3).long()], layout=layout)
    (problem,) = refused(hidden, torch.ones(11, 5), targets)
    assert ".values()" in problem.remedy


def test_a_gradient_of_a_gradient_is_refused_rather_than_left_out():
    (problem,) = _create_graph()
    assert "create_graph" in problem.asked
    loss = linear_cross_entropy(HIDDEN, WEIGHT, TARGETS, fused=False)
    (slope,) = torch.autograd.grad(loss, HIDDEN, create_graph=True)
    (second,) = torch.autograd.grad(slope.square().sum(), HIDDEN)
    assert second.abs().max() > 0


def _create_graph():
    with pytest.raises(ConfigurationError) as caught:
        torch.autograd.grad(linear_cross_entropy(HIDDEN, WEIGHT, TARGETS), HIDDEN, create_graph=True)
    return caught.value.problems


def test_weights_changed_between_forward_and_backward_are_torchs_error():
    weight = WEIGHT.detach().clone().requires_grad_()
    loss = linear_cross_entropy(HIDDEN, weight, TARGETS)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
