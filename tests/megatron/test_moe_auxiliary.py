"""Auxiliary losses and expert biases: against Megatron-Core's own formulas, sample by sample, on one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_dcp.models.megatron.moe_auxiliary import auxiliary_losses, routers_of
from lightning_dcp.models.megatron.weights import whole_weights
from tests.megatron import runs
from tests.megatron.test_moe import RECOMPUTE, RECOMPUTE_MOE, SEQUENCE_PARALLEL, SMALL
from tests.support.plans import GivenPlan
from tests.support.training import RaggedTokens, assert_same, loader

LENGTHS = (13, 5, 1, 3, 7, 2)
AUXILIARY = SMALL | {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
    "moe_aux_loss_coeff": [0.7, 0.4],
    "moe_z_loss_coeff": 0.2,
}
BIASED = SMALL | {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.25,
}
MIXED = {
    1: [(0, 1, [0, 1]), (0, 1, [2, 3, 4, 5])],
    2: [(0, 2, [0]), (0, 1, [1, 2]), (1, 1, [3]), (0, 2, [4, 5])],
    4: [(0, 4, [0]), (0, 2, [1, 2]), (2, 1, [3]), (3, 1, [5]), (0, 4, [4])],
}
"""By ranks of the plane: local CP chosen for each pack."""
STATIC = {1: [(0, 1, [0, 1, 2, 3, 4, 5])], 2: [(0, 2, [0, 1, 2]), (0, 2, [3, 4, 5])], 4: [(0, 4, [0, 1, 2, 3, 4, 5])]}
"""One CP size."""
LONE = {2: [(0, 2, [0, 1]), (0, 2, [2]), (0, 2, [3, 4, 5])]}
"""One pack has no target."""


class OnlyAuxiliary(runs.SmallGPT):
    """The step's own loss adds nothing."""

    def _loss(self, batch):
        loss, targets = super()._loss(batch)
        return 0 * loss, targets


def train(config, plan, world, strategy=None, *, make=OnlyAuxiliary, lengths=LENGTHS, **options):
    """Training on batches of ``LENGTHS``; what has to agree, and the module."""
    made = []

    def keep(*args, **kwargs):
        made.append(make(*args, **kwargs))
        return made[0]

    sizes = [(strategy or {}).get(f"{kind}_model_parallel_size", 1) for kind in ("tensor", "pipeline")]
    ranks = world // sizes[0] // sizes[1]
    settings = {"scheduler": GivenPlan(ranks, plan[ranks])} | (strategy or {})
    return runs.fit(config, lengths, len(LENGTHS), settings, make=keep, **options), made[0]


def job(*args, **options):
    return train(*args, **options)[0]


class ByHand(OnlyAuxiliary):
    """Before it trains, it computes by Megatron-Core's functions what has to come out, one sample at a time."""

    def on_train_start(self):
        batches, model = self.trainer.num_training_batches, self.model
        self.first_biases = [r.expert_bias.clone() for r in routers_of(model) if r.enable_expert_bias]
        samples = [sample["input_ids"] for sample in RaggedTokens(LENGTHS * batches).samples]
        size = len(LENGTHS)
        model.eval()  # so that nothing is attached
        groups = [samples[i : i + size] for i in range(0, len(samples), size)]
        self.values, self.counts = self.by_hand(groups)
        self.by_megatron = whole_weights(model, lambda p: p.grad)
        model.train()
        model.zero_grad()

    def outside_a_region(self):
        """Gradients and values of two rows in training, and by hand."""
        rows = torch.arange(10).view(2, 5)
        self.model.zero_grad()
        (0 * self.model(input_ids=rows)).sum().backward()
        ours, values = whole_weights(self.model, lambda p: p.grad), auxiliary_losses(self.model)
        self.model.eval().zero_grad()
        by_hand, _ = self.by_hand([rows])
        return ours, torch.stack(list(values.values())), whole_weights(self.model, lambda p: p.grad), by_hand

    def by_hand(self, groups):
        """The values of the losses and the tokens of each expert by layer; gradients are left on the weights."""
        objective, values, seen = 0.0, torch.zeros(3, dtype=torch.float64), []
        routers = list(routers_of(self.model))
        hooks = [r.register_forward_hook(lambda *call: seen.append((call[1][0], call[2][1].sum(0)))) for r in routers]
        counts = torch.zeros(len(routers), 4)
        for samples in groups:
            for sample in samples:
                seen.clear()
                self.model(input_ids=sample[None])
                for number, (router, (hidden, routed)) in enumerate(zip(routers, seen, strict=True)):
                    parts = formulas(router.gating(hidden).flatten(0, 1), samples, len(sample))
                    objective = objective + parts @ COEFFICIENTS / len(groups)
                    values += parts.detach() / len(routers)
                    counts[number] += routed
        objective.backward()
        for hook in hooks:
            hook.remove()
        return values, counts


COEFFICIENTS = torch.tensor([0.7, 0.4, 0.2], dtype=torch.float64)


def formulas(logits, samples, tokens):
    """A sample's part of each auxiliary loss of a layer."""
    from megatron.core.transformer.moe import moe_utils

    experts, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, 2, "softmax")
    aux = moe_utils.switch_load_balancing_loss_func(scores.double(), experts.sum(0), tokens, 2, 4, 1.0)
    share = tokens / sum(map(len, samples))
    return torch.stack([share * aux, aux / len(samples), share * moe_utils.z_loss_func(logits, 1.0)])


def hand_job(batches):
    trained, module = train(
        AUXILIARY, MIXED, 1, lengths=LENGTHS * batches, make=ByHand, accumulate_grad_batches=batches
    )
    return trained, module.by_megatron, module.values


@pytest.mark.parametrize("batches", [1, 2])
def test_the_gradient_is_that_of_megatrons_formulas_sample_by_sample(ranks, batches):
    """Two batches of an accumulation window count half each."""
    trained, gradients, values = ranks.run(hand_job, 1, batches)[0]
    (ours,) = trained["gradients"]
    for name, right in gradients.items():
        if right is not None:
            assert (ours[name] - right).abs().max() <= 1e-9, name
    assert gradients["decoder.layers.0.mlp.router.weight"].abs().max() > 1e-3
    if batches == 1:
        logged = [trained["logged"][n] for n in ("load_balancing_loss", "seq_load_balancing_loss", "z_loss")]
        torch.testing.assert_close(torch.tensor(logged, dtype=torch.float64), values, rtol=1e-9, atol=1e-9)


class Outside(ByHand):
    def on_train_start(self):
        self.model.train()
        self.outside = self.outside_a_region()
        self.model.train()
        self.model.zero_grad()


def outside_job():
    return train(AUXILIARY, MIXED, 1, make=Outside)[1].outside


def test_outside_a_region_each_row_is_a_sample(ranks):
    ours, values, by_hand, right = ranks.run(outside_job, 1)[0]
    torch.testing.assert_close(values, right, rtol=1e-9, atol=1e-9)
    for name, gradient in by_hand.items():
        assert (ours[name] - gradient).abs().max() <= 1e-9, name


@pytest.fixture(scope="module")
def alone(ranks):
    return ranks.run(job, 1, AUXILIARY, STATIC, 1)[0]


SLOW = {"CP2", "CP4", "TP2, CP chosen for each pack", "EP2", "PP2, CP chosen for each pack"}
CUTS = {
    "two packs": (1, MIXED, {}, {}),
    "CP2": (2, LONE, {}, {}),
    "TP2": (2, STATIC, SEQUENCE_PARALLEL, {}),
    "CP4": (4, STATIC, {}, RECOMPUTE),
    "CP chosen for each pack": (4, MIXED, {}, RECOMPUTE_MOE),
    "TP2, CP chosen for each pack": (4, MIXED, SEQUENCE_PARALLEL, RECOMPUTE),
    "EP2": (2, LONE, {"expert_model_parallel_size": 2}, {}),
    "PP2": (4, LONE, {"pipeline_model_parallel_size": 2}, RECOMPUTE),
    "PP2, CP chosen for each pack": (4, MIXED, {"pipeline_model_parallel_size": 2}, {}),
}


@pytest.mark.parametrize("cut", [pytest.param(cut, marks=[pytest.mark.slow] * (cut in SLOW)) for cut in CUTS])
def test_auxiliary_losses_do_not_depend_on_the_cut(ranks, alone, cut):
    """The gradient of auxiliary losses alone, in all weights, and their logged values."""
    world, plan, strategy, config = CUTS[cut]
    for own in ranks.run(job, world, AUXILIARY | config, plan, world, strategy):
        assert_same(own, alone, 1e-9)


def test_padding_is_in_no_statistic(ranks, alone):
    """Rows padded to the longest sample, on ranks that add fill tokens of their own."""
    for own in ranks.run(job, 2, AUXILIARY, STATIC, 2, SEQUENCE_PARALLEL, fmt="padded"):
        assert_same(own, alone, 1e-9)


def test_gradients_double_with_the_coefficients(ranks, alone):
    doubled = AUXILIARY | {"moe_aux_loss_coeff": [1.4, 0.8], "moe_z_loss_coeff": 0.4}
    (own,) = ranks.run(job, 1, doubled, STATIC, 1)[0]["gradients"]
    for name, once in alone["gradients"][0].items():
        torch.testing.assert_close(own[name], 2 * once, rtol=1e-12, atol=1e-12)
    assert own["decoder.layers.0.mlp.router.weight"].abs().max() > 1e-3


class Spoilt(OnlyAuxiliary):
    """The second CP group sees other tokens, where asked; each rank keeps its own routers' values."""

    spoilt = False

    def training_step(self, batch, batch_idx):
        if self.spoilt and dist.get_rank() >= 2:
            batch["input_ids"] = (batch["input_ids"] + 1) % 17
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args):
        self.values = [dict(router.auxiliary) for router in routers_of(self.model)]
        super().on_train_batch_end(*args)


class SpoiltTokens(Spoilt):
    spoilt = True


def group_job(make):
    two_groups = {4: [(0, 2, [0, 1, 2]), (2, 2, [3, 4, 5])]}
    return train(AUXILIARY, two_groups, 4, make=make, fmt="padded")[1].values


def test_a_group_does_not_see_the_tokens_of_another(ranks):
    before, after = ranks.run(group_job, 4, Spoilt), ranks.run(group_job, 4, SpoiltTokens)
    assert before[:2] == after[:2]
    assert before[2] != after[2]
    assert before[3] != after[3]


class Validated(runs.SmallGPT):
    def val_dataloader(self):
        return loader(LENGTHS, len(LENGTHS), "packed")


def bias_job(config, plan, world, strategy=None, steps=3, **options):
    """The biases of experts after some steps, by layer."""
    trained, module = train(BIASED | config, plan, world, strategy, lengths=LENGTHS * steps, **options)
    routers = {router.layer_number: router for router in routers_of(module.model)}
    assert all(not router.local_tokens_per_expert.any() for router in routers.values())
    return trained, {layer: router.expert_bias for layer, router in routers.items()}, module


def moved_job():
    _, biases, module = bias_job({}, MIXED, 1, steps=1, make=ByHand)
    return [biases[1] - module.first_biases[0], biases[2] - module.first_biases[1]], module.counts


def test_biases_move_by_the_tokens_of_each_expert(ranks):
    moved, counts = ranks.run(moved_job, 1)[0]
    assert counts.sum(1).tolist() == [2.0 * sum(LENGTHS)] * 2
    right = 0.25 * torch.sign(counts.mean(1, keepdim=True) - counts)
    torch.testing.assert_close(torch.stack(moved).float(), right, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("strategy", "config"),
    [
        pytest.param({}, RECOMPUTE, marks=pytest.mark.slow, id="CP"),
        pytest.param(SEQUENCE_PARALLEL, RECOMPUTE_MOE, id="TP2+SP"),
        pytest.param({"pipeline_model_parallel_size": 2}, {}, marks=pytest.mark.slow, id="PP2"),
    ],
)
def test_biases_do_not_depend_on_the_layout(ranks, whole_biases, strategy, config):
    """Nor on recomputed layers, nor on validation in between.

    Megatron-Core's sigmoid is one of float32, and torch's gives other last bits at the end of a tensor than inside it.
    """
    whole, biases = whole_biases
    for own, ours in ranks.run(layout_job, 4, config, MIXED, 4, strategy, make=Validated, val_check_interval=1):
        del own["logged"]["val_loss"]
        assert_same(own, whole, 1e-6)
        for layer, bias in ours.items():
            assert torch.equal(bias, biases[layer]), layer


def layout_job(*args, **options):
    return bias_job(*args, **options)[:2]


@pytest.fixture(scope="module")
def whole_biases(ranks):
    whole, biases = ranks.run(layout_job, 1, {}, STATIC, 1, make=runs.SmallGPT)[0]
    assert len({tuple(bias.tolist()) for bias in biases.values()}) == 2
    return whole, biases


class Counted(runs.SmallGPT):
    """Before it trains, counts the tokens of many calls; Lightning has put the model into its dtype by then, once more."""

    def on_fit_start(self):
        self.biases = [router.expert_bias.add_(0.1234567).clone() for router in routers_of(self.model)]
        self.model.to(torch.bfloat16)

    def on_train_start(self):
        routers, counts = list(routers_of(self.model)), []
        hooks = [r.register_forward_hook(lambda *call: counts.append(call[2][1].sum(0))) for r in routers]
        self.model.train()
        for _ in range(9):
            (0 * self.model(input_ids=torch.arange(101)[None] % 17)).sum().backward()
        for hook in hooks:
            hook.remove()
        by_hand = torch.stack(counts).view(9, len(routers), -1).sum(0)
        self.counted = [r.local_tokens_per_expert.clone() for r in routers], by_hand
        self.kept = [router.expert_bias.clone() for router in routers]
        for router in routers:
            router.local_tokens_per_expert.zero_()
        self.model.zero_grad()


def counted_job():
    config = BIASED | {"moe_router_dtype": "fp32"}
    module = train(config, STATIC, 1, make=Counted, precision="bf16-true")[1]
    return module.counted, module.biases, module.kept


def test_counts_and_biases_stay_in_float32_in_a_model_of_bfloat16(ranks):
    (counted, by_hand), biases, kept = ranks.run(counted_job, 1)[0]
    assert by_hand.sum() == 9 * 101 * 2 * len(counted)
    assert bool((by_hand % 2).any())
    assert int(by_hand.max()) > 512
    assert torch.equal(torch.stack(counted).long(), by_hand)
    assert all(map(torch.equal, kept, biases))
