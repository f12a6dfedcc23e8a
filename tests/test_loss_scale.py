"""Losses whose right value fits on a sheet of paper: one denominator for the whole batch, whatever the cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dcp.batch import padded_to_packed
from lightning_dcp.batch.labels import shifted_labels
from lightning_dcp.parallel.layout import zigzag
from tests.support.plans import PaperModule, train_by_plan
from tests.support.ranks import RankFailure, RankPool
from tests.support.training import assert_same, fit


def batch(*samples: list[float], width: int | None = None) -> dict[str, Tensor]:
    """A padded batch with pre-shifted labels; NaN marks a token that is no target."""
    width = width or max(map(len, samples))
    values = torch.zeros(len(samples), width, dtype=torch.float64)
    labels = torch.full((len(samples), width), -100)
    mask = torch.zeros(len(samples), width, dtype=torch.long)
    for row, sample in enumerate(samples):
        numbers = torch.tensor(sample, dtype=torch.float64)
        values[row, : len(sample)] = numbers.nan_to_num(7.0)
        labels[row, : len(sample)] = torch.where(numbers.isnan(), -100, 1)
        mask[row, : len(sample)] = 1
    return {"input_ids": torch.ones_like(labels), "attention_mask": mask, "values": values, "shift_labels": labels}


def train(batches: list[dict[str, Tensor]], packs: Any, world: int, outside: bool = False, **options: Any) -> Any:
    return train_by_plan(PaperModule(outside=outside), batches, packs, world, **options)


nan = float("nan")


def check(results: list[Any], mean: float, name: str = "model.weight") -> None:
    """On every rank: the logged loss, and the step of SGD with lr 1 (the gradient of the weight), are the mean."""
    for result in results:
        assert result["logged"] == pytest.approx(mean, rel=1e-12)
        assert result["steps"][name] == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("outside", [False, True])
def test_shards_with_unequal_targets_share_one_denominator(ranks: RankPool, outside: bool) -> None:
    # Rank 0 holds tokens 0, 1, 6, 7 with three targets of 1, 2, 3; rank 1 holds one target of 10.
    one = batch([1, 2, nan, 10, nan, nan, 3, nan])
    name = "outside" if outside else "model.weight"
    check(ranks.run(train, 2, [one], [(0, 2, [0])], 2, outside=outside), 4.0, name)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_one_target_counts_once_at_every_size(ranks: RankPool, world: int) -> None:
    one = batch([nan, nan, nan, 5.0, nan, nan, nan, nan])
    check(ranks.run(train, world, [one], [(0, world, [0])], world), 5.0)


GATHERED = [(2, [(0, 2, [0, 1])]), (4, [(0, 2, [0]), (2, 2, [1])]), (4, [(0, 4, [0, 1])])]


@pytest.mark.parametrize(("world", "packs"), GATHERED, ids=["cp 2", "dp 2 x cp 2", "cp 4"])
@pytest.mark.parametrize("outside", [False, True])
def test_ranks_that_hold_the_same_gathered_loss_do_not_add_it_up(
    ranks: RankPool, world: int, packs: Any, outside: bool
) -> None:
    samples = [[1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0]]
    name = "outside" if outside else "model.weight"
    check(ranks.run(train, world, [batch(*samples)], packs, world, outside=outside), 5.0, name)


@pytest.mark.parametrize("outside", [False, True])
def test_a_group_does_not_count_its_tokens_once_a_rank(ranks: RankPool, outside: bool) -> None:
    samples = [[float(i) for i in range(8)], *[[10.0 * s + i for i in range(4)] for s in range(1, 5)]]
    plan = [(0, 4, [0]), *[(rank, 1, [rank + 1]) for rank in range(4)]]
    total = sum(map(sum, samples))
    name = "outside" if outside else "model.weight"
    check(ranks.run(train, 4, [batch(*samples)], plan, 4, outside=outside), total / 24, name)


def test_a_sample_that_needs_all_ranks_gets_them(ranks: RankPool) -> None:
    one = batch([float(i) for i in range(16)])
    check(ranks.run(train, 4, [one], None, 4, strategy={"max_seqlen_per_dp_cp_rank": 4}), 7.5)


MIXED_PLAN = [(0, 4, [0]), (0, 2, [1]), (2, 2, [2]), *[(rank, 1, [3 + rank]) for rank in range(4)]]


@pytest.mark.parametrize("supervised", [0, 1, 2, 5, None])
def test_each_pack_is_scaled_by_its_own_share(ranks: RankPool, supervised: int | None) -> None:
    samples = [[1.0 * s + i for i in range(9 if s == 0 else 5)] for s in range(7)]
    counted = [s if supervised in (None, i) else [nan] * len(s) for i, s in enumerate(samples)]
    targets = [value for sample in counted for value in sample if value == value]
    check(ranks.run(train, 4, [batch(*counted)], MIXED_PLAN, 4), sum(targets) / len(targets))


class WithCount(PaperModule):
    """Also returns how many targets there are, as callbacks of other trainers do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, count = super().training_step(batch, batch_idx), (batch["shift_labels"] != -100).sum()
        return {"loss": loss, "count": count} if self.kind == "dict" else (loss, count)


def train_returning(kind: str, world: int) -> Any:
    module = PaperModule() if kind == "loss" else WithCount(kind)
    return train_by_plan(module, [batch([4.0, 4.0], [1.0] * 6)], [(0, world, [0]), (0, 1, [1])], world)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", ["loss", "dict"])
def test_what_else_a_step_returns_does_not_change_the_scale(ranks: RankPool, kind: str, world: int) -> None:
    check(ranks.run(train_returning, world, kind, world), 1.75)


def test_a_step_that_returns_a_loss_and_a_count_in_a_tuple_is_refused(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"BatchError: training_step must return a scalar loss .* found tuple"):
        ranks.run(train_returning, 2, "tuple", 2)


def test_one_scheduled_batch_is_a_token_mean(ranks: RankPool) -> None:
    check(ranks.run(train, 2, [batch([4.0, 4.0], [1.0] * 6)], [(0, 1, [0]), (1, 1, [1])], 2), 1.75)


def test_accumulated_batches_are_a_mean_of_means_as_in_lightning(ranks: RankPool) -> None:
    batches = [batch([4.0, 4.0]), batch([1.0] * 6)]
    for result in ranks.run(train, 2, batches, [(0, 2, [0])], 2, accumulate_grad_batches=2):
        assert result["steps"]["model.weight"] == pytest.approx(2.5, rel=1e-12)


class SampleMeans(PaperModule):
    """The mean over samples of each sample's mean."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        values, mask = self.model(batch["values"]), batch["attention_mask"]
        loss = ((values * mask).sum(1) / mask.sum(1)).mean()
        self.log("loss", loss)
        return loss


class Sums(PaperModule):
    """The sum over all tokens."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (self.model(batch["values"]) * batch["attention_mask"]).sum()
        self.log("loss", loss, reduce_fx="sum")
        return loss


def train_normalized(kind: str, world: int) -> Any:
    module = {"tokens": PaperModule, "samples": SampleMeans, "sum": Sums}[kind]()
    packs = [(0, 2, [0]), (2, 1, [1])] if world == 4 else [(0, 1, [0, 1])]
    samples = [[1.0] * 7, [10.0] * 2]
    return train_by_plan(module, [batch(*samples)], packs, world, strategy={"loss_normalization": kind})


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize(("kind", "right"), [("tokens", 27 / 9), ("samples", 11 / 2), ("sum", 27.0)])
def test_the_kind_of_mean_is_the_users(ranks: RankPool, kind: str, right: float, world: int) -> None:
    check(ranks.run(train_normalized, world, kind, world), right)


class TokenWeights(PaperModule):
    """Per-token weights, changed after the forward; divided by the number of targets."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        values = self.model(batch["values"])
        weights = batch["weights"]
        weights[:, 0] = 0.0
        loss = (values * weights).sum() / (batch["shift_labels"] != -100).sum()
        self.log("loss", loss)
        return loss


def train_weighted(world: int) -> Any:
    one = batch([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
    one["weights"] = torch.tensor([[9.0, 1.0, 2.0], [9.0, 0.5, 0.0]], dtype=torch.float64)
    return train_by_plan(TokenWeights(), [one], [(0, world, [0]), (0, 1, [1])], world)


@pytest.mark.parametrize("world", [1, 2])
def test_token_weights_scale_their_own_tokens(ranks: RankPool, world: int) -> None:
    check(ranks.run(train_weighted, world, world), (2.0 + 6.0 + 2.5) / 6)


class Unshifted(PaperModule):
    """Labels in the Hugging Face convention."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert "shift_labels" not in batch
        return super().training_step(batch, batch_idx)


def unshifted(*samples: list[float], packed: bool) -> Any:
    one = batch(*samples)
    one["labels"] = one.pop("shift_labels")
    return padded_to_packed(one) if packed else one


def train_unshifted(world: int, packed: bool) -> Any:
    one = unshifted([1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0, 10.0], packed=packed)
    return train_by_plan(Unshifted(), [one], [(0, world, [2]), (0, 1, [0, 1])], world)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_the_first_label_of_a_sample_is_no_target(ranks: RankPool, world: int, packed: bool) -> None:
    # Seven terms: the last token of each sample predicts nothing.
    check(ranks.run(train_unshifted, world, world, packed), (1 + 3 + 4 + 6 + 7 + 8 + 9) / 7)


def train_prompted(world: int) -> Any:
    """Ten tokens, the first six of them a prompt; each token's loss is its place."""
    one = unshifted([float(i) for i in range(10)], packed=False)
    one["labels"][0, :6] = -100
    return train_by_plan(Unshifted(), [one], [(0, world, [0])], world)


@pytest.mark.parametrize("world", [1, 2])
def test_the_divisor_is_the_targets_and_not_the_mask_of_real_tokens(ranks: RankPool, world: int) -> None:
    # Tokens 5 to 8 predict the four that are no prompt: 26 over 4, and not over the mask's 10.
    check(ranks.run(train_prompted, world, world), 26 / 4)


def test_a_batch_without_targets_changes_nothing(ranks: RankPool) -> None:
    for result in ranks.run(train, 2, [batch([nan, nan], [nan])], [(0, 1, [0]), (1, 1, [1])], 2):
        assert result["steps"]["model.weight"] == 0.0


def test_a_rank_without_samples_takes_part(ranks: RankPool) -> None:
    plan = [*[(0, 1, [i]) for i in range(5)], (1, 1, [5]), (1, 1, [6])]
    check(ranks.run(train, 4, [batch(*[[float(i)] * 3 for i in range(7)])], plan, 4), 3.0)


def test_shards_take_labels_from_whole_samples() -> None:
    labels = torch.arange(10, 18).unsqueeze(0)
    shifted = shifted_labels({"input_ids": labels, "labels": labels})[0]
    layout = zigzag([8], 2)
    assert shifted[layout.pack_index(0)].tolist() == [11, 12, 17, -100]
    assert shifted[layout.pack_index(1)].tolist() == [13, 14, 15, 16]


FORMATS, ACCUMULATED = ("padded", "packed"), (1, 2)


def fit_table(cp_size: int) -> dict[tuple[str, int], Any]:
    """A real model by one CP size, in both formats, with and without accumulation; size 0 is plain Lightning."""
    static = {"dynamic_context_parallel": False, "context_parallel_size": cp_size, "max_seqlen_per_dp_cp_rank": 64}
    return {
        (fmt, accumulate): fit(
            (11, 3, 20, 7, 1, 12, 5, 9),
            2,
            strategy=static if cp_size else None,
            fmt=fmt,
            module={"lr": 0.1},
            accumulate_grad_batches=accumulate,
        )
        for fmt in (FORMATS if cp_size else FORMATS[:1])
        for accumulate in ACCUMULATED
    }


def test_format_cp_size_and_accumulation_do_not_change_losses_and_gradients(ranks: RankPool) -> None:
    expected = ranks.run(fit_table, 1, 0)[0]
    norms = []
    for cp_size in (1, 2, 4):
        for result in ranks.run(fit_table, cp_size, cp_size):
            for (fmt, accumulate), one in result.items():
                assert_same(one, expected["padded", accumulate], 1e-9)
                norms.append((fmt, cp_size, accumulate, _norm(one["gradients"][0])))
    assert len({row[:3] for row in norms}) == 12
    for accumulate in ACCUMULATED:
        each = torch.tensor([norm for *_, times, norm in norms if times == accumulate])
        torch.testing.assert_close(each, each[:1].expand_as(each), rtol=1e-9, atol=0)


def _norm(gradients: dict[str, Tensor]) -> float:
    return float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
