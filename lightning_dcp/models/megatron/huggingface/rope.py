"""Llama 3's rotary frequencies, which depend on the length that a model was first trained with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_dcp.errors import Problem

SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""The numbers of Llama 3's scaling."""


def llama3_frequencies(frequencies: Tensor, scaling: Mapping[str, float]) -> Tensor:
    """Slow down the slow ones: those that turn fewer than ``low_freq_factor`` times in the original length by ``factor``,
    those that turn more than ``high_freq_factor`` times not at all, those between by what lies between.

    The formula is that of Llama 3.1 (``rope_type: llama3`` in transformers' ``modeling_rope_utils``); Megatron-Core's own
    fixes all numbers but the factor.

    Args:
        frequencies: radians per token, ``[D / 2]``.
        scaling: ``factor``, ``low_freq_factor``, ``high_freq_factor`` and ``original_max_position_embeddings`` (tokens).
    """
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    length = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequencies
    scaled = torch.where(wavelength > length / low, frequencies / factor, frequencies)
    share = (length / wavelength - low) / (high - low)
    between = (1 - share) * scaled / factor + share * scaled
    medium = ~(wavelength < length / high) & ~(wavelength > length / low)
    return torch.where(medium, between, scaled)


def scale_rotary(chunk: Any, scaling: Mapping[str, float]) -> None:
    """Give a ``GPTModel``, made without ``rope_scaling``, Llama 3's frequencies."""
    chunk.rotary_pos_emb.inv_freq = llama3_frequencies(chunk.rotary_pos_emb.inv_freq, scaling)


def scaling_problems(scaling: Mapping[str, float], position_embedding_type: str) -> Iterator[Problem]:
    """What is wrong with these numbers, or with the positions that they are for."""
    absent = [name for name in SCALING if name not in scaling]
    if absent:
        yield Problem("rope_scaling", f"no {', '.join(absent)}", f"give {', '.join(SCALING)}")
    if position_embedding_type != "rope":
        found = f"position_embedding_type={position_embedding_type!r}, which has no such frequencies"
        yield Problem("rope_scaling", found, "leave it out, or use position_embedding_type='rope'")
