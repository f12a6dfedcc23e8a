"""The README's module with a model of the user's own, run as it stands there, smaller."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch

from lightning_dcp import MegatronModel
from tests.support.training import loader, trainer

README = Path(__file__).parents[2] / "README.md"
SMALLER = {
    "hidden_size=1024": "hidden_size=32",
    "num_layers=8": "num_layers=2",
    "num_attention_heads=16": "num_attention_heads=4",
}


def written() -> type[L.LightningModule]:
    blocks = README.read_text().split("```python\n")[1:]
    code = next(block.split("```")[0] for block in blocks if "class Mine(" in block)
    for large, small in SMALLER.items():
        assert large in code
        code = code.replace(large, small)
    names: dict[str, Any] = {"L": L, "torch": torch}
    exec(code, names)
    return names["Mine"]


def job(strategy: dict[str, Any]) -> tuple[float, float, torch.Tensor, torch.Tensor]:
    class Trained(written()):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []

        def on_train_start(self) -> None:
            layer = self.model.chunks[0].decoder.layers[0]
            self.split = layer.self_attention.linear_qkv.weight.detach().clone()
            self.other = (
                MegatronModel(self.provider).chunks[0].decoder.layers[0].self_attention.linear_qkv.weight.detach()
            )

        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            self.losses.append(float(outputs["loss"]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(int(os.environ["RANK"]))  # as without seed_everything
    module = Trained()
    run = trainer(strategy=strategy, precision="bf16-true", max_epochs=3)
    run.fit(module, loader((9, 5, 7, 3), 4, "packed"))
    return module.losses[0], module.losses[-1], module.split, module.other


def test_the_module_in_the_readme_trains(ranks):
    found = ranks.run(job, 4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2})
    for first, last, split, other in found:
        assert last < first
        assert not torch.equal(split, other), "another model begins with other weights"
    parts = [split for _, _, split, _ in found]
    assert all(not torch.equal(a, b) for i, a in enumerate(parts) for b in parts[:i]), "parts and stages are not copies"
