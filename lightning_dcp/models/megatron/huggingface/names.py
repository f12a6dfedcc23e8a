"""Which tensors of a Hugging Face model a Megatron-Core weight is made of, and how.

Megatron-Core keeps queries, keys and values in one matrix, query group by query group: the group's queries, its key, its
value; and an MLP's gate above its up-projection.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_dcp.models.megatron.huggingface.families import Family

_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.linear_fc2.bias": "mlp.down_proj.bias",
}
"""With Transformer Engine the norms before linear layers are theirs."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_QKV = re.compile(r"self_attention\.linear_qkv\.(weight|bias)")
_FC1 = re.compile(r"mlp\.linear_fc1\.(weight|bias)")
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<own>\d+)\.linear_fc(?P<a>[12])\.weight|linear_fc(?P<b>[12])\.weight(?P<grouped>\d+))"
)


@dataclass(frozen=True)
class Source:
    """The tensors of one weight.

    Attributes:
        names: of the Hugging Face tensors.
        kind: ``one`` tensor as it is; ``stacked``, one below the other; ``groups``, queries, keys and values of each query
            group in turn.
    """

    names: tuple[str, ...]
    kind: Literal["one", "stacked", "groups"] = "one"

    def shapes(self, whole: Sequence[int], query_rows: int, key_rows: int) -> list[tuple[int, ...]]:
        """The tensors' shapes.

        Args:
            whole: shape of the whole weight.
            query_rows: query heads times their size.
            key_rows: query groups times the head size.
        """
        first, *rest = whole
        rows = {
            "one": [first],
            "stacked": [first // len(self.names)] * len(self.names),
            "groups": [query_rows, key_rows, key_rows],
        }[self.kind]
        return [(n, *rest) for n in rows]

    def join(self, tensors: Sequence[Tensor], head_size: int) -> Tensor:
        """The weight, or the part of it that is made of parts of the tensors (of whole query groups)."""
        if self.kind == "one":
            return tensors[0]
        if self.kind == "stacked":
            return torch.cat(list(tensors))
        groups = tensors[1].shape[0] // head_size
        by_group = [t.reshape(groups, -1, *t.shape[1:]) for t in tensors]
        return torch.cat(by_group, 1).flatten(0, 1)

    def split(self, weight: Tensor, head_size: int, groups: int) -> dict[str, Tensor]:
        """The tensors of a whole weight, by name."""
        if self.kind == "one":
            return {self.names[0]: weight}
        if self.kind == "stacked":
            return dict(zip(self.names, weight.chunk(len(self.names)), strict=True))
        by_group = weight.reshape(groups, -1, *weight.shape[1:])
        parts = by_group.split([by_group.shape[1] - 2 * head_size, head_size, head_size], 1)
        return {name: part.flatten(0, 1) for name, part in zip(self.names, parts, strict=True)}


def source_of(name: str, family: Family) -> Source | None:
    """Where a Megatron-Core weight of this (whole) name comes from; None if the family has nothing like it."""
    if name in _TOP:
        return Source((_TOP[name],))
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return None
    inside, prefix = layer[2], f"model.layers.{layer[1]}"
    if inside in _IN_LAYER:
        return Source((f"{prefix}.{_IN_LAYER[inside]}",))
    if found := _QKV.fullmatch(inside):
        return Source(tuple(f"{prefix}.self_attn.{x}_proj.{found[1]}" for x in "qkv"), "groups")
    if found := _FC1.fullmatch(inside):
        return Source(tuple(f"{prefix}.mlp.{x}_proj.{found[1]}" for x in ("gate", "up")), "stacked")
    return _of_experts(inside, prefix, family)


def _of_experts(inside: str, prefix: str, family: Family) -> Source | None:
    names = family.experts
    if names is None:
        return None
    if inside == "mlp.router.weight":
        return Source((f"{prefix}.{names.router}.weight",))
    found = _EXPERT.fullmatch(inside)
    if found is None:
        return None
    expert = f"{prefix}.{names.experts}.{found['own'] or found['grouped']}"
    if (found["a"] or found["b"]) == "1":
        return Source((f"{expert}.{names.gate}.weight", f"{expert}.{names.up}.weight"), "stacked")
    return Source((f"{expert}.{names.down}.weight",))
