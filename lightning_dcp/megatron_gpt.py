"""A ready LightningModule of a Megatron-Core GPT model, its TransformerConfig straight from YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from lightning_dcp.batch.labels import Batch, shifted_labels
from lightning_dcp.errors import CheckpointError, ConfigurationError, Problem, raise_problems
from lightning_dcp.lm import LanguageModel
from lightning_dcp.models.megatron import MegatronModel, compat, layer_spec, model_parallel_fields
from lightning_dcp.models.megatron.gpt_problems import gpt_problems
from lightning_dcp.models.megatron.huggingface import describe, load_huggingface, read_config, save_huggingface
from lightning_dcp.models.megatron.huggingface.rope import scale_rotary, scaling_problems
from lightning_dcp.models.megatron.moe_auxiliary import auxiliary_losses, auxiliary_names
from lightning_dcp.models.megatron.output_bias import with_output_bias
from lightning_dcp.models.megatron.processes import KEEP
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

GPT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 258,
    "max_sequence_length": 1 << 20,
    "rotary_base": 10_000,
    "share_embeddings_and_output_weights": False,
}
"""Arguments of GPTModel where nothing is asked for."""

_NO_CONFIG = Problem(
    "MegatronGPT()", "neither a config nor a Hugging Face folder", "give config={...} or huggingface=path"
)

_NOT_MADE = Problem(
    "save_huggingface",
    "no model in this process: a run makes it, and with start_method='fork' or 'spawn' it ends with the run",
    "call it on every rank in a hook such as on_train_end, or after a run whose ranks go on",
)


class MegatronGPT(LanguageModel):
    """Next-token training of a Megatron-Core GPT model.

    Logs ``train_loss``, and of mixtures of experts the auxiliary losses that the config asks for: ``load_balancing_loss``,
    ``seq_load_balancing_loss``, ``z_loss``.

    Args:
        config: fields of Megatron-Core's ``TransformerConfig`` (``num_layers``, ``hidden_size``, ``num_attention_heads``,
            ``num_query_groups``, ``ffn_hidden_size``, ``num_moe_experts``, ``recompute_granularity``, ...). Sizes of parallel
            dimensions come from the strategy, ``params_dtype`` from the trainer's precision. ``activation_func`` is the name
            of a function in ``torch.nn.functional``. Where nothing is said the model is of Llama's kind: RMSNorm, SwiGLU, no
            biases, no dropout. With ``huggingface`` only the fields that are to be other than the folder's.
        vocab_size: entries of the vocabulary; ``tensor_model_parallel_size`` divides it. 258 by default.
        max_sequence_length: tokens of the longest sample; longer ones are refused when they come. Learned positions, a table
            with so many rows, need it; of others it is 2^20 where nothing is said.
        position_embedding_type: ``rope``, ``learned_absolute`` or ``none``.
        rotary_base: base of the rotary frequencies; 10,000 by default.
        rotary_percent: share of each head that is rotated.
        rope_scaling: Llama 3's slower rotary frequencies: ``factor``, ``low_freq_factor``, ``high_freq_factor`` and
            ``original_max_position_embeddings``; for ``rope``.
        share_embeddings_and_output_weights: use the embedding as the head.
        attention_output_bias: give attention's output projections biases where ``add_bias_linear`` is False.
        huggingface: a folder with ``config.json`` and safetensors of a Llama, Mistral, Mixtral, Qwen2, Qwen3 or Qwen3-MoE
            model: the model is made by it and starts from its weights. Auxiliary losses and dropout of experts are not
            taken over: set them in ``config``.
        backend: what the layers are made of: ``transformer_engine``, Megatron-Core's own (``local``), or ``auto``: the former
            on a GPU where it is installed.
        learning_rate: peak learning rate.
        weight_decay: AdamW's, on all parameters.
        warmup_steps: optimizer steps over which the rate rises from 0.
    """

    def __init__(
        self,
        config: dict[str, Any] | None = None,
        vocab_size: int | None = None,
        max_sequence_length: int | None = None,
        position_embedding_type: Literal["rope", "learned_absolute", "none"] = "rope",
        rotary_base: int | None = None,
        rotary_percent: float = 1.0,
        share_embeddings_and_output_weights: bool | None = None,
        backend: Backend = "auto",
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 10,
        huggingface: str | Path | None = None,
        rope_scaling: dict[str, float] | None = None,
        attention_output_bias: bool = False,
    ) -> None:
        super().__init__(nn.Identity(), learning_rate, weight_decay, warmup_steps)
        if config is None and huggingface is None:
            raise ConfigurationError([_NO_CONFIG])
        self.huggingface = huggingface
        self.imported = None if huggingface is None else read_config(huggingface)
        self.config, self.backend = dict(config or {}), backend
        self.rope_scaling, self.attention_output_bias = rope_scaling, attention_output_bias
        given = {
            "vocab_size": vocab_size,
            "max_sequence_length": max_sequence_length,
            "rotary_base": rotary_base,
            "share_embeddings_and_output_weights": share_embeddings_and_output_weights,
        }
        self.gpt_options: dict[str, Any] = GPT_DEFAULTS | {
            "position_embedding_type": position_embedding_type,
            "rotary_percent": rotary_percent,
        }
        if self.imported is not None:
            self.config = self.imported.fields | self.imported.training | self.config
            self.gpt_options |= self.imported.options
            self.rope_scaling = rope_scaling or self.imported.rope_scaling
            self.attention_output_bias = attention_output_bias or self.imported.output_bias
        self.gpt_options |= {name: value for name, value in given.items() if value is not None}
        length_said = max_sequence_length is not None or self.imported is not None
        self.max_sequence_length = self.gpt_options["max_sequence_length"] if length_said else None
        if self.rope_scaling is not None:
            raise_problems(list(scaling_problems(self.rope_scaling, self.gpt_options["position_embedding_type"])))

    @classmethod
    def from_huggingface(cls, path: str | Path, **options: Any) -> MegatronGPT:
        """A model that is made by a Hugging Face folder, and starts from its weights when a run starts.

        Args:
            path: the folder; see ``huggingface``.
            **options: other arguments; fields in ``config`` go before those of the folder.

        Raises:
            ConfigurationError: no such folder, or all in its config that the model would compute otherwise.
        """
        return cls(huggingface=path, **options)

    def save_huggingface(
        self, path: str | Path, *, dtype: torch.dtype | None = None, max_shard_bytes: int = 5 * 10**9
    ) -> None:
        """Write the model to a folder that transformers loads; every rank calls it, in a hook or after the run.

        A model that came from such a folder keeps what its config says of other things, its tokenizer and its generation
        config.

        Args:
            path: the folder, which all ranks see; made if need be.
            dtype: of the tensors in it; by default the model's own.
            max_shard_bytes: largest size of a file, in bytes.

        Raises:
            ConfigurationError: what the model computes has no place in any of the families; or there are weights already;
                or no run has made the model.
        """
        if not isinstance(self.model, MegatronModel):
            raise ConfigurationError([_NOT_MADE])
        said = self.imported
        family = None if said is None else said.family
        content = describe(self.model, rope_scaling=self.rope_scaling, family=family)
        if said is not None:
            kept = {name: value for name, value in said.raw.items() if name not in ("dtype", "transformers_version")}
            content = kept | content
        save_huggingface(
            self.model,
            path,
            config=content,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
            companions=self.huggingface,
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """See that there is a model to be saved.

        Raises:
            CheckpointError: none in this process.
        """
        if not isinstance(self.model, MegatronModel):
            raise CheckpointError(
                "asked: a checkpoint of a MegatronGPT; found: no model in this process: a run makes it, and with "
                f"start_method='fork' or 'spawn' it ends with the run; do: {KEEP}"
            )

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> NoReturn:
        """Not for this module: its weights are shards, and it has none of its own before a run starts.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(
            f"asked: {cls.__name__}.load_from_checkpoint({str(checkpoint_path)!r}); found: shards, which the ranks of a "
            "run read together; do: make the module and give trainer.fit, validate, test or predict the directory as ckpt_path, "
            "with DCPStrategy, on any layout, one process included; save_huggingface then writes weights that need no run"
        )

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
                    positions=self.gpt_options["position_embedding_type"],
                    longest=self.max_sequence_length,
                    rotary_percent=self.gpt_options["rotary_percent"],
                )
            )
        self.model = MegatronModel(self.provider)
        if self.huggingface is not None:
            load_huggingface(self.model, self.huggingface)

    def provider(self, pre_process: bool, post_process: bool, vp_stage: int | None) -> nn.Module:
        """One chunk of the model.

        Raises:
            ConfigurationError: Megatron-Core refuses it.
        """
        from megatron.core.models.gpt import GPTModel

        config = self.transformer_config()
        with compat.refusals("a model of this config"):
            spec = layer_spec(config, self.backend, on_gpu=self._on_gpu, vp_stage=vp_stage)
            chunk = GPTModel(
                config,
                with_output_bias(spec) if self.attention_output_bias else spec,
                pre_process=pre_process,
                post_process=post_process,
                vp_stage=vp_stage,
                **self.gpt_options,
            )
        if self.rope_scaling is not None:
            scale_rotary(chunk, self.rope_scaling)
        return chunk

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

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the auxiliary losses of mixtures of experts, means over layers without coefficients."""
        if isinstance(self.model, MegatronModel) and auxiliary_names(self.model.config):
            self.log_dict(auxiliary_losses(self.model))

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
