"""Losses beyond next-token: value heads, distillation, temperatures of each sample; against one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_dcp import ConfigurationError, MegatronModel
from lightning_dcp.batch.labels import shifted_labels
from lightning_dcp.models.megatron import ScalarHead, put_scalar_head
from lightning_dcp.models.megatron.weights import load_whole_weights
from tests.megatron import hf, runs
from tests.support.training import assert_same, loader, trainer

LENGTHS = (13, 5, 9, 3, 7, 11, 2, 6)
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
LAYOUTS = {"TP2+SP": (4, SP), "PP2xTP2+SP": (8, PP | SP)}


class Values(runs.SmallGPT):
    """Numbers of a scalar head, and a value loss."""

    def provider(self, *args: Any, **kwargs: Any) -> Any:
        return put_scalar_head(super().provider(*args, **kwargs))

    def _loss(self, batch: Any) -> tuple[Tensor, int]:
        values = self.model(input_ids=batch["input_ids"]).squeeze(-1)
        wanted = shifted_labels(batch)
        return ((values - wanted / 10) ** 2)[wanted != -100].mean(), 1


class Temperatures(runs.SmallGPT):
    """Each token has a temperature of its own."""

    def _loss(self, batch: Any) -> tuple[Tensor, int]:
        ids = batch["input_ids"]
        logits = self.model(input_ids=ids) / (0.5 + (ids % 5) / 4).unsqueeze(-1)
        return F.cross_entropy(logits.flatten(0, 1), shifted_labels(batch).flatten()), 1


class Distilled(runs.SmallGPT):
    """A teacher of other weights in the same module."""

    def configure_model(self) -> None:
        super().configure_model()
        self.teacher = MegatronModel(self.provider).requires_grad_(False)
        shapes = runs.whole_shapes(self.teacher)
        load_whole_weights(self.teacher, lambda name: runs.made_up(name + "teacher", shapes[name]))

    def _loss(self, batch: Any) -> tuple[Tensor, int]:
        with torch.no_grad():
            right = self.teacher(input_ids=batch["input_ids"]).log_softmax(-1)
        own = self.model(input_ids=batch["input_ids"]).log_softmax(-1)
        wanted = shifted_labels(batch) != -100
        return F.kl_div(own, right, reduction="none", log_target=True).sum(-1)[wanted].mean(), 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=self.lr)


def job(make: type, strategy: dict[str, Any], config: dict[str, Any], tied: bool = False) -> dict[str, Any]:
    limit, module = {"max_seqlen_per_dp_cp_rank": 16}, {"share_embeddings_and_output_weights": tied}
    return runs.fit(runs.DENSE | config, LENGTHS, 4, limit | strategy, make=make, module=module)


@pytest.mark.parametrize(
    ("make", "layout"),
    [
        pytest.param(make, layout, marks=[] if layout == short else pytest.mark.slow)
        for make, short in ((Values, "PP2xTP2+SP"), (Temperatures, "TP2+SP"))
        for layout in LAYOUTS
    ],
)
def test_losses_of_other_kinds_agree_with_one_process(ranks, make, layout):
    world, strategy = LAYOUTS[layout]
    expected = ranks.run(job, 1, make, {}, {})[0]
    assert expected["losses"][0] != expected["losses"][1]
    for own in ranks.run(job, world, make, strategy, {}):
        assert_same(own, expected, 1e-9)


@pytest.fixture(scope="module")
def values(ranks):
    return ranks.run(job, 1, Values, {}, {})[0]


@pytest.mark.parametrize(("world", "strategy"), [(1, {}), (2, PP)], ids=["one", "PP2"])
def test_a_scalar_head_shares_no_weights_with_the_embedding(ranks, values, world, strategy):
    """Whatever the model was made with: it is the model whose embedding and head were two weights from the first."""
    assert {"embedding.word_embeddings.weight", "output_layer.weight"} <= values["weights"].keys()
    for own in ranks.run(job, world, Values, strategy, {}, True):
        assert_same(own, values, 1e-9)


class ImportedValues(hf.Imported):
    """A Hugging Face model with a scalar head."""

    def provider(self, *args: Any, **kwargs: Any) -> Any:
        return put_scalar_head(super().provider(*args, **kwargs))

    def configure_model(self) -> None:
        super().configure_model()
        for layer in self.model.modules():
            if isinstance(layer, ScalarHead):
                layer.weight.data.copy_(runs.made_up("head", layer.weight.shape))


def values_of_transformers(root: Path) -> dict[str, Tensor]:
    """Numbers ``[T]`` of the samples, by model: one with a head of its own in the folder, one with none."""
    found = {}
    for name in ("mistral", "qwen2"):
        hf.make(name, root / name)
        model = hf.read(root / name)
        head = runs.made_up("head", (1, hf.SIZES["hidden_size"]))
        with torch.no_grad(), hf.InDouble():
            states = [model.model(input_ids=s["input_ids"][None], use_cache=False)[0][0] for s in hf.samples()]
        found[name] = torch.cat(states) @ head[0]
    return found


def imported_values(root: Path, strategy: dict[str, Any]) -> tuple[dict[str, Tensor], str]:
    """The same of imports; and what is said when the last one is to be written."""
    found = {}
    for folder in sorted(root.iterdir()):
        model = ImportedValues.from_huggingface(folder)
        run = trainer(strategy=strategy)
        found[folder.name] = run.predict(model, loader(hf.LENGTHS, len(hf.LENGTHS), "packed"))[0]
    with pytest.raises(ConfigurationError) as refused:
        model.save_huggingface(root / "written")
    return found, str(refused.value)


def test_a_value_model_starts_from_hugging_face_weights(ranks, tmp_path):
    (right,) = ranks.run(values_of_transformers, 1, tmp_path)
    for own, refused in ranks.run(imported_values, 4, tmp_path, PP | SP):
        assert "1 problem(s)" in refused and "ScalarHead" in refused
        assert own.keys() == right.keys()
        for name in right:
            torch.testing.assert_close(own[name].flatten(), right[name], rtol=1e-9, atol=1e-9)


def test_a_teacher_in_the_same_module_agrees_with_one_process(ranks):
    expected = ranks.run(job, 1, Distilled, {}, {})[0]
    for own in ranks.run(job, 4, Distilled, SP, {}):
        assert_same(own, expected, 1e-9)


def test_a_teacher_in_a_pipeline_is_refused(ranks):
    outcomes = ranks.run_all(job, 2, Distilled, PP, {})
    assert not any(ok for ok, _ in outcomes)
    assert all("pipeline_model_parallel_size=2" in text and "teacher" in text for _, text in outcomes)
