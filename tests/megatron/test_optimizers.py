"""torch's optimizers and schedulers on every layout, with weights of the user's own behind the model."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_dcp import ConfigurationError, GradientNorm
from lightning_dcp.batch.labels import shifted_labels
from lightning_dcp.loss import next_token_loss
from lightning_dcp.models.megatron.weights import weights_of, whole_weights
from tests.megatron import runs
from tests.megatron.runs import LENGTHS, given, plane_of
from tests.support.training import TinyModule, assert_same, loader, trainer

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


def trained(config, world, layout, *, make=ValueHead, **options):
    modules = []

    def kept(*args, **options):
        modules.append(make(*args, **options))
        return modules[0]

    strategy = {"scheduler": given(plane_of(world, layout)), **layout}
    found = runs.fit(config, LENGTHS, len(LENGTHS), strategy, fmt="padded", make=kept, max_epochs=3, **options)
    found["weights"] |= {name: p.detach().clone() for name, p in modules[0].head.named_parameters()}
    return found


@pytest.mark.parametrize(
    "layout", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("TP2+SP", "EP2xTP2+SP")), "PP2"]
)
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


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("plane", marks=pytest.mark.slow),
        pytest.param("TP2+SP", marks=pytest.mark.slow),
        "PP2, tied",
        pytest.param("EP2xTP2+SP", marks=pytest.mark.slow),
    ],
)
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


class LowerFrozen(ValueHead):
    """All that the first of two stages holds is frozen."""

    def configure_model(self):
        super().configure_model()
        for weight in weights_of(self.model):
            if weight.name.startswith(("embedding.", "decoder.layers.0.", "decoder.layers.1.")):
                weight.parameter.requires_grad_(False)


def test_the_distributed_optimizer_has_nothing_to_do_on_a_stage_that_is_frozen(ranks):
    options = {"make": LowerFrozen, "gradient_clip_val": 0.2}
    oracle = ranks.run(trained, 1, runs.DENSE, 1, {}, **options)[0]
    layout = LAYOUTS["PP2"] | {"distributed_optimizer": True}
    for own in ranks.run(trained, 2, runs.DENSE, 2, layout, precision="32-true", **options):
        assert own["logged"]["grad_norm"] == pytest.approx(oracle["logged"]["grad_norm"], rel=1e-5)
        for name, weight in oracle["weights"].items():
            torch.testing.assert_close(own["weights"][name].double(), weight, rtol=1e-5, atol=1e-5)


def interrupted(directory, world, layout, steps, *, resume=None, **options):
    """The weights after some steps, those in float32 of the optimizer included."""
    module = ValueHead(runs.DENSE)
    saving = ModelCheckpoint(directory, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    run = trainer(
        strategy={"scheduler": given(plane_of(world, layout)), **layout},
        max_steps=steps,
        max_epochs=None,
        enable_checkpointing=True,
        callbacks=[saving],
        **options,
    )
    run.fit(module, loader(LENGTHS, len(LENGTHS), "padded"), ckpt_path=resume)
    return whole_weights(module.model) | {name: p.detach().clone() for name, p in module.head.named_parameters()}


def straight_and_resumed(directory, precision):
    layout = LAYOUTS["TP2+SP"] | {"distributed_optimizer": True}
    options = {"precision": precision}
    straight = interrupted(f"{directory}/a", 4, layout, 3, **options)
    resumed = interrupted(f"{directory}/b", 4, layout, 3, resume=f"{directory}/a/step=2.ckpt", **options)
    plain = interrupted(f"{directory}/c", 4, LAYOUTS["PP2"], 3, resume=f"{directory}/a/step=2.ckpt", **options)
    return straight, resumed, plain


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-true", marks=pytest.mark.slow)])
def test_the_distributed_optimizer_is_resumed_with_its_state_and_by_plain_adamw(ranks, tmp_path, precision):
    for straight, resumed, plain in ranks.run(straight_and_resumed, 4, str(tmp_path), precision):
        for name, weight in straight.items():
            torch.testing.assert_close(resumed[name], weight, rtol=0, atol=0)
            if precision == "32-true":
                torch.testing.assert_close(plain[name], weight, rtol=1e-5, atol=1e-5)


def some_without_targets(strategy, precision):
    """Two batches, the second without targets; each a step, and both one."""
    found = {}
    for name, options in {
        "each a step": {"max_epochs": 2},
        "one step": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    }.items():
        data = loader(LENGTHS, 3, "padded")
        for sample in data.dataset.samples[3:]:
            sample["labels"][:] = -100
        module = ValueHead(runs.DENSE)
        trainer(strategy=strategy, precision=precision, **options).fit(module, data)
        weights = whole_weights(module.model) | {n: p.detach().clone() for n, p in module.head.named_parameters()}
        found[name] = {n: w.double() for n, w in weights.items()}
    return found


def test_batches_without_targets_and_windows_under_the_distributed_optimizer(ranks):
    oracle = ranks.run(some_without_targets, 1, {}, "64-true")[0]
    for found in ranks.run(some_without_targets, 2, {"distributed_optimizer": True}, "32-true"):
        torch.testing.assert_close(found, oracle, rtol=1e-5, atol=1e-5)


class Refused(runs.SmallGPT):
    """Optimizers that Megatron-Core's cannot stand in for."""

    def __init__(self, config, kind):
        super().__init__(config)
        self.kind = kind

    def configure_optimizers(self):
        parameters = list(self.parameters())
        return {
            "SGD": lambda: torch.optim.SGD(parameters),
            "amsgrad": lambda: torch.optim.AdamW(parameters, amsgrad=True),
            "left out": lambda: torch.optim.AdamW(parameters[1:]),
        }.get(self.kind, lambda: torch.optim.AdamW(parameters))()

    def configure_model(self):
        super().configure_model()
        self.late().requires_grad_(self.kind != "unfrozen")

    def on_train_batch_start(self, batch, batch_idx):
        self.late().requires_grad_(self.kind != "frozen")

    def late(self):
        return self.model.chunk.decoder.layers[1].mlp.linear_fc1.weight


def refused():
    found = {}
    for kind, precision in {
        "SGD": "32-true",
        "amsgrad": "32-true",
        "left out": "32-true",
        "float64": "64-true",
        "unfrozen": "32-true",
        "frozen": "32-true",
    }.items():
        run = trainer(strategy={"distributed_optimizer": True}, precision=precision)
        try:
            run.fit(Refused(runs.DENSE, kind), loader((3, 2), 2))
        except ConfigurationError as error:
            found[kind] = [problem.found for problem in error.problems]
    try:
        trainer(strategy={"distributed_optimizer": True}).fit(TinyModule(), loader((3, 2), 2))
    except ConfigurationError as error:
        found["no model"] = [problem.found for problem in error.problems]
    return found


def test_what_the_distributed_optimizer_cannot_do_is_refused(ranks):
    assert ranks.run(refused, 1)[0] == {
        "SGD": ["SGD from configure_optimizers"],
        "amsgrad": ["AdamW(amsgrad=True)"],
        "left out": [
            "weights that train and that the optimizer does not hold: chunks.0.embedding.word_embeddings.weight"
        ],
        "float64": ["weights in torch.float64"],
        "unfrozen": ["weights unfrozen in the run: chunks.0.decoder.layers.1.mlp.linear_fc1.weight"],
        "frozen": ["weights frozen in the run: chunks.0.decoder.layers.1.mlp.linear_fc1.weight"],
        "no model": ["no MegatronModel in the module"],
    }
