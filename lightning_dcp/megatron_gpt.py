"""A ready LightningModule of a Megatron-Core GPT model, its TransformerConfig straight from YAML."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_dcp.batch.labels import Batch, shifted_labels
from lightning_dcp.errors import raise_problems
from lightning_dcp.lm import LanguageModel
from lightning_dcp.models.megatron import MegatronModel, compat, layer_spec, model_parallel_fields
from lightning_dcp.models.megatron.problems import gpt_problems
from lightning_dcp.models.megatron.spec import Backend

_DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}

DEFAULTS: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": "silu",
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "gradient_accumulation_fusion": False,
    "moe_token_dispatcher_type": "alltoall",
}
"""Fields that differ from TransformerConfig's defaults, where nothing else is asked for: a model of Llama's kind."""


class MegatronGPT(LanguageModel):
    """Next-token training of a Megatron-Core GPT model.

    Args:
        config: fields of Megatron-Core's ``TransformerConfig`` (``num_layers``, ``hidden_size``, ``num_attention_heads``,
            ``num_query_groups``, ``ffn_hidden_size``, ``num_moe_experts``, ``recompute_granularity``, ...). Sizes of parallel
            dimensions come from the strategy, ``params_dtype`` from the trainer's precision. ``activation_func`` is the name
            of a function in ``torch.nn.functional``. Where nothing is said the model is of Llama's kind: RMSNorm, SwiGLU, no
            biases, no dropout.
        vocab_size: entries of the vocabulary; ``tensor_model_parallel_size`` divides it.
        max_sequence_length: the longest sample, for learned positions; rotary ones do not look at it.
        position_embedding_type: ``rope``, ``yarn``, ``learned_absolute`` or ``none``.
        rotary_base: base of the rotary frequencies.
        rotary_percent: share of each head that is rotated.
        share_embeddings_and_output_weights: use the embedding as the head.
        backend: what the layers are made of: ``transformer_engine``, Megatron-Core's own (``local``), or ``auto``: the former
            on a GPU where it is installed.
        learning_rate: peak learning rate.
        weight_decay: AdamW's, on all parameters.
        warmup_steps: optimizer steps over which the rate rises from 0.
    """

    def __init__(
        self,
        config: dict[str, Any],
        vocab_size: int = 258,
        max_sequence_length: int = 1 << 20,
        position_embedding_type: Literal["rope", "yarn", "learned_absolute", "none"] = "rope",
        rotary_base: int = 10_000,
        rotary_percent: float = 1.0,
        share_embeddings_and_output_weights: bool = False,
        backend: Backend = "auto",
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 10,
    ) -> None:
        super().__init__(nn.Identity(), learning_rate, weight_decay, warmup_steps)
        self.config, self.backend = dict(config), backend
        self.gpt_options: dict[str, Any] = {
            "vocab_size": vocab_size,
            "max_sequence_length": max_sequence_length,
            "position_embedding_type": position_embedding_type,
            "rotary_base": rotary_base,
            "rotary_percent": rotary_percent,
            "share_embeddings_and_output_weights": share_embeddings_and_output_weights,
        }

    def configure_model(self) -> None:
        """Make this rank's part of the model.

        Raises:
            ConfigurationError: all problems of the config at once, before anything is made.
        """
        if isinstance(self.model, MegatronModel):
            return
        topology = getattr(self.trainer.strategy, "topology", None)
        if topology is not None:  # of another strategy, which MegatronModel refuses, nothing can be said
            compat.load()
            raise_problems(
                gpt_problems(
                    self.config,
                    settled=self._settled(),
                    defaults=DEFAULTS,
                    topology=topology,
                    backend=self.backend,
                    on_gpu=self._on_gpu,
                    vocab_size=self.gpt_options["vocab_size"],
                )
            )
        self.model = MegatronModel(self.provider)

    def provider(self, pre_process: bool, post_process: bool, vp_stage: int | None) -> nn.Module:
        """One chunk of the model."""
        from megatron.core.models.gpt import GPTModel

        config = self.transformer_config()
        return GPTModel(
            config,
            layer_spec(config, self.backend, on_gpu=self._on_gpu, vp_stage=vp_stage),
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            **self.gpt_options,
        )

    def transformer_config(self) -> Any:
        """The TransformerConfig: what was given, the strategy's layout, the trainer's precision.

        Raises:
            ConfigurationError: Megatron-Core refuses it.
        """
        from megatron.core.transformer import TransformerConfig

        fields = DEFAULTS | self.config | self._settled()
        fields["activation_func"] = getattr(nn.functional, fields["activation_func"])
        with compat.without_noise(), compat.refusals("config"):
            return TransformerConfig(**fields)

    def _settled(self) -> dict[str, Any]:
        """Fields that are not the user's to give."""
        dtype = _DTYPES.get(str(self.trainer.precision), torch.float32)
        layout = model_parallel_fields(self.trainer.strategy)
        return layout | {
            "params_dtype": dtype,
            "pipeline_dtype": dtype,
            "use_cpu_initialization": not self._on_gpu,
        }

    @property
    def _on_gpu(self) -> bool:
        return self.trainer.strategy.root_device.type == "cuda"

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The mean loss over the batch's targets."""
        loss, _ = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def _evaluate(self, batch: Batch, name: str) -> None:
        loss, targets = self._loss(batch)
        self.log(name, loss, prog_bar=True, batch_size=targets)

    def _loss(self, batch: Batch) -> tuple[Tensor, int]:
        """The mean loss over targets, and their number."""
        labels = shifted_labels(batch)
        losses = self.model(input_ids=batch["input_ids"], labels=labels)
        flat, wanted = (t.values() if t.is_nested else t for t in (losses, labels))
        mask = wanted != -100
        count = mask.sum()
        return (flat * mask).sum() / count.clamp(min=1), int(count)
