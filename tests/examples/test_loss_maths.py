"""The losses of the examples against their formulas, worked out sample by sample and token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from examples.dpo import DPO
from examples.supervised import Supervised
from examples.value_head import ActorCritic
from lightning_dcp.batch.view import view
from tests.examples.data import Sample, batch_of, samples_of, targets_alone
from tests.examples.rows import ROWS, actor_critic, decoder, distillation, dpo, grpo, reward_model

LENGTHS = (9, 1, 5, 12, 2)
"""The second has no target."""

pytestmark = pytest.mark.filterwarnings("ignore:You are trying to `self.log")


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


MODELS = ("model", "policy", "reference", "critic", "student", "teacher")


@contextmanager
def sample_by_sample(module: Any, batch: Any) -> Iterator[None]:
    """Calls of the module's models run each sequence alone, as regions would: plain attention knows no borders."""
    models = [model for name, model in module.named_children() if name in MODELS]

    def forward(own: Callable[..., Any], ids: Tensor, **_: Any) -> Any:
        tokens = view(batch).sequences(ids)
        parts = [own(part.unsqueeze(0)) for part in tokens.flatten(ids).split(tokens.lengths)]
        return pytree.tree_map(lambda *each: tokens.unflatten(torch.cat(each, 1)[0]), *parts)

    for model in models:
        model.forward = partial(forward, model.forward)
    yield
    for model in models:
        del model.forward


def loss_of(module: Any, kind: str, samples: list[Any], fmt: str = "padded") -> Tensor:
    """What the module returns for one batch; padding holds garbage, which must not matter."""
    batch = batch_of(samples, kind, fmt)
    if fmt != "padded":
        with sample_by_sample(module, batch):
            return module.training_step(batch, 0)
    if "attention_mask" in batch:
        padding = batch["attention_mask"] == 0
        for name, value in batch.items():
            if value.is_floating_point() and value.dim() == 2:
                batch[name] = value.masked_fill(padding, 1e4)
    return module.training_step(batch, 0)


def alone(model: Any, sample: Sample) -> tuple[Tensor, Tensor]:
    """Logits of the tokens that have a target, and these targets."""
    targets = targets_alone(sample)
    return model(sample["input_ids"].unsqueeze(0))[0][targets != -100], targets[targets != -100]


def log_probs(logits: Tensor, targets: Tensor, temperature: Any = 1.0) -> list[Tensor]:
    """Token by token."""
    return [torch.log(torch.softmax(row / temperature, 0)[int(t)]) for row, t in zip(logits, targets, strict=True)]


def same(ours: Tensor, expected: Any) -> None:
    torch.testing.assert_close(ours, torch.as_tensor(expected), rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------- supervised


@pytest.mark.parametrize("fmt", ["padded", "packed", "jagged"])
@pytest.mark.parametrize("reduction", ["tokens", "samples", "sum"])
def test_supervised(reduction: Any, fmt: str) -> None:
    samples, model = samples_of("documents", lengths=LENGTHS), decoder(1)
    losses = [[-x for x in log_probs(*alone(model, sample))] for sample in samples]
    flat = [x for sample in losses for x in sample]
    means = [sum(sample) / len(sample) if sample else torch.tensor(0.0) for sample in losses]
    right = {"tokens": sum(flat) / len(flat), "samples": sum(means) / len(means), "sum": sum(flat)}
    same(loss_of(Supervised(model, reduction=reduction), "documents", samples, fmt), right[reduction])


# ---------------------------------------------------------------------- pairs


def ratios(module: DPO, samples: list[Any], kind: str) -> list[tuple[Tensor, int]]:
    """For each sample the log-ratio of policy and reference, and its targets."""
    found = []
    for sample in samples:
        policy, reference = (log_probs(*alone(m, sample[kind])) for m in (module.policy, module.reference))
        found.append((sum(policy, torch.tensor(0.0)) - sum(reference, torch.tensor(0.0)), len(policy)))
    return found


@pytest.mark.parametrize("fmt", ["padded", "jagged"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo(fmt: str, smoothing: float) -> None:
    module, samples = dpo(label_smoothing=smoothing), samples_of("pairs", lengths=LENGTHS)
    right = []
    for (better, _), (worse, _) in zip(*(ratios(module, samples, k) for k in ("chosen", "rejected")), strict=True):
        p = 1 / (1 + torch.exp(-0.05 * (better - worse)))  # Bradley-Terry: the chosen one is preferred
        right.append(-(1 - smoothing) * torch.log(p) - smoothing * torch.log(1 - p))
    same(loss_of(module, "pairs", samples, fmt), sum(right) / len(right))


def test_ipo_averages_over_tokens_as_trl_does() -> None:
    module, samples = dpo(loss="ipo", beta=0.5), samples_of("pairs", lengths=LENGTHS)
    right = []
    for (better, n), (worse, m) in zip(*(ratios(module, samples, k) for k in ("chosen", "rejected")), strict=True):
        right.append((better / max(n, 1) - worse / max(m, 1) - 1 / (2 * 0.5)) ** 2)
    same(loss_of(module, "pairs", samples), sum(right) / len(right))


def test_dpo_of_equal_models_is_log_two() -> None:
    module = DPO(decoder(1))
    same(loss_of(module, "pairs", samples_of("pairs", lengths=LENGTHS)), math.log(2))


def test_reference_in_the_batch_is_used_instead_of_the_model() -> None:
    module, samples = dpo(), samples_of("pairs", lengths=LENGTHS)
    with torch.no_grad():
        chosen, rejected = module.log_probs(module.reference, batch_of(samples, "pairs"))
    given = [
        s | {"ref_chosen_logps": c, "ref_rejected_logps": r} for s, c, r in zip(samples, chosen, rejected, strict=True)
    ]
    expected = loss_of(module, "pairs", samples)
    module.reference = None
    same(loss_of(module, "pairs with reference", given), expected)


def test_reward_model_scores_the_last_token() -> None:
    module, samples = reward_model(), samples_of("pairs", lengths=LENGTHS)
    right = []
    for sample in samples:
        last = [module.model(sample[k]["input_ids"].unsqueeze(0))[0, -1] for k in ("chosen", "rejected")]
        chosen, rejected = (hidden @ module.score.weight[0] for hidden in last)
        right.append(-torch.log(torch.exp(chosen) / (torch.exp(chosen) + torch.exp(rejected))))
    same(loss_of(module, "pairs", samples), sum(right) / len(right))


def test_ipo_with_label_smoothing_is_refused() -> None:
    with pytest.raises(ValueError, match="label_smoothing"):
        DPO(decoder(1), loss="ipo", label_smoothing=0.1)


# ------------------------------------------------------------- policy gradients


def grpo_tokens(module: Any, sample: Sample) -> list[Tensor]:
    """The loss of each target, branch by branch."""
    logits, targets = alone(module.policy, sample)
    old = sample["old_log_probs"][targets_alone(sample) != -100]
    temperature, advantage = sample["temperature"], sample["advantages"]
    reference = log_probs(*alone(module.reference, sample), temperature) if module.reference is not None else None
    losses = []
    for i, log_prob in enumerate(log_probs(logits, targets, temperature)):
        ratio = torch.exp(log_prob - old[i])
        if advantage > 0:
            loss = -advantage * min(ratio, torch.tensor(1 + module.clip_high))
        else:
            loss = -advantage * max(ratio, torch.tensor(1 - module.clip_low))
        if reference is not None:
            q = torch.exp(reference[i]) / torch.exp(log_prob)
            loss = loss + module.kl_coefficient * (q - torch.log(q) - 1)
        losses.append(loss)
    return losses


@pytest.mark.parametrize("fmt", ["padded", "packed"])
@pytest.mark.parametrize("kl", [0.0, 0.1])
@pytest.mark.parametrize("normalization", ["tokens", "samples"])
def test_grpo(normalization: Any, kl: float, fmt: str) -> None:
    module = grpo(normalization=normalization, kl_coefficient=kl, clip_low=0.1, clip_high=0.3)
    samples = samples_of("rollouts", lengths=LENGTHS)
    losses = [grpo_tokens(module, sample) for sample in samples]
    flat = [x for sample in losses for x in sample]
    means = [sum(sample) / len(sample) if sample else torch.tensor(0.0) for sample in losses]
    right = sum(flat) / len(flat) if normalization == "tokens" else sum(means) / len(means)
    same(loss_of(module, "rollouts", samples, fmt), right)


def gradients(module: Any, loss: Tensor) -> dict[str, Tensor]:
    learnt = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return dict(zip(learnt, torch.autograd.grad(loss, list(learnt.values())), strict=True))


@pytest.mark.parametrize("fmt", ["padded", "packed"])
def test_temperatures_that_differ_equal_runs_of_each_sample(fmt: str) -> None:
    module, samples = grpo(), samples_of("rollouts", lengths=LENGTHS)
    assert len({float(sample["temperature"]) for sample in samples}) == len(samples)
    counts = [int((targets_alone(sample) != -100).sum()) for sample in samples]
    together = gradients(module, loss_of(module, "rollouts", samples, fmt))
    singly = [gradients(module, loss_of(module, "rollouts", [sample], fmt)) for sample in samples]
    for name, gradient in together.items():
        same(gradient, sum(n * single[name] for n, single in zip(counts, singly, strict=True)) / sum(counts))


def test_a_temperature_scales_logits_and_so_gradients() -> None:
    samples = [sample | {"temperature": torch.tensor(2.0)} for sample in samples_of("rollouts", lengths=(9,))]
    cool, warm = grpo(), grpo()
    with torch.no_grad():  # logits of half the size at temperature 1; the head is not the embedding here
        warm.policy.head.weight = torch.nn.Parameter(cool.policy.head.weight / 2)
    plain = [sample | {"temperature": torch.tensor(1.0)} for sample in samples]
    same(loss_of(cool, "rollouts", samples), loss_of(warm, "rollouts", plain))


def test_advantages_of_zero_change_nothing() -> None:
    samples = [s | {"advantages": torch.tensor(0.0)} for s in samples_of("rollouts", lengths=LENGTHS)]
    module = grpo()
    loss = loss_of(module, "rollouts", samples)
    assert loss.item() == 0.0
    assert not any(bool(gradient.any()) for gradient in gradients(module, loss).values())


def test_a_policy_that_drew_the_answers_has_ratios_of_one() -> None:
    """The loss is minus the mean advantage; its gradient is that of the plain policy gradient."""
    module, samples = grpo(), samples_of("rollouts", lengths=LENGTHS)
    bare = [{name: value for name, value in s.items() if name != "old_log_probs"} for s in samples]
    loss = loss_of(module, "rollouts", bare)
    tokens = [(x, s["advantages"]) for s in samples for x in log_probs(*alone(module.policy, s), s["temperature"])]
    same(loss, -sum(a for _, a in tokens) / len(tokens))
    plain = gradients(module, -sum(a * x for x, a in tokens) / len(tokens))
    for name, gradient in gradients(module, loss).items():
        same(gradient, plain[name])


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize("fmt", ["padded", "packed"])
@pytest.mark.parametrize("critic", [False, True])
def test_actor_and_critic(critic: bool, fmt: str) -> None:
    module, samples = actor_critic(critic=critic), samples_of("valued", lengths=LENGTHS)
    actors, critics = [], []
    for sample in samples:
        actor, value = actor_and_critic_tokens(module, sample)
        actors += actor
        critics += value
    right = sum(actors) / len(actors) + 0.5 * sum(critics) / len(critics)
    same(loss_of(module, "valued", samples, fmt), right)


def actor_and_critic_tokens(module: ActorCritic, sample: Sample) -> tuple[list[Tensor], list[Tensor]]:
    counted = targets_alone(sample) != -100
    ids = sample["input_ids"].unsqueeze(0)
    hidden = module.policy(ids)[0][counted]
    values = module.value_head(hidden if module.critic is None else module.critic(ids)[0][counted])
    fields = (sample[name][counted] for name in ("old_log_probs", "advantages", "old_values", "returns"))
    actors, critics = [], []
    found = log_probs(hidden @ module.lm_head.weight.T, targets_alone(sample)[counted])
    for log_prob, value, old, a, u, r in zip(found, values[:, 0], *fields, strict=True):
        w = torch.exp(log_prob - old)
        actors.append(-min(w * a, min(max(w, torch.tensor(0.8)), torch.tensor(1.2)) * a))
        near = min(max(value, u - 0.2), u + 0.2)
        critics.append(max((value - r) ** 2, (near - r) ** 2) / 2)
    return actors, critics


# ---------------------------------------------------------------- distillation


def divergences(module: Any, samples: list[Sample], divergence: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The mean over targets of a divergence of two distributions, at the module's temperature."""
    found = []
    for sample in samples:
        student, teacher = (alone(m, sample)[0] / module.temperature for m in (module.student, module.teacher))
        found += [divergence(q, p) for q, p in zip(student.softmax(-1), teacher.softmax(-1), strict=True)]
    return module.temperature**2 * sum(found) / len(found)


def forward(q: Tensor, p: Tensor) -> Tensor:
    return sum(x * (torch.log(x) - torch.log(y)) for x, y in zip(p, q, strict=True))


def reverse(q: Tensor, p: Tensor) -> Tensor:
    return forward(p, q)


def top(k: int, q: Tensor, p: Tensor) -> Tensor:
    likeliest = p.argsort(descending=True)[:k]
    return forward(q[likeliest], p[likeliest] / p[likeliest].sum())


@pytest.mark.parametrize("fmt", ["padded", "packed"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_distillation_over_the_vocabulary(kind: Any, temperature: float, fmt: str) -> None:
    module, samples = distillation(divergence=kind, temperature=temperature), samples_of("documents", lengths=LENGTHS)
    right = divergences(module, samples, {"forward": forward, "reverse": reverse}[kind])
    same(loss_of(module, "documents", samples, fmt), right)


@pytest.mark.parametrize("temperature", [1.0, 1.5])
@pytest.mark.parametrize("k", [1, 4, 17])
def test_distillation_of_the_likeliest(k: int, temperature: float) -> None:
    module, samples = distillation(top_k=k, temperature=temperature), samples_of("documents", lengths=LENGTHS)
    whole = distillation(temperature=temperature)  # the same models, unwrapped
    right = divergences(whole, samples, partial(top, k))
    same(loss_of(module, "documents", samples), right)
    if k == 17:  # all of the vocabulary
        same(loss_of(whole, "documents", samples), right)


def test_top_k_of_the_batch_equal_those_of_the_region() -> None:
    module, samples = distillation(top_k=4, temperature=1.5), samples_of("taught", lengths=LENGTHS)
    given = []
    for sample in samples:
        values, ids = module.teacher(sample["input_ids"].unsqueeze(0))
        given.append(sample | {"teacher_log_probs": values[0], "teacher_ids": ids[0]})
    assert len({loss_of(module, "taught", batch).item() for batch in (samples, given)}) == 2
    same(loss_of(module, "taught", given), loss_of(module, "documents", samples_of("documents", lengths=LENGTHS)))


def test_reverse_divergence_of_top_k_is_refused() -> None:
    with pytest.raises(ValueError, match="top_k"):
        distillation(top_k=4, divergence="reverse")


# -------------------------------------------------------------------- all losses


@pytest.mark.parametrize("name", ROWS)
def test_no_loss_is_spoilt_by_a_batch_without_targets(name: str) -> None:
    row = ROWS[name]
    samples = samples_of(row.batches, lengths=(3, 1), without_targets=(0, 1))
    module = row.make()
    loss = loss_of(module, row.batches, samples)
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients(module, loss).values())
