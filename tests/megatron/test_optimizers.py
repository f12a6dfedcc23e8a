"""torch's optimizers and schedulers on every layout, with weights of the user's own behind the model."""

import pytest
import torch
from torch import nn

from lightning_dcp import GradientNorm
from lightning_dcp.batch.labels import shifted_labels
from lightning_dcp.loss import next_token_loss
from tests.megatron import runs
from tests.megatron.test_parity import LENGTHS, given
from tests.support.training import assert_same

LAYOUTS = {
    "TP2+SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2": {"pipeline_model_parallel_size": 2},
    "EP2xTP2+SP": {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
}


class ValueHead(runs.SmallGPT):
    """A linear head on the logits, AdamW with groups of its own, and two schedulers."""

    def __init__(self, config, **options):
        super().__init__(config, **options)
        self.head = nn.Linear(runs.VOCABULARY, 1)
        for name, parameter in self.head.named_parameters():
            parameter.data.copy_(runs.made_up(name, parameter.shape))

    def configure_callbacks(self):
        return [GradientNorm()]

    def training_step(self, batch, batch_idx):
        logits = self.model(input_ids=batch["input_ids"])
        wanted = shifted_labels(batch) != -100
        value = (self.head(logits).squeeze(-1).square() * wanted).sum() / wanted.sum()
        return next_token_loss(logits, batch) + 0.1 * value

    def configure_optimizers(self):
        plain = [p for n, p in self.named_parameters() if p.dim() == 1]
        decayed = [p for n, p in self.named_parameters() if p.dim() > 1]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.2}, {"params": plain, "weight_decay": 0.0, "lr": 0.03}],
            lr=0.1,
            betas=(0.8, 0.9),
            eps=1e-2,
            foreach=True,
        )
        schedulers = [
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7),
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2),
        ]
        return [optimizer], [{"scheduler": s, "interval": "step"} for s in schedulers]


def trained(config, world, layout, **options):
    modules = []

    def make(*args, **options):
        modules.append(ValueHead(*args, **options))
        return modules[0]

    sizes = layout.get("tensor_model_parallel_size", 1) * layout.get("pipeline_model_parallel_size", 1)
    strategy = {"scheduler": given(world // sizes), **layout}
    found = runs.fit(config, LENGTHS, len(LENGTHS), strategy, fmt="padded", make=make, max_epochs=3, **options)
    found["weights"] |= {name: p.detach().clone() for name, p in modules[0].head.named_parameters()}
    return found


@pytest.mark.parametrize("layout", ["TP2+SP", "PP2", pytest.param("EP2xTP2+SP", marks=pytest.mark.slow)])
def test_adamw_in_groups_under_schedules_agrees_with_one_process(ranks, layout):
    config = runs.MOE if "EP" in layout else runs.DENSE
    oracle = ranks.run(trained, 1, config, 1, {})[0]
    for own in ranks.run(trained, 4, config, 4, LAYOUTS[layout]):
        assert_same(own, oracle, 1e-9)


DISTRIBUTED = {
    "plane": (2, {}, {}),
    "TP2+SP": (4, LAYOUTS["TP2+SP"], {}),
    "PP2, tied": (4, LAYOUTS["PP2"], {"share_embeddings_and_output_weights": True}),
    "EP2xTP2+SP": (4, LAYOUTS["EP2xTP2+SP"], {}),
}


@pytest.mark.parametrize("layout", DISTRIBUTED)
def test_the_distributed_optimizer_agrees_with_adamw_on_one_process(ranks, layout):
    world, strategy, module = DISTRIBUTED[layout]
    config = runs.MOE if "EP" in layout else runs.DENSE
    options = {"module": module, "gradient_clip_val": 0.2}
    oracle = ranks.run(trained, 1, config, 1, {}, **options)[0]
    strategy = strategy | {"distributed_optimizer": True}
    for own in ranks.run(trained, world, config, world, strategy, precision="32-true", **options):
        torch.testing.assert_close(own["losses"], oracle["losses"], rtol=1e-5, atol=1e-5)
        assert own["logged"]["grad_norm"] == pytest.approx(oracle["logged"]["grad_norm"], rel=1e-5)
        for name, weight in oracle["weights"].items():
            torch.testing.assert_close(own["weights"][name].double(), weight, rtol=1e-5, atol=1e-5)
