"""A vocabulary shared out over ranks (CASES L0.13), against one process: groups of two and of three, one not at rank 0."""

import os

import torch
import torch.distributed as dist

from lightning_dcp.errors import ConfigurationError
from lightning_dcp.loss import linear_cross_entropy, linear_log_probs
from tests.loss.oracle import gradients, head, textbook_logits, textbook_loss

GROUPS = ((0, 1), (2, 3, 4))
VOCABULARY = 12
TRANSFORM = {"softcap": 2.0, "logit_scale": 0.7, "temperature": 0.8}
CALLS = {
    "plain": {},
    "all options": {"label_smoothing": 0.2, "z_loss": 0.1, "reduction": "none", "chunk_tokens": 3, **TRANSFORM},
    "unfused": {"label_smoothing": 0.2, "z_loss": 0.1, "reduction": "sum", "fused": False, **TRANSFORM},
}


def own_group():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world)
    made = [dist.new_group(ranks) for ranks in GROUPS]
    number = next(i for i, ranks in enumerate(GROUPS) if rank in ranks)
    return made[number], GROUPS[number].index(rank), len(GROUPS[number])


def shares(place, size, *, masked=False):
    """Hidden states, whole weight and bias, targets, and this rank's rows of both."""
    hidden, weight, bias, targets = head(2, 5, vocabulary=VOCABULARY)
    if masked:  # the last words, on two ranks all of a share
        targets, bias = targets.clamp(max=5), bias.detach()
        bias[6:] = -torch.inf
        bias.requires_grad_()
    rows = slice(place * VOCABULARY // size, (place + 1) * VOCABULARY // size)
    own = weight.detach()[rows].clone().requires_grad_(), bias.detach()[rows].clone().requires_grad_()
    return hidden, weight, bias, targets, rows, *own


def difference(got, expected, hidden, whole, own, rows):
    """The largest of: values, gradients of hidden states, and gradients of this rank's rows."""
    of_hidden, *of_own = gradients(got, (hidden, *own))
    wanted_hidden, *wanted = gradients(expected, (hidden, *whole))
    pairs = [(got, expected), (of_hidden, wanted_hidden), *((a, b[rows]) for a, b in zip(of_own, wanted, strict=True))]
    return float(torch.stack([(a - b).abs().max() for a, b in pairs]).max())  # NaN if there is one


def compute_all():
    group, place, size = own_group()
    found = {}
    for name, options in CALLS.items():
        hidden, weight, bias, targets, rows, *own = shares(place, size)
        weights = torch.linspace(0, 1, 10, dtype=torch.float64).reshape(2, 5) if name != "plain" else None
        common = {"token_weights": weights, **options}
        got = linear_cross_entropy(hidden, own[0], targets, bias=own[1], tp_group=group, **common)
        common = {key: value for key, value in common.items() if key not in ("chunk_tokens", "fused")}
        expected = textbook_loss(hidden, weight, targets, bias=bias, **common)
        found[name] = difference(got, expected, hidden, (weight, bias), own, rows)
    for fused in (True, False):
        hidden, weight, bias, targets, rows, *own = shares(place, size)
        temperature = 0.5 if fused else torch.tensor([0.5, 2.0], dtype=torch.float64)
        asked = {"with_entropy": True, "with_logsumexp": True, "fused": fused, "temperature": temperature}
        got = linear_log_probs(hidden, own[0], targets, bias=own[1], tp_group=group, **asked)
        spread = temperature if fused else temperature[:, None, None]
        log_probs = textbook_logits(hidden, weight, bias, temperature=spread).log_softmax(-1)
        picked = log_probs.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets >= 0)
        lse = textbook_logits(hidden, weight, bias, temperature=spread).logsumexp(-1)
        for name, value, wanted in zip(
            got._fields, got, (picked, lse, -(log_probs.exp() * log_probs).sum(-1)), strict=True
        ):
            found[name, fused] = difference(value, wanted, hidden, (weight, bias), own, rows)
    hidden, weight, bias, targets, rows, *own = shares(place, size, masked=True)
    got = linear_cross_entropy(hidden, own[0], targets, bias=own[1], tp_group=group)
    expected = textbook_loss(hidden, weight, targets, bias=bias)
    found["masked"] = difference(got, expected, hidden, (weight, bias), own, rows)
    return found


def test_a_shared_vocabulary_is_that_of_one_process(ranks):
    for found in ranks.run(compute_all, 5):
        assert len(found) == 10
        assert all(value < 1e-9 for value in found.values()), found


def step_all():
    """One step of SGD with lr 1 on a model of two layers, of which the second is shared out."""
    group, place, size = own_group()
    hidden, weight, _, targets, rows, own, _ = shares(place, size)
    own, states = own.detach(), hidden.detach()
    results = []
    for share, options in ((own, {"tp_group": group}), (weight.detach(), {})):
        torch.manual_seed(4)
        below, above = torch.nn.Linear(5, 5, dtype=torch.float64), torch.nn.Parameter(share.clone())
        optimizer = torch.optim.SGD([*below.parameters(), above], lr=1)
        linear_cross_entropy(below(states), above, targets, **options).backward()
        optimizer.step()
        results.append([*below.parameters(), above])
    (*mine, mine_above), (*wanted, wanted_above) = results
    pairs = [*zip(mine, wanted, strict=True), (mine_above, wanted_above[rows])]
    return float(torch.stack([(a - b).abs().max() for a, b in pairs]).max())  # NaN if there is one


def test_a_step_gives_the_weights_of_one_process(ranks):
    assert all(value < 1e-9 for value in ranks.run(step_all, 5))


REFUSED = {
    "shares": "rows of the head weight",
    "targets": "a sum over the targets",
    "gradients": "gradients of hidden and weight",
    "shapes": "refused on ranks [0] of the group",
    "range": "targets from 0 to 11",
    "kernel": "not a share of it (tp_group)",
}
"""What does not fit, mostly on the first rank of a group only, and what the others say."""


def refuse(case, group, place, size):
    hidden, _, _, targets, _, own, _ = shares(place, size)
    if place == 0:
        own = own[1:] if case == "shares" else own
        targets = targets.flip(0) if case == "targets" else targets
        targets = targets[:1] if case == "shapes" else targets
        own = own.detach() if case == "gradients" else own
    targets = targets + VOCABULARY if case == "range" else targets
    try:
        linear_cross_entropy(hidden, own, targets, tp_group=group, kernel="liger" if case == "kernel" else "auto")
    except ConfigurationError as error:
        return str(error)
    return None


def refuse_all():
    group, place, size = own_group()
    found = {case: refuse(case, group, place, size) for case in REFUSED}
    stranger = dist.new_group([0])
    with_one = refuse("none", stranger, 0, 1)
    return place, found, with_one


def test_ranks_that_do_not_fit_together_all_raise(ranks):
    for rank, (place, found, with_one) in enumerate(ranks.run(refuse_all, 5)):
        for case, words in REFUSED.items():
            own = "targets [2, 5]" if case == "shapes" and place == 0 else words
            assert found[case] is not None and own in found[case]
        assert (with_one is None) if rank == 0 else "not of it" in with_one
