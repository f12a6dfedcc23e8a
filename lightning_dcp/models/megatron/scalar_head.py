"""A head of one number a token in place of the vocabulary's: value models and reward models."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class ScalarHead(nn.Linear):
    """Called as the output layer of a GPT model; the same weights on all tensor-parallel ranks.

    Args:
        config: the model's TransformerConfig.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
        self.sequence_parallel = config.sequence_parallel
        config.output_layer_init_method(self.weight)
        # Each tensor-parallel rank sees a part of the tokens: finalize_model_grads adds up what it finds marked so.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(  # type: ignore[override]
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Hidden states ``[T, B, hidden]`` to numbers ``[T, B, 1]``, those of all tokens under sequence parallelism."""
        values = super().forward(input_)
        if self.sequence_parallel:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            # Every rank computes the same loss of the gathered numbers, so that each keeps its own part of the gradient.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def put_scalar_head(model: Any) -> Any:
    """Give a GPT model a :class:`ScalarHead`; for providers: ``return put_scalar_head(GPTModel(...))``.

    The embedding shares its weights with the head no longer, where it did: to be called for every chunk, those before the
    last stage too.

    Args:
        model: a GPTModel, or a chunk of one.

    Returns:
        The same model; called without labels it gives ``[B, T, 1]``.
    """
    _untie(model)
    if model.post_process:
        model.output_layer = ScalarHead(model.config)
    return model


def _untie(model: Any) -> None:
    """Undo what ``setup_embeddings_and_output_layer`` did for a head of the embedding's weights.

    Else ``finalize_model_grads`` would add the head's gradient to the embedding's, over the first and the last stage.
    """
    model.share_embeddings_and_output_weights = False
    for parameter in model.parameters():
        for mark in ("shared_embedding", "zero_out_wgrad"):
            if hasattr(parameter, mark):
                delattr(parameter, mark)
