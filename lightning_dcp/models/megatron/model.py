"""A Megatron-Core GPT model, as one module that is called like any other: its stages, chunks and positions are its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dcp.errors import ConfigurationError, Problem, RegionError, raise_problems
from lightning_dcp.models.megatron import compat
from lightning_dcp.models.megatron.copying import copied
from lightning_dcp.models.megatron.cpu import on_cpu
from lightning_dcp.models.megatron.positions import position_problems
from lightning_dcp.models.megatron.randomness import first_states
from lightning_dcp.models.megatron.scope import Scope
from lightning_dcp.models.megatron.stages import chunk_problems
from lightning_dcp.models.megatron.tokens import refuse_unknown_tokens

Provider = Callable[..., nn.Module]
"""``provider(pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTModel``, as Megatron-LM's model providers."""

REFUSED_ARGUMENTS = {
    "packed_seq_params": "sample borders come from the pack of the step; outside steps give each sample as a row",
    "decoder_input": "tokens come as input_ids, and hidden states of other stages by the schedule",
    "inference_context": "attention over packs keeps no keys and values; generate without it, or with an inference engine",
    "inference_params": "attention over packs keeps no keys and values; generate without it, or with an inference engine",
}
"""Arguments of ``GPTModel.forward`` that a :class:`MegatronModel` does not take, with what to do instead."""


class MegatronModel(nn.Module):
    """This rank's part of a Megatron-Core GPT model: one chunk, or several with a virtual pipeline.

    Made in ``LightningModule.configure_model``, when the process groups are there::

        def configure_model(self):
            if self.model is None:
                self.model = MegatronModel(self.provider)

        def provider(self, pre_process, post_process, vp_stage):
            config = TransformerConfig(..., attention_dropout=0.0, **model_parallel_fields(self.trainer.strategy))
            return GPTModel(config, layer_spec(config), ..., pre_process=pre_process, post_process=post_process,
                            vp_stage=vp_stage)

    Under :class:`~lightning_dcp.DCPStrategy` it is a context-parallel region: called with whole samples, it gives what
    Megatron-Core's model gives of them on one rank: logits, or one loss a token if ``labels`` are given. These are
    Megatron-Core's labels: shifted, the target of each position (:func:`lightning_dcp.shifted_labels` makes them).

    Args:
        provider: makes the chunk that has the embedding (``pre_process``), the head (``post_process``) or neither.
        device: where the model will lie; by default the current accelerator if the process group's backend is NCCL,
            else the CPU.

    Attributes:
        chunks: this rank's chunks, in the order of the layers.
        chunk_number: of the one that a call runs.
        scope: what layers may ask about the call that they are part of.

    Raises:
        ConfigurationError: no process groups yet; a release of Megatron-Core that lacks what is needed; a config that lacks
            what ``position_embedding_type="yarn"`` needs; or Megatron-Core refuses what the provider gives it.
    """

    def __init__(self, provider: Provider, device: torch.device | None = None) -> None:
        super().__init__()
        compat.load()
        from megatron.core import parallel_state

        if not parallel_state.model_parallel_is_initialized():
            raise ConfigurationError(
                [
                    Problem(
                        "a MegatronModel",
                        "no model-parallel process groups yet (they are made when a run starts)",
                        "make it in LightningModule.configure_model, and run under Trainer(strategy=DCPStrategy(...))",
                    )
                ]
            )
        self.device_type = _device_type(device)
        size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        raise_problems(list(chunk_problems(size)))
        with on_cpu(torch.device(self.device_type)), first_states(self.device_type):
            self.chunks = nn.ModuleList(self._chunk(provider, stage, size or 1) for stage in range(size or 1))
        self.scope = Scope()
        for layer in self.modules():
            if layer is not self and hasattr(layer, "scope"):
                vars(layer)["scope"] = self.scope
        self._mark_experts()
        self.chunk_number = 0

    def _mark_experts(self) -> None:
        """Mark experts' weights as Megatron-Core marks them, also where it does not: with experts on one rank it takes them for
        dense ones, but with an expert_tensor_parallel_size of their own other ranks hold the same ones.
        """
        for name, parameter in self.named_parameters():
            if ".experts." in name:
                parameter.allreduce = False  # type: ignore[attr-defined]

    @staticmethod
    def _chunk(provider: Provider, stage: int, size: int) -> nn.Module:
        from megatron.core import parallel_state

        virtual = {"ignore_virtual": False, "vp_stage": stage} if size > 1 else {}
        try:
            with compat.provider_refusals(provider):
                return provider(
                    pre_process=parallel_state.is_pipeline_first_stage(**virtual),
                    post_process=parallel_state.is_pipeline_last_stage(**virtual),
                    vp_stage=stage if size > 1 else None,
                )
        except AttributeError as error:  # GPTModel asks its config for what position_embedding_type="yarn" needs
            if str(error.name).startswith("yarn_"):
                raise_problems(list(position_problems("yarn", error.obj)))
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> MegatronModel:
        return copied(self, memo)

    @property
    def config(self) -> Any:
        """The TransformerConfig of the chunks."""
        return self.chunk.config

    @property
    def chunk(self) -> Any:
        """The chunk that a call runs."""
        return self.chunks[self.chunk_number]

    @contextmanager
    def running(self, number: int) -> Iterator[None]:
        """Calls inside run the chunk of this number."""
        before, self.chunk_number = self.chunk_number, number
        try:
            yield
        finally:
            self.chunk_number = before

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Run the chunk under way.

        The loss at a negative label is not 0, and must be masked: ``losses[labels >= 0]``.

        Args:
            input_ids: ``[B, T]``.
            position_ids: of each token in its sample, ``[B, T]``; 0, 1, 2, ... by default.
            attention_mask: taken and not used: attention is causal, and sample borders come from the pack. Outside a
                region each row is a sequence of its own; padding behind it changes nothing before it, and padding before
                tokens is refused.
            labels: the target of each position, ``[B, T]``; any negative number where there is none.
            **options: further arguments of ``GPTModel.forward``; not those in :data:`REFUSED_ARGUMENTS`.

        Returns:
            Losses ``[B, T]`` with labels, else logits ``[B, T, vocabulary]``; on a stage before the last, the hidden
            states ``[T, B, hidden]`` for the next.

        Raises:
            RegionError: a call outside a step, in a pipeline; an argument that does not go with packs; padding before tokens
                outside a region; a position that reaches the model's ``max_sequence_length``.
            BatchError: a token id or label that the vocabulary does not have.
        """
        _refuse(options)
        chunk = self.chunk
        refuse_unknown_tokens(
            chunk.vocab_size,
            input_ids=input_ids if chunk.pre_process else None,
            labels=labels if chunk.post_process else None,
        )
        stages = self.config.pipeline_model_parallel_size
        if self.scope.current is None and stages > 1:
            raise RegionError(
                f"a MegatronModel was called outside a step under pipeline_model_parallel_size={stages}: its stages run "
                "together only in training_step, validation_step, test_step and predict_step. Call it there, or use one stage"
            )
        if self.scope.current is None and attention_mask is not None:
            _refuse_left_padding(attention_mask)
        if position_ids is None and input_ids is not None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        # Logits of the whole vocabulary; losses are computed from parts of it, also in models that would gather it.
        options.setdefault("runtime_gather_output", labels is None)
        with rotated_at(chunk, position_ids):
            return chunk(input_ids=input_ids, position_ids=position_ids, attention_mask=None, labels=labels, **options)


def _refuse(options: dict[str, Any]) -> None:
    """Refuse arguments by which a call would say itself what packs and the scope say."""
    given = [name for name in REFUSED_ARGUMENTS if options.get(name) is not None]
    if given:
        told = "; ".join(f"{name}: {REFUSED_ARGUMENTS[name]}" for name in given)
        raise RegionError(f"a MegatronModel was called with {', '.join(given)}. Leave it out. {told}")


def _refuse_left_padding(mask: Tensor) -> None:
    """Refuse a mask ``[B, T]`` with a 0 before a 1: no mask is used, so that tokens would see that padding."""
    if mask.dim() == 2 and bool((mask[:, 1:].bool() & ~mask[:, :-1].bool()).any()):
        raise RegionError(
            "a MegatronModel was called outside a step with an attention_mask that has padding before tokens, which would see "
            "it: its attention takes no mask. Pad on the right, or call it in a step, where packs hold no padding"
        )


def megatron_models(module: nn.Module) -> dict[str, MegatronModel]:
    """All Megatron-Core models of a module, by path, in order; one with several paths by its first."""
    return {name: child for name, child in module.named_modules() if isinstance(child, MegatronModel)}


@contextmanager
def rotated_at(chunk: Any, position_ids: Tensor | None) -> Iterator[None]:
    """Make a model's rotary embedding give the angles of these positions, which are checked against its longest sample.

    Megatron-Core's takes a length and gives those of positions 0, 1, 2, ...; cut, if at all, by the static CP group. With
    the angles of the tokens at hand its layers need to know nothing of packs and groups.

    Args:
        chunk: the GPTModel.
        position_ids: ``[B, T]``.

    Raises:
        RegionError: a position that reaches the model's ``max_sequence_length``.
    """
    rotary = getattr(chunk, "rotary_pos_emb", None)
    if position_ids is None or (rotary is None and chunk.position_embedding_type != "learned_absolute"):
        yield
        return
    longest = int(position_ids.max()) + 1 if position_ids.numel() else 1
    if longest > chunk.max_sequence_length:
        raise RegionError(
            f"a sample has a token at position {longest - 1}, and the Megatron-Core model max_sequence_length="
            f"{chunk.max_sequence_length}: give the model a larger one, or cut samples"
        )
    if rotary is None:
        yield
        return
    whole = type(rotary).forward

    def angles(max_seq_len: int, *args: Any, **kwargs: Any) -> Any:
        length = 1 << (longest - 1).bit_length()  # Megatron-Core keeps a table for each length that it is asked for
        made = whole(rotary, length, packed_seq=True)
        table, *rest = made if isinstance(made, tuple) else (made,)
        chosen = table[:, 0, 0][position_ids.t().to(table.device)].unsqueeze(2)  # [T, B, 1, D]
        return (chosen, *rest) if rest else chosen

    rotary.forward = angles
    try:
        yield
    finally:
        del rotary.forward


def model_parallel_fields(strategy: Any = None) -> dict[str, Any]:
    """What a TransformerConfig says of the layout, from the process groups in force.

    For configs of your own: ``TransformerConfig(num_layers=..., **model_parallel_fields(self.trainer.strategy))``. Sequence
    lengths vary from micro-batch to micro-batch, and losses are weighted by the strategy alone. In a pipeline Megatron-Core then
    wants ``moe_token_dispatcher_type="alltoall"``, which is not its default, of dense models, too.

    Args:
        strategy: the run's :class:`~lightning_dcp.DCPStrategy`, which knows whether it is ``sequence_parallel``.
    """
    from megatron.core import parallel_state

    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    fields = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": pipeline,
        "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "sequence_parallel": bool(getattr(strategy, "sequence_parallel", False)),
        "context_parallel_size": 1,
        "variable_seq_lengths": pipeline > 1,
        "calculate_per_token_loss": True,
    }
    if fields["virtual_pipeline_model_parallel_size"] is not None:
        # With two stages the next is the one before, too: sent in one batch, activations and gradients would be mixed up.
        fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return fields


def _device_type(device: torch.device | None) -> str:
    if device is not None:
        return device.type
    import torch.distributed as dist

    return "cuda" if "nccl" in str(dist.get_backend()) else "cpu"
