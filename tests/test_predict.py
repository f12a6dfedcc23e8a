"""Predictions: whole, in the data set's order, each once, on every rank and in writers, as in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from lightning_dcp.errors import BatchError
from tests.support.ranks import RankPool
from tests.support.training import RaggedTokens, TinyModule, loader, trainer

LENGTHS = (30, 3, 30, 7, 1, 12, 5, 29, 2, 31, 16, 9, 4)
SECOND = (8, 25, 2)
DCP = {"max_seqlen_per_dp_cp_rank": 16}


@dataclass
class Answer:
    """What a user might return for one sample."""

    text: str
    length: int
    score: Tensor


class Both(NamedTuple):
    score: Tensor
    names: list[str]


class Predicting(TinyModule):
    """Returns what it is told to, or with each batch another kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        logits = self.model(batch["input_ids"])
        mask = batch["attention_mask"]
        lengths = mask.sum(1)
        scores = (logits.logsumexp(-1) * mask).sum(1)
        names = [
            f"{dataloader_idx}: {int(n)} {int(ids[0])}" for n, ids in zip(lengths, batch["input_ids"], strict=True)
        ]
        rows = [{"length": n, "score": s} for n, s in zip(lengths, scores, strict=True)]
        made = {
            "tensor": lambda: logits * mask.unsqueeze(-1),
            "dict": lambda: {"scores": scores, "inner": {"names": names, "pair": (lengths, scores * 2)}, "rows": rows},
            "strings": lambda: names,
            "objects": lambda: [Answer(*a) for a in zip(names, lengths.tolist(), scores, strict=True)],
            "list of tensors": lambda: list(scores),
            "named tuple": lambda: Both(scores, names),
            "nothing": lambda: None,
        }
        return made[KINDS[batch_idx] if self.kind == "all" else self.kind]()


def plain(value: Any) -> Any:
    """The same without types of our own, for comparing."""
    if isinstance(value, Answer):
        return {"text": value.text, "length": value.length, "score": value.score}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(plain(entry) for entry in value)]
    return {key: plain(entry) for key, entry in value.items()} if isinstance(value, dict) else value


def assert_equal(ours: Any, expected: Any) -> None:
    assert type(ours) is type(expected)
    if isinstance(expected, dict):
        assert list(ours) == list(expected)
        for key in expected:
            assert_equal(ours[key], expected[key])
    elif isinstance(expected, list):
        assert len(ours) == len(expected)
        for own, right in zip(ours, expected, strict=True):
            assert_equal(own, right)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
    else:
        assert ours == expected


KINDS = ["tensor", "dict", "strings", "objects", "list of tensors", "named tuple"]


def predictions(strategy: dict[str, Any] | None) -> dict[str, Any]:
    """Of every kind; and over two loaders."""
    every = trainer(strategy=strategy).predict(Predicting("all"), loader(LENGTHS * 2, 5))
    found: dict[str, Any] = dict(zip(KINDS, map(plain, every or []), strict=True))
    run, loaders = trainer(strategy=strategy), [loader(LENGTHS, 4), loader(SECOND, 2)]
    found["two loaders"] = plain(run.predict(Predicting("dict"), loaders))
    found["not wanted"] = run.predict(Predicting("dict"), loaders, return_predictions=False)
    found["nothing"] = run.predict(Predicting("nothing"), loader(SECOND, 2))
    found["smaller than the world"] = plain(run.predict(Predicting("objects"), loader((6,), 2)))
    return found


@pytest.fixture(scope="module")
def expected(ranks: RankPool) -> dict[str, Any]:
    return ranks.run(predictions, 1, None)[0]


def test_predictions_are_whole_in_order_and_on_every_rank(ranks: RankPool, expected: dict[str, Any]) -> None:
    assert expected["not wanted"] is None
    assert expected["two loaders"][0] == "list"
    assert len(expected["objects"]) - 1 == 5
    for ours in ranks.run(predictions, 2, DCP):
        assert ours.keys() == expected.keys()
        for kind, right in expected.items():
            assert_equal(ours[kind], right)


class Writer(BasePredictionWriter):
    """Keeps what it is given to write."""

    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.written: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, *at: Any
    ) -> None:
        self.written.append(["batch", plain(prediction), plain(indices), batch["input_ids"], *at])

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.written.append(["epoch", plain(predictions), plain(indices)])


def written(strategy: dict[str, Any] | None) -> dict[str, Any]:
    found, two = {}, [loader(LENGTHS, 4), loader(SECOND, 2)]
    for interval, loaders in (("batch", two[0]), ("epoch", two), ("batch_and_epoch", two)):
        writer = Writer(interval)
        run = trainer(strategy=strategy, callbacks=[writer])
        run.predict(Predicting("strings"), loaders, return_predictions=False)
        found[interval] = writer.written
    return found


def test_writers_get_every_sample_with_its_index(ranks: RankPool) -> None:
    expected = ranks.run(written, 1, None)[0]
    assert [entry[0] for entry in expected["batch"]] == ["batch"] * 4
    assert expected["batch"][1][2] == ["list", 4, 5, 6, 7]
    assert [entry[0] for entry in expected["epoch"]] == ["epoch"]
    assert [entry[0] for entry in expected["batch_and_epoch"]] == ["batch"] * 6 + ["epoch"]
    for ours in ranks.run(written, 2, DCP):
        assert_equal(ours, expected)


class OneAnswer(TinyModule):
    """Returns one object for a whole batch, which belongs to no sample."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return Answer("all", len(self.model(batch["input_ids"])), torch.ones(()))


def one_answer() -> str:
    with pytest.raises(BatchError) as caught:
        trainer(strategy=DCP).predict(OneAnswer(), loader((16, 16, 9), 3))
    return str(caught.value)


def test_an_object_for_several_packs_is_refused_with_advice(ranks: RankPool) -> None:
    message = ranks.run(one_answer, 1)[0]
    assert "returned Answer" in message
    assert "one entry a sample" in message


def shuffled() -> list[int]:
    """Indices that a writer gets where the loader has an order of its own."""
    writer = Writer("epoch")
    data = RaggedTokens(LENGTHS)
    order = list(reversed(range(len(LENGTHS))))
    made: Any = torch.utils.data.DataLoader(data, batch_size=4, sampler=order, collate_fn=loader(LENGTHS, 4).collate_fn)
    trainer(strategy=DCP, callbacks=[writer]).predict(Predicting("strings"), made)
    indices = writer.written[0][2]
    return [index for batch in indices[1][1:] for index in batch[1:]]


def test_indices_follow_the_loaders_own_order(ranks: RankPool) -> None:
    assert ranks.run(shuffled, 2) == [list(reversed(range(len(LENGTHS))))] * 2
