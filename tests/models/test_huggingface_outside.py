"""Outside steps, and after runs, a Hugging Face model is as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.models.runs import Arm, Arms, on_ranks, train
from tests.support.ranks import RankPool


class Generating(Arms):
    """Generates, and calls its model, where no step is under way."""

    def __init__(self, implementation: str, *, fails: bool = False) -> None:
        super().__init__({"llama": Arm("llama", changes={"attention": implementation})})
        self.fails, self.found = fails, {}

    @property
    def model(self) -> Any:
        return self.models["llama"]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.model.config._attn_implementation == self.found["before"]  # only inside its forward it is another
        if self.fails:
            self.model.model.layers[0].forward = _failing
        return super().training_step(batch, batch_idx)

    def on_train_start(self) -> None:
        self.found["before"] = self.model.config._attn_implementation

    def on_train_epoch_end(self) -> None:
        prompt = torch.tensor([[3, 4, 5, 6, 7]])
        was, *_ = self.eval(), torch.manual_seed(0)
        with torch.no_grad():
            written = was.model.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=True)
            whole = was.model(written, output_attentions=False)
        following = whole.logits.argmax(-1)[0, len(prompt[0]) - 1 : -1]
        self.found |= {"written": written.tolist(), "same": torch.equal(following, written[0, len(prompt[0]) :])}
        self.found["cached"] = whole.past_key_values is not None
        self.train()


def _failing(*_: Any, **__: Any) -> Any:
    raise RuntimeError("on purpose")


def generate(implementation: str, strategy: dict[str, Any] | None, fails: bool = False) -> dict[str, Any]:
    """A job: what a module found outside its steps, and what its model is afterwards."""
    module = Generating(implementation, fails=fails)
    forward = type(module.model).forward
    error = ""
    try:
        train(module, strategy=strategy)
    except RuntimeError as failure:
        error = str(failure)
    after = module.model.config._attn_implementation
    own = "forward" not in vars(module.model) and module.model.forward.__func__ is forward
    return {"found": module.found, "after": after, "own": own, "error": error}


@pytest.mark.parametrize("implementation", [pytest.param("eager", marks=pytest.mark.slow), "sdpa"])
def test_outside_steps_the_model_is_its_own(ranks: RankPool, implementation: str) -> None:
    expected = ranks.run(generate, 1, implementation, None)[0]
    for result in ranks.run(generate, 2, implementation, on_ranks(2)):
        assert result == expected
        assert result["after"] == result["found"]["before"] == implementation
        assert result["found"]["same"]
        assert result["found"]["cached"]
        assert result["own"]


def test_after_an_exception_it_is_its_own_again(ranks: RankPool) -> None:
    result = ranks.run(generate, 1, "sdpa", on_ranks(1), True)[0]
    assert "on purpose" in result["error"]
    assert result["after"] == "sdpa"
    assert result["own"]


# --- the package without transformers

PROGRAM = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformers", "peft"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
import importlib, importlib.metadata, pkgutil
named = importlib.metadata.Distribution.from_name

def from_name(name):
    if name in ("transformers", "peft"):
        raise importlib.metadata.PackageNotFoundError(name)
    return named(name)

importlib.metadata.Distribution.from_name = from_name
import lightning_dcp
for module in pkgutil.walk_packages(lightning_dcp.__path__, "lightning_dcp."):
    leaf = module.name.rpartition(".")[2]
    if ".huggingface." in module.name and leaf != "detect" or leaf == "__main__":
        continue
    importlib.import_module(module.name)
from lightning_dcp.models.discovery import find_regions
from torch import nn
parts = nn.ModuleDict({"model": lightning_dcp.Decoder(17, hidden_size=16, num_heads=2)})
print(*find_regions(parts, None, forward_overridden=False).modules, "transformers" in sys.modules)
"""


def test_the_package_works_without_transformers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["model", "False"]
