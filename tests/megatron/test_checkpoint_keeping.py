"""What stays of checkpoints when something fails, and what in them belongs to whom."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter

from lightning_dcp import next_token_loss
from lightning_dcp.errors import CheckpointError
from lightning_dcp.models.megatron import MegatronModel
from lightning_dcp.models.megatron.checkpoint import is_sharded, store, writer
from lightning_dcp.models.megatron.checkpoint.optimizers import wanted_state
from lightning_dcp.models.megatron.checkpoint.weights import NamedParameter
from lightning_dcp.models.megatron.distributed_state import WholeState
from lightning_dcp.models.megatron.model import megatron_models
from lightning_dcp.models.megatron.weights import load_whole_weights, whole_weights
from tests.megatron.runs import DENSE, MOE, made_up, whole_shapes
from tests.megatron.test_checkpoint import LENGTHS, Trained, stored
from tests.support.training import loader, trainer

TP2 = {"tensor_model_parallel_size": 2}


class Fails(Callback):
    """A run that ends in its third batch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            raise RuntimeError("the user's own")


def keep_one(directory: str, *callbacks: Callback) -> None:
    saving = ModelCheckpoint(directory, every_n_train_steps=1, save_top_k=1, filename="{step}")
    run = trainer(
        strategy=TP2 | {"async_checkpoint": True},
        max_steps=3,
        enable_checkpointing=True,
        callbacks=[saving, *callbacks],
    )
    run.fit(Trained(DENSE), loader(LENGTHS, 4))


def keep_one_whatever_happens(directory: str) -> None:
    keep_one(f"{directory}/well")
    with pytest.raises(RuntimeError, match="the user's own"):
        keep_one(f"{directory}/run fails", Fails())
    whole, written = FileSystemWriter.write_data, []

    def write(*arguments: Any) -> Any:
        written.append(1)
        if len(written) > 1:
            raise OSError("no space left")
        return whole(*arguments)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError, match="no space left"):
        patch.setattr(FileSystemWriter, "write_data", write)
        keep_one(f"{directory}/write fails")


def test_the_checkpoint_before_stays_until_one_in_the_background_is_complete(ranks: Any, tmp_path: Path) -> None:
    ranks.run(keep_one_whatever_happens, 2, str(tmp_path))
    assert os.listdir(tmp_path / "well") == ["step=3.ckpt"]
    assert os.listdir(tmp_path / "run fails") == ["step=2.ckpt"]
    assert sorted(os.listdir(tmp_path / "write fails")) == [".step=2.ckpt.unfinished", "step=1.ckpt"]
    assert is_sharded(tmp_path / "write fails/step=1.ckpt")


def fail_on_the_first_rank(directory: str) -> dict[str, str]:
    """Errors by what fails; after them a checkpoint is saved and deleted as ever."""
    run, found = trainer(strategy=TP2, max_steps=1), {}
    run.fit(Trained(DENSE), loader(LENGTHS, 6))

    def fails(*unused: Any, **options: Any) -> None:
        raise OSError("no space left")

    run.save_checkpoint(f"{directory}/before.ckpt")
    for owner, name, action in (
        (writer, "begin", run.save_checkpoint),
        (TorchCheckpointIO, "save_checkpoint", run.save_checkpoint),
        (writer, "_complete", run.save_checkpoint),
        (writer, "commit", run.save_checkpoint),
        (store, "remove", run.strategy.remove_checkpoint),
    ):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as error:
            patch.setattr(owner, name, fails)
            action(f"{directory}/before.ckpt")
        found[name] = str(error.value)
    run.save_checkpoint(f"{directory}/after.ckpt")
    run.strategy.remove_checkpoint(f"{directory}/before.ckpt")
    return found


def test_what_fails_on_the_first_rank_fails_on_all(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks.run(fail_on_the_first_rank, 2, str(tmp_path))
    assert first == second
    assert len(first) == 5
    assert all("before.ckpt" in text and "rank 0: OSError('no space left')" in text for text in first.values())
    assert is_sharded(tmp_path / "after.ckpt")
    assert not (tmp_path / "before.ckpt").exists()


class Paired(Trained):
    """Two models with a weight of the user's own on the second, and further paths to the first, its decoder and a weight."""

    factor = 1.0  # of the second's weights

    def configure_model(self) -> None:
        if not hasattr(self, "reference"):
            super().configure_model()
            self.reference = MegatronModel(self.provider)
            shapes = whole_shapes(self.reference)
            load_whole_weights(self.reference, lambda name: self.factor * made_up(name, shapes[name]))
            self.policy, self.body = self.model, self.model.chunks[0].decoder
            self.head = self.model.chunks[0].output_layer.weight
            self.reference.temperature = nn.Parameter(torch.tensor(self.factor))

    def _loss(self, batch: Any) -> tuple[Tensor, int]:
        logits = self.policy(input_ids=batch["input_ids"]) + self.reference(input_ids=batch["input_ids"])
        return next_token_loss(logits * self.scale / self.reference.temperature, batch), 1


def everything(module: Trained) -> dict[str, Tensor]:
    inside = {f"{n}.{k}": w for n, model in megatron_models(module).items() for k, w in whole_weights(model).items()}
    outside = {"scale": module.scale}
    if isinstance(module, Paired):
        outside["temperature"] = module.reference.temperature
    return inside | {name: tensor.detach().clone() for name, tensor in outside.items()}


def loaded(strategy: dict[str, Any], path: str, make: type[Trained], config: dict[str, Any]) -> dict[str, Tensor]:
    module = make(config)
    vars(module)["factor"] = 0.5
    trainer(strategy=strategy, limit_val_batches=1).validate(module, loader(LENGTHS, 6), ckpt_path=path, verbose=False)
    return everything(module)


def saved_and_loaded(path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    module, run = Paired(DENSE), trainer(strategy=TP2, max_steps=1)
    run.fit(module, loader(LENGTHS, 6))
    run.save_checkpoint(path)
    return everything(module), loaded(TP2, path, Paired, DENSE)


def test_two_models_and_weights_with_several_paths(ranks: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "step=1.ckpt")
    results = ranks.run(saved_and_loaded, 2, path)
    trained = results[0][0]
    for own in (results[0][1], results[1][1], ranks.run(loaded, 1, {}, path, Paired, DENSE)[0]):
        torch.testing.assert_close(own, trained, rtol=0, atol=0)
    rest = torch.load(f"{path}/lightning.ckpt", weights_only=False)
    assert set(rest["state_dict"]) == {"scale", "reference.temperature"}
    assert {name.partition(".")[0] for name in rest["optimizer_states"][0]["parameters"]} == {
        "model",
        "reference",
        "scale",
    }


BIASED = MOE | {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_bias_update_rate": 0.1,
}


def saved_with_biases(path: str) -> dict[str, Tensor]:
    module, run = Trained(BIASED), trainer(strategy={"expert_model_parallel_size": 2}, max_steps=1)
    run.fit(module, loader(LENGTHS, 6))
    run.save_checkpoint(path)
    return everything(module)


def test_the_experts_biases_in_routing_are_saved(ranks: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "step=1.ckpt")
    trained = ranks.run(saved_with_biases, 2, path)[0]
    biases = [weight for name, weight in trained.items() if name.endswith("expert_bias")]
    assert len(biases) == 4
    assert all(bias.abs().sum() > 0 for bias in biases)
    torch.testing.assert_close(ranks.run(loaded, 1, {}, path, Trained, BIASED)[0], trained, rtol=0, atol=0)


class Shares(Callback):
    """Whether the weights in float32 are those of the model when training goes on, and which states a rank keeps."""

    agree: bool | None = None
    kept = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        own = trainer.strategy._distributed
        if own is not None:
            flat = [
                (w.flatten()[(r := part._get_model_param_range_map(w)["param"]).start : r.end], s)
                for w, s, part in own.shards()
            ]
            self.agree = all(torch.equal(weight.float(), share) for weight, share in flat)
        self.weights = whole_weights(pl_module.model)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.strategy._distributed is not None:
            whole = WholeState(trainer.strategy._distributed)
            whole.gather()
            self.kept = len([w for w in pl_module.model.parameters() if w in whole.state])


def goes_on(directory: str, steps: int, precision: str = "bf16-true", *, distributed: bool) -> Shares:
    shares = Shares()
    saving = ModelCheckpoint(directory, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    run = trainer(
        strategy={"distributed_optimizer": distributed},
        precision=precision,
        max_steps=steps,
        enable_checkpointing=True,
        callbacks=[shares, saving],
    )
    path = f"{directory}/step={steps - 1}.ckpt" if steps > 1 else None
    run.fit(Trained(DENSE), loader(LENGTHS, 4), ckpt_path=path)
    return shares


def there_and_back(directory: str) -> dict[str, Any]:
    first = goes_on(directory, 1, distributed=True)
    wide = goes_on(directory, 2, "32-true", distributed=True)
    goes_on(directory, 2, distributed=False)
    back = goes_on(directory, 3, distributed=True)
    return {"kept": first.kept, "wide": wide.weights, "back": back.agree}


def test_weights_in_float32_do_not_come_back_after_another_optimizer(ranks: Any, tmp_path: Path) -> None:
    results = ranks.run(there_and_back, 2, str(tmp_path))
    masters = [any(".master." in key for key in stored(tmp_path / f"step={n}.ckpt")) for n in (1, 2, 3)]
    assert masters == [True, False, True]
    assert all(own["back"] for own in results)
    torch.testing.assert_close(results[1]["wide"], results[0]["wide"], rtol=0, atol=0)
    assert [bool(own["kept"]) for own in results] == [True, False]


def test_states_are_read_to_the_cpu_and_masters_only_by_who_keeps_them() -> None:
    from megatron.core.dist_checkpointing import ShardedTensor

    weight = nn.Parameter(torch.empty(2, 3, device="meta", dtype=torch.bfloat16))
    named = {id(weight): NamedParameter("w", ShardedTensor.from_rank_offsets("w", weight))}
    catalog = {"w": {"values": {}, "tensors": {"exp_avg": "torch.float32", "master": "torch.float32"}}}
    (found,) = wanted_state(torch.optim.AdamW([weight]), 0, catalog, named).values()
    assert found.key == "optimizer.0.exp_avg.w"
    assert found.data.device.type == "cpu"
    assert found.data.shape == (2, 3)
