"""Sharded checkpoints: resumed runs are those that were never interrupted, on the same layout and on others."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load

from lightning_dcp import DCPError, next_token_loss
from lightning_dcp.errors import CheckpointError
from lightning_dcp.models.megatron.weights import whole_weights
from tests.megatron.runs import DENSE, MOE, VOCABULARY, SmallGPT
from tests.support.training import Recorder, TinyModule, loader, trainer

LENGTHS = (13, 5, 9, 3, 7, 11, 4, 6, 12, 8, 5, 10)
TIED = {"share_embeddings_and_output_weights": True}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
TP2_PP2 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}


class Trained(SmallGPT):
    """With a weight outside the model, Adam in two parameter groups, and a schedule."""

    def configure_model(self) -> None:
        if not hasattr(self, "scale"):  # it gives made-up weights each time
            super().configure_model()
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, VOCABULARY))

    def _loss(self, batch: Any) -> tuple[Tensor, int]:
        return next_token_loss(self.model(input_ids=batch["input_ids"]) * self.scale, batch), 1

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch)[0])

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


class Watch(Recorder):
    """Also which samples each step read, and what each rank drew."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[list[tuple[int, ...]]] = []
        self.draws: list[tuple[float, float, float]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
        self.reads.append([tuple(ids[mask.bool()].tolist()) for ids, mask in rows])
        self.draws.append((float(torch.rand(())), float(np.random.rand()), random.random()))


def train(
    directory: str,
    steps: int,
    strategy: dict[str, Any],
    config: dict[str, Any] = DENSE,
    resume: str | None = None,
    seed: int = 0,
    every: int = 3,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    seed += 100 * int(os.environ["RANK"])
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    watch, module = Watch(), Trained(config, **(options or {}))
    saving = ModelCheckpoint(directory, every_n_train_steps=every, save_top_k=-1, filename="{step}")
    run = trainer(
        strategy={"max_seqlen_per_dp_cp_rank": 16, **strategy},
        max_epochs=None,
        max_steps=steps,
        enable_checkpointing=True,
        callbacks=[watch, saving],
    )
    run.fit(module, loader(LENGTHS, 2, "padded", shuffle=True), ckpt_path=resume)
    optimizer = run.optimizers[0]
    return {
        "losses": watch.losses,
        "reads": watch.reads,
        "draws": watch.draws,
        "lr": [group["lr"] for group in optimizer.param_groups],
        "own": {name: p.detach().clone() for name, p in module.named_parameters()},
        "state": optimizer.state_dict()["state"],
        "whole": whole_weights(module.model) | {"scale": module.scale.detach().clone()},
        "moments": {key: moments(module, optimizer, key) for key in ("exp_avg", "exp_avg_sq")},
        "files": sorted(os.listdir(directory)),
    }


def moments(module: Trained, optimizer: torch.optim.Optimizer, key: str) -> dict[str, Tensor]:
    return whole_weights(module.model, lambda p: optimizer.state[p][key]) | {
        "scale": optimizer.state[module.scale][key]
    }


def straight_and_resumed(directory: str) -> dict[str, Any]:
    straight = train(f"{directory}/a", 6, TP2_PP2)
    resumed = train(f"{directory}/b", 6, TP2_PP2, resume=f"{directory}/a/step=3.ckpt", seed=1)
    background = train(f"{directory}/c", 3, {**TP2_PP2, "async_checkpoint": True}, every=1)
    return {"straight": straight, "resumed": resumed, "background": background}


@pytest.fixture(scope="module")
def first(ranks: Any, tmp_path_factory: Any) -> tuple[Path, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("sharded")
    return directory, ranks.run(straight_and_resumed, 4, str(directory))


def test_resumed_steps_equal_uninterrupted_ones(first: Any) -> None:
    for own in first[1]:
        straight, resumed = own["straight"], own["resumed"]
        assert resumed["losses"] == straight["losses"][3:]
        assert resumed["lr"] == straight["lr"]
        assert_equal(resumed["own"], straight["own"])
        assert_equal(resumed["state"], straight["state"])
        assert all(state["step"] == 6 for state in resumed["state"].values())


def test_the_resumed_run_reads_what_was_not_used(first: Any) -> None:
    for own in first[1]:
        assert own["resumed"]["reads"] == own["straight"]["reads"][3:]
        reads = [tokens for batch in own["straight"]["reads"] for tokens in batch]
        assert sorted(len(tokens) for tokens in reads) == sorted(LENGTHS)


def test_each_rank_goes_on_with_its_own_random_numbers(first: Any) -> None:
    draws = [own["straight"]["draws"] for own in first[1]]
    assert len({tuple(d[3]) for d in draws}) == 4
    for own in first[1]:
        assert own["resumed"]["draws"] == own["straight"]["draws"][3:]


def test_a_checkpoint_written_in_the_background_is_the_same(first: Any) -> None:
    directory, results = first
    assert results[0]["background"]["files"] == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
    here = stored(directory / "a/step=3.ckpt")
    assert_equal(here, stored(directory / "c/step=3.ckpt"))
    states = {k: v for k, v in here.items() if k.startswith("optimizer.0.exp_avg.")}
    assert {"optimizer.0.exp_avg.scale", "optimizer.0.exp_avg.model.embedding.word_embeddings.weight"} <= states.keys()
    assert here["model.decoder.layers.3.mlp.linear_fc1.weight"].shape == (48, 16)


@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        (2, {"min_context_parallel_size": 2}),
        (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    ],
    ids=["one rank", "CP 2", "VPP2xPP2"],
)
def test_another_layout_goes_on(ranks: Any, first: Any, tmp_path: Path, world: int, strategy: dict[str, Any]) -> None:
    directory, results = first
    for own in ranks.run(train, world, str(tmp_path), 6, strategy, resume=str(directory / "a/step=3.ckpt")):
        assert_goes_on(own, results[0]["straight"])


def straight_mixture(directory: str) -> dict[str, Any]:
    return train(directory, 4, {"expert_model_parallel_size": 2}, MOE, every=2)


@pytest.mark.parametrize(
    ("world", "strategy"),
    [(1, {}), pytest.param(2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, marks=pytest.mark.slow)],
    ids=["one rank", "TP2+SP"],
)
def test_experts_move_to_other_ranks(ranks: Any, tmp_path: Path, world: int, strategy: dict[str, Any]) -> None:
    straight = ranks.run(straight_mixture, 2, str(tmp_path / "a"))[0]
    path = str(tmp_path / "a/step=2.ckpt")
    for own in ranks.run(train, world, str(tmp_path / "b"), 4, strategy, MOE, path, every=2):
        assert_goes_on(own, straight, 2)


def straight_tied(directory: str, strategy: dict[str, Any]) -> dict[str, Any]:
    return train(directory, 4, strategy, every=2, options=TIED)


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, PP2), (1, {})), pytest.param((1, {}), (2, VPP2), marks=pytest.mark.slow)],
    ids=["PP2 to one rank", "one rank to VPP2xPP2"],
)
def test_an_embedding_that_two_stages_hold_is_one_weight(ranks: Any, tmp_path: Path, before: Any, after: Any) -> None:
    straight = ranks.run(straight_tied, before[0], str(tmp_path / "a"), before[1])[0]
    path = tmp_path / "a/step=2.ckpt"
    embeddings = [key for key in stored(path) if "word_embeddings" in key or "output_layer" in key]
    assert len(embeddings) == 3  # the weight and its two moments
    for own in ranks.run(train, after[0], str(tmp_path / "b"), 4, after[1], resume=str(path), every=2, options=TIED):
        assert_goes_on(own, straight, 2)


def assert_goes_on(own: dict[str, Any], straight: dict[str, Any], after: int = 3) -> None:
    torch.testing.assert_close(
        torch.tensor(own["losses"]), torch.tensor(straight["losses"][after:]), rtol=1e-9, atol=1e-9
    )
    assert own["reads"] == straight["reads"][after:]
    for ours, right in (
        (own["whole"], straight["whole"]),
        *zip(own["moments"].values(), straight["moments"].values(), strict=True),
    ):
        assert ours.keys() == right.keys()
        for name, tensor in right.items():
            assert (ours[name] - tensor).abs().max() <= 1e-9, name


def assert_equal(ours: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert ours.keys() == expected.keys() and expected
        for key, value in expected.items():
            assert_equal(ours[key], value)
    else:
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(expected))


def stored(path: Path) -> dict[str, Tensor]:
    """All whole tensors of a checkpoint, read in one process."""
    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {k: torch.zeros(e.size, dtype=e.properties.dtype) for k, e in entries.items() if hasattr(e, "size")}
    load(tensors, storage_reader=FileSystemReader(path), no_dist=True)
    return tensors


def others_use(directory: str) -> dict[str, Any]:
    """Best of every step, saved by hand, tested from a directory."""
    module, data = Trained(DENSE), loader(LENGTHS, 3)
    best = ModelCheckpoint(
        f"{directory}/top",
        monitor="train_loss",
        every_n_train_steps=1,
        save_top_k=2,
        filename="{step}",
        save_last="link",
    )
    run = trainer(strategy=TP2_PP2, enable_checkpointing=True, callbacks=[best], limit_test_batches=1)
    run.fit(module, data)
    run.save_checkpoint(f"{directory}/after_fit.ckpt")
    left = sorted(os.listdir(f"{directory}/top"))
    (tested,) = run.test(module, data, verbose=False)
    run.save_checkpoint(f"{directory}/after_test.ckpt", weights_only=True)
    trained = whole_weights(module.model)
    (loaded,) = run.test(Trained(DENSE), data, ckpt_path=f"{directory}/after_test.ckpt", verbose=False)
    more = trainer(strategy=TP2_PP2, max_epochs=2, max_steps=5)
    more.fit(Trained(DENSE), data, ckpt_path=f"{directory}/top/last.ckpt")
    return {
        "top": left,
        "best": {Path(p).name: float(v) for p, v in best.best_k_models.items()},
        "metrics": (loaded["val_loss"], tested["val_loss"]),
        "weights": trained,
        "steps": more.global_step,
    }


def test_best_checkpoints_and_those_saved_by_hand(ranks: Any, tmp_path: Path) -> None:
    results = ranks.run(others_use, 4, str(tmp_path))
    own = results[0]
    assert own["top"] == sorted([*own["best"], "last.ckpt"])
    assert len(own["best"]) == 2
    assert own["steps"] == 5
    for loaded, trained in (other["metrics"] for other in results):
        assert loaded == trained
    for name in ("after_fit.ckpt", "after_test.ckpt"):
        weights = {k: v for k, v in stored(tmp_path / name).items() if not k.startswith("optimizer.")}
        assert torch.equal(
            weights["model.embedding.word_embeddings.weight"], own["weights"]["embedding.word_embeddings.weight"]
        )
    assert set(weights) == set(stored(tmp_path / "after_test.ckpt"))  # no optimizer states


def refusals(directory: str, plain: str) -> list[str]:
    return [
        refusal({}, Trained(DENSE | {"ffn_hidden_size": 28}), directory),
        refusal({}, Trained(DENSE | {"num_layers": 2}), directory),
        refusal({}, Trained(DENSE | {"qk_layernorm": True}), directory),
        refusal({}, TinyModule(), directory),
        refusal({}, Trained(DENSE), plain),
        refusal({"async_checkpoint": True}, TinyModule(), None),
    ]


def refusal(strategy: dict[str, Any], module: Any, path: str | None) -> str:
    try:
        trainer(strategy=strategy).validate(module, loader(LENGTHS, 6), ckpt_path=path)
    except DCPError as error:
        return str(error)
    return "none"


def test_what_is_no_checkpoint_of_the_module_is_refused(ranks: Any, first: Any, tmp_path: Path) -> None:
    torch.save({}, tmp_path / "plain.ckpt")
    texts = ranks.run(refusals, 1, str(first[0] / "a/step=3.ckpt"), str(tmp_path / "plain.ckpt"))[0]
    assert "model.decoder.layers.0.mlp.linear_fc1.weight (48, 16) for (56, 16)" in texts[0]
    assert "not in the model: model.decoder.layers.2." in texts[1]
    assert "not in the checkpoint: model.decoder.layers.0.self_attention.k_layernorm.weight" in texts[2]
    assert "shards of a Megatron-Core model, and none in the module" in texts[3]
    assert "found: a file; do: give a directory" in texts[4]
    assert "AsyncCheckpointIO" in texts[5]


def test_loading_outside_a_run_says_what_to_do_instead() -> None:
    with pytest.raises(
        CheckpointError, match=r"give trainer\.fit, validate, test or predict the directory as ckpt_path"
    ):
        Trained.load_from_checkpoint("runs/step=3.ckpt")


def without_random_states(directory: str) -> list[str]:
    rest = Path(directory) / "lightning.ckpt"
    saved = torch.load(rest)
    del saved["random_states"]
    torch.save(saved, rest)
    with pytest.warns(UserWarning) as found:
        train(f"{directory}-more", 4, {}, resume=directory, every=1)
    return [str(w.message) for w in found]


def test_a_checkpoint_without_random_states_is_resumed_with_a_warning(ranks: Any, tmp_path: Path) -> None:
    ranks.run(train, 1, str(tmp_path), 3, {})
    texts = ranks.run(without_random_states, 1, str(tmp_path / "step=3.ckpt"))[0]
    assert any("no random states" in text for text in texts)


def fail_while_writing(directory: str) -> str:
    def write(*unused: Any) -> Any:
        raise OSError("no space left")

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(Exception, match=r"rank 0: OSError.*no space left") as found,
    ):
        patch.setattr(FileSystemWriter, "write_data", write)
        train(directory, 1, {"async_checkpoint": True}, every=1)
    return type(found.value).__name__


def test_what_fails_in_the_background_ends_the_run(ranks: Any, tmp_path: Path) -> None:
    assert ranks.run(fail_while_writing, 1, str(tmp_path)) == ["CheckpointError"]
    assert os.listdir(tmp_path) == [".step=1.ckpt.unfinished"]


def die_while_writing(directory: str) -> None:
    if os.environ["RANK"] == "1":
        FileSystemWriter.write_data = lambda *_: os._exit(1)
    train(directory, 2, {"tensor_model_parallel_size": 2}, every=1)


def test_a_rank_that_dies_leaves_nothing_that_looks_complete(ranks: Any, tmp_path: Path) -> None:
    outcomes = ranks.run_all(die_while_writing, 2, str(tmp_path))
    assert not any(ok for ok, _ in outcomes)
    assert os.listdir(tmp_path) == [".step=1.ckpt.unfinished"]


def saved_after_the_distributed_optimizer(directory: str) -> None:
    module = Trained(DENSE)
    run = trainer(strategy={"distributed_optimizer": True}, precision="32-true", max_steps=1)
    run.fit(module, loader(LENGTHS, 6))
    run.save_checkpoint(f"{directory}/weights.ckpt", weights_only=True)
    with pytest.raises(CheckpointError, match="states end with the run"):
        run.save_checkpoint(f"{directory}/all.ckpt")


@pytest.mark.slow
def test_states_that_have_ended_are_not_left_out_in_silence(ranks: Any, tmp_path: Path) -> None:
    ranks.run(saved_after_the_distributed_optimizer, 1, str(tmp_path))
    assert os.listdir(tmp_path) == ["weights.ckpt"]
