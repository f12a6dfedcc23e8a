"""What is wrong with the settings of a ready GPT model: its fields, its backend, its positions; all of it at once."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator

import torch

from lightning_dcp.errors import Problem
from lightning_dcp.models.megatron import compat
from lightning_dcp.models.megatron.positions import length_problems, position_problems, rotary_problems
from lightning_dcp.models.megatron.problems import Fields, config_problems, is_count
from lightning_dcp.models.megatron.spec import has_transformer_engine
from lightning_dcp.parallel.topology import Topology

_BY_TRAINER = ("bf16", "fp16", "enable_autocast", "autocast_dtype")
"""Fields that say the precision to code of Megatron-LM that runs do not go through."""
_BACKENDS = ("auto", "local", "transformer_engine")


def gpt_problems(
    given: Fields,
    *,
    settled: Fields,
    defaults: Fields,
    topology: Topology,
    backend: str,
    on_gpu: bool,
    vocab_size: int,
    positions: str = "rope",
    longest: int | None = None,
    rotary_percent: float = 1.0,
) -> list[Problem]:
    """What is wrong with the settings of a :class:`~lightning_dcp.MegatronGPT`.

    Args:
        given: fields of the TransformerConfig from the user.
        settled: those that strategy, trainer and device say.
        defaults: those where nobody says anything.
        topology: the sizes in force.
        backend: what the layers are made of.
        on_gpu: whether the model will lie on a GPU.
        vocab_size: rows of the embedding.
        positions: how the model is told where tokens lie.
        longest: the ``max_sequence_length`` that was asked for; None where nothing is said.
        rotary_percent: share of each head that rotary embeddings turn.
    """
    fields = {**defaults, **given, **settled}
    te = backend == "transformer_engine" or (backend == "auto" and on_gpu and has_transformer_engine())
    return [
        *given_problems(given, settled, compat.config_fields()),
        *backend_problems(backend, on_gpu=on_gpu),
        *position_problems(positions),
        *length_problems(positions, longest),
        *_rotary_problems(fields, positions, rotary_percent),
        *_grouped_problems(fields, te),
        *config_problems(fields, topology, transformer_engine=te, vocab_size=vocab_size),
    ]


def given_problems(given: Fields, settled: Fields, known: Collection[str]) -> Iterator[Problem]:
    """What is wrong with fields that a user gives to :class:`~lightning_dcp.MegatronGPT`.

    Args:
        given: the user's.
        settled: what strategy, trainer and device say.
        known: the fields that this release's TransformerConfig has.
    """
    for name, value in given.items():
        if name in _BY_TRAINER and value not in (None, False):
            remedy = f"leave {name} out of config, and use Trainer(precision=...)"
            yield Problem(f"{name}={value!r} in config", "a precision that the trainer decides, not the config", remedy)
        elif name not in known:
            near = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {near[0]}?" if near else "leave it out, or give an argument of MegatronGPT"
            yield Problem(f"{name}={value!r} in config", f"no field of Megatron-Core {compat.release()}", remedy)
        elif name in settled and value != settled[name]:
            found = f"{settled[name]!r} by DCPStrategy and Trainer(precision=...)"
            yield Problem(f"{name}={value!r} in config", found, f"leave {name} out of config, and say it there")
    function = given.get("activation_func")
    if isinstance(function, str) and not callable(getattr(torch.nn.functional, function, None)):
        remedy = "name one, such as silu, gelu or relu"
        yield Problem(f"activation_func={function!r} in config", "no function of torch.nn.functional", remedy)


def _rotary_problems(fields: Fields, positions: str, percent: float) -> Iterator[Problem]:
    """Heads that rotary embeddings do not fit, where their size can be said."""
    hidden, heads, own = (fields.get(name) for name in ("hidden_size", "num_attention_heads", "kv_channels"))
    if positions != "rope":
        return
    if is_count(own):
        yield from rotary_problems(f"kv_channels={own}", own, percent)
    elif own is None and is_count(hidden) and is_count(heads) and hidden % heads == 0:
        yield from rotary_problems(f"hidden_size={hidden} with {heads} attention heads", hidden // heads, percent)


def _grouped_problems(fields: Fields, transformer_engine: bool) -> Iterator[Problem]:
    if fields.get("num_moe_experts") and fields.get("moe_grouped_gemm") is True and not transformer_engine:
        found = "layers without Transformer Engine, whose grouped experts are one parameter that no single one can be saved from"
        remedy = "use moe_grouped_gemm=False, or backend='transformer_engine' on a GPU"
        yield Problem("moe_grouped_gemm=True", found, remedy)


def backend_problems(backend: str, *, on_gpu: bool) -> Iterator[Problem]:
    """What stands against layers of this backend.

    Args:
        backend: ``auto``, ``local`` or ``transformer_engine``.
        on_gpu: whether the model will lie on a GPU.
    """
    if backend not in _BACKENDS:
        yield Problem(f"backend={backend!r}", "an unknown value", f"use one of {list(_BACKENDS)}")
    elif backend == "transformer_engine" and not has_transformer_engine():
        remedy = "pip install 'lightning-dcp[gpu]' on a machine with CUDA, or use backend='local'"
        yield Problem("backend='transformer_engine'", "Transformer Engine is not installed", remedy)
    elif backend == "transformer_engine" and not on_gpu:
        yield Problem(
            "backend='transformer_engine'", "a run on CPUs, which it has no kernels for", "use backend='local'"
        )
    elif backend == "transformer_engine":
        yield from compat.release_problems(transformer_engine=True)
