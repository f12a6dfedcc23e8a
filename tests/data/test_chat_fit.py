"""Training on chats with segments in the batches: two ranks and one process agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_dcp import Decoder, next_token_loss
from lightning_dcp.batch.sharded import ShardedBatch
from lightning_dcp.batch.view import view
from lightning_dcp.data import MadeUpChatDataModule
from tests.support.ranks import RankPool
from tests.support.training import Recorder, assert_same, trainer


class ChatModule(LightningModule):
    """Trains on chats; with whole samples it looks at the segments of each pack, too."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = Decoder(vocab_size, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, ffn_hidden_size=24)
        self.kinds: set[str] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not isinstance(batch, ShardedBatch):
            self._look(batch)
        loss = next_token_loss(self.model(batch["input_ids"]), batch)
        self.log("train_loss", loss)
        return loss

    def _look(self, batch: Any) -> None:
        seen = view(batch)
        for length, segments in zip(seen.lengths, seen.segments, strict=True):
            assert [s.start for s in segments] == [0, *(s.end for s in segments[:-1])]
            assert segments[-1].end == length
            self.kinds |= {s.kind for s in segments}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class WholeBatchModule(ChatModule):
    """Hands a Hugging Face model the whole batch, segments too."""

    without: tuple[str, ...] = ()

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        torch.manual_seed(3)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **sizes))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**{name: value for name, value in batch.items() if name not in self.without}).loss
        self.log("train_loss", loss)
        return loss


class WithoutSegments(WholeBatchModule):
    """The same, without the segments."""

    without = ("segments",)


def train(fmt: str, strategy: dict[str, Any] | None, kind: type[ChatModule] = ChatModule) -> dict[str, Any]:
    data = MadeUpChatDataModule(30, format=fmt, batch_size=5, max_length=900, val_fraction=0, num_workers=0)
    module, recorder = kind(data.vocab_size), Recorder()
    run = trainer(strategy=strategy, callbacks=[recorder], max_steps=2)
    run.fit(module, datamodule=data)
    return {
        "losses": recorder.losses,
        "gradients": recorder.gradients,
        "weights": {name: p.detach().clone() for name, p in module.named_parameters()},
        "logged": {name: float(value) for name, value in run.callback_metrics.items()},
        "kinds": module.kinds,
        "cp_sizes": recorder.cp_sizes,
    }


@pytest.fixture(scope="module")
def one_process(ranks: RankPool) -> dict[str, Any]:
    return ranks.run(train, 1, "padded", None)[0]


@pytest.mark.parametrize(
    ("fmt", "options"),
    [
        ("packed", {}),
        ("padded", {"outputs": "sharded"}),
        pytest.param("padded", {}, marks=pytest.mark.slow),
        pytest.param("jagged", {}, marks=pytest.mark.slow),
        pytest.param("packed", {"outputs": "sharded"}, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_train_as_one_process(
    ranks: RankPool, one_process: dict[str, Any], fmt: str, options: dict[str, Any]
) -> None:
    strategy = {"max_seqlen_per_dp_cp_rank": 480, "context_parallel_size": 2, **options}
    results = ranks.run(train, 2, fmt, strategy)
    for ours in results:
        assert_same(ours, one_process, 1e-10)
        assert 2 in {size for step in ours["cp_sizes"] for size in step}
    assert {"system", "tools", "user", "assistant", "tool_call", "tool"} <= one_process["kinds"]
    if not options:
        assert set().union(*(ours["kinds"] for ours in results)) == one_process["kinds"]


@pytest.mark.slow
def test_a_model_that_gets_the_whole_batch_leaves_segments_alone(ranks: RankPool) -> None:
    strategy = {"max_seqlen_per_dp_cp_rank": 480}
    with_them, without = (
        ranks.run(train, 2, "padded", strategy, kind)[0] for kind in (WholeBatchModule, WithoutSegments)
    )
    assert_same(with_them, without, 1e-10)
