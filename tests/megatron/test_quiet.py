"""A run on CPU ranks says nothing of kernels of a GPU, of names that torch has changed, or of checkpoints that never were."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

from tests.megatron import runs
from tests.support.ranks import RankPool
from tests.support.training import loader, trainer


class Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def heard(directory: str) -> list[str]:
    """What Megatron-Core warns of and logs in a step with sequence parallelism, and while a checkpoint is saved."""
    from megatron.core.tensor_parallel import layers

    layers.linear_with_grad_accumulation_and_async_allreduce.warned = False  # it says so once a process
    handler, logger = Heard(), logging.getLogger("megatron")
    logger.addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        tests_own = [kind for kind in warnings.filters if getattr(kind[3], "pattern", None) == "megatron.*"]
        for kind in tests_own:
            warnings.filters.remove(kind)  # type: ignore[attr-defined]
        warnings.filterwarnings("error", message="nothing has this message")  # so that what was said is said again
        run = trainer(strategy={"tensor_model_parallel_size": 2, "sequence_parallel": True}, gradient_clip_val=1.0)
        run.fit(runs.SmallGPT(runs.DENSE, logits=False), loader((5, 3), 2, "packed"))
        run.save_checkpoint(f"{directory}/whole.ckpt")
    logger.removeHandler(handler)
    return [str(warning.message) for warning in caught] + handler.messages


def test_a_run_with_sequence_parallelism_is_quiet(ranks: RankPool, tmp_path: Path) -> None:
    for said in ranks.run(heard, 2, str(tmp_path)):
        for words in (
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "_tensor` is deprecated",
            "incomplete / corrupted",
            "not installed",
        ):
            assert not [line for line in said if words in line]
    assert (tmp_path / "whole.ckpt" / "lightning.ckpt").is_file()
