"""What differs between Megatron-Core's releases, in one place: where things are, and whether they are there.

Tests run with 0.16.1 (what Python 3.11 gets from package indexes) and 0.19.2 (Python 3.12 and later). Builds of the dev branch
work as far as they have what :data:`NEEDED` lists. Its schedulers, which differ most, are looked up in
``lightning_dcp.schedule.megatron``, since plans are made without a tensor library.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from lightning_dcp.errors import ConfigurationError, Problem, raise_problems

TESTED = ("0.16.1", "0.19.2")
"""Releases that the tests run with."""

NEEDED: dict[str, tuple[str, ...]] = {
    "megatron.core.parallel_state.initialize_model_parallel": (
        "expert_tensor_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "create_gloo_process_groups",
    ),
    "megatron.core.parallel_state.is_pipeline_first_stage": ("ignore_virtual", "vp_stage"),
    "megatron.core.parallel_state.is_pipeline_last_stage": ("ignore_virtual", "vp_stage"),
    "megatron.core.parallel_state.get_expert_data_parallel_group": (),
    "megatron.core.models.gpt.GPTModel": ("pre_process", "post_process", "vp_stage"),
    "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec": (
        "use_transformer_engine",
        "normalization",
        "vp_stage",
    ),
    "megatron.core.transformer.TransformerConfig": (
        "calculate_per_token_loss",
        "variable_seq_lengths",
        "expert_tensor_parallel_size",
        "overlap_p2p_comm",
        "batch_p2p_comm",
    ),
    "megatron.core.transformer.identity_op.IdentityOp": (),
    "megatron.core.transformer.moe.router.TopKRouter": ("config",),
    "megatron.core.transformer.utils.make_sharded_tensors_for_checkpoint": (),
    "megatron.core.pipeline_parallel.get_forward_backward_func": (),
    "megatron.core.distributed.finalize_model_grads.finalize_model_grads": ("model",),
    "megatron.core.tensor_parallel.model_parallel_cuda_manual_seed": ("seed",),
    "megatron.core.tensor_parallel.get_cuda_rng_tracker": (),
    "megatron.core.tensor_parallel.gather_from_sequence_parallel_region": (),
    "megatron.core.packed_seq_params.PackedSeqParams": ("cu_seqlens_q", "cu_seqlens_q_padded", "qkv_format"),
    "megatron.core.transformer.moe.moe_layer.BaseMoELayer": (),
    "megatron.core.transformer.moe.moe_utils.compute_routing_scores_for_aux_loss": (),
    "megatron.core.transformer.moe.moe_utils.topk_routing_with_score_function": (),
    "megatron.core.dist_checkpointing.ShardedTensor": (),
    "megatron.core.dist_checkpointing.core.CheckpointingConfig": (),
    "megatron.core.dist_checkpointing.core.save_config": (),
    "megatron.core.dist_checkpointing.dict_utils.nested_values": (),
    "megatron.core.dist_checkpointing.mapping.ShardedTensor": (),
    "megatron.core.dist_checkpointing.mapping.ShardedTensorFactory": (),
    "megatron.core.dist_checkpointing.mapping.is_main_replica": (),
    "megatron.core.dist_checkpointing.optimizer.make_sharded_optimizer_tensor": (),
    "megatron.core.dist_checkpointing.utils.replace_prefix_for_sharding": (),
    "megatron.core.dist_checkpointing.strategies.async_utils.AsyncRequest": (),
    "megatron.core.dist_checkpointing.strategies.torch.TorchDistSaveShardedStrategy": (),
    "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlanner": (),
    "megatron.core.dist_checkpointing.strategies.torch.mcore_to_pyt_state_dict": (),
    "megatron.core.dist_checkpointing.strategies.torch._replace_state_dict_keys_with_sharded_keys": (),
    "megatron.core.distributed.DistributedDataParallel": (),
    "megatron.core.distributed.DistributedDataParallelConfig": (),
    "megatron.core.optimizer.OptimizerConfig": (),
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer": (),
}
"""What this package takes from Megatron-Core, with the arguments that it gives or overrides."""

NEEDED_WITH_TE: dict[str, tuple[str, ...]] = {
    "megatron.core.extensions.transformer_engine.TEDotProductAttention": (),
}
"""What it takes besides where layers are Transformer Engine's."""

_ATTENDING = (
    "megatron.core.models.common.language_module.language_module.LanguageModule",
    "megatron.core.transformer.transformer_block.TransformerBlock",
    "megatron.core.transformer.attention.Attention",
)
"""Megatron-Core's modules that attend by themselves, from the whole model down."""

_REMEDY = (
    f"install a release that has it: megatron-core {' and '.join(TESTED)} are tested (Python 3.11 gets the former from package "
    "indexes, 3.12 and later the latter)"
)


def release() -> str:
    """The installed Megatron-Core's version; of a source tree what it says of itself."""
    return str(getattr(_imported("megatron.core"), "__version__", "of an unknown version"))


def find(name: str) -> Any:
    """Something of the installed Megatron-Core by its full name; None if this release has it not."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(_imported(module), attribute, None)
    except ImportError:
        return None


def release_problems(*, transformer_engine: bool = False) -> list[Problem]:
    """What the installed Megatron-Core lacks of what this package takes from it.

    Args:
        transformer_engine: whether layers are Transformer Engine's.
    """
    needed = NEEDED | (NEEDED_WITH_TE if transformer_engine else {})
    return [problem for name, arguments in needed.items() for problem in _symbol_problems(name, arguments)]


def _symbol_problems(name: str, arguments: tuple[str, ...]) -> Iterator[Problem]:
    symbol = find(name)
    if symbol is None:
        yield Problem(name, f"Megatron-Core {release()}, which has no such name", _REMEDY)
        return
    taken = inspect.signature(symbol).parameters if arguments else {}
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
        return
    lacking = [argument for argument in arguments if argument not in taken]
    if lacking:
        yield Problem(
            f"{name}({', '.join(f'{argument}=...' for argument in lacking)})",
            f"Megatron-Core {release()}, where it has no such argument",
            _REMEDY,
        )


@cache
def load() -> None:
    """Import what is needed of Megatron-Core, without its reports of each package that is not installed. Once a process.

    Raises:
        ConfigurationError: a release that lacks something, all of it named.
    """
    raise_problems(release_problems())
    logging.getLogger("megatron.core.models.gpt.gpt_model").addFilter(_no_advertisement)


def _imported(module: str) -> Any:
    """A module; on its first import, which other threads do not see, without warnings."""
    if module in sys.modules:
        return sys.modules[module]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


def _no_advertisement(record: logging.LogRecord) -> bool:
    """Later releases advise at each GPTModel to use HybridModel instead, which is not for regions yet."""
    return "GPTModel IS DEPRECATED" not in record.getMessage()


@contextmanager
def without_noise() -> Iterator[None]:
    """Around the making of a TransformerConfig: it warns of one of its own defaults."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="full scope is deprecated")
        yield


_REFUSALS = (AssertionError, ImportError, NotImplementedError, TypeError, ValueError)
_CALLED = re.compile(r"(\w*TransformerConfig|GPTModel)\.__init__\(\)")
"""What Python says of arguments that a class does not take, at the place of the call."""
_CHECK = (
    "check the fields of the TransformerConfig and the arguments of GPTModel that this names; sizes of parallel dimensions "
    "come from model_parallel_fields(self.trainer.strategy), layers from layer_spec, and what is shared out over ranks (heads, "
    "ffn_hidden_size, vocabulary, layers) must be a multiple of these sizes"
)


@contextmanager
def refusals(what: str, remedy: str = "change the settings that this names") -> Iterator[None]:
    """Around what Megatron-Core checks itself: its words become a problem of the configuration.

    Args:
        what: that is made of the user's settings.
        remedy: what to do.

    Raises:
        ConfigurationError: Megatron-Core refuses something.
    """
    try:
        yield
    except _REFUSALS as error:
        raise _refused(what, remedy, error) from error


@contextmanager
def provider_refusals(provider: Any) -> Iterator[None]:
    """Around a model provider of the user's own: as :func:`refusals`, and the provider's own errors stay as they are.

    Args:
        provider: for its name.

    Raises:
        ConfigurationError: Megatron-Core refuses what the provider gives it.
    """
    try:
        yield
    except _REFUSALS as error:
        if not _is_megatrons(error):
            raise
        name = getattr(provider, "__qualname__", type(provider).__qualname__)
        raise _refused(f"the model that the provider {name} makes", _CHECK, error) from error


def _refused(what: str, remedy: str, error: BaseException) -> ConfigurationError:
    told = f"Megatron-Core {release()} refuses it: {error or type(error).__name__}"
    return ConfigurationError([Problem(what, told, remedy)])


def _is_megatrons(error: BaseException) -> bool:
    """Whether an error comes out of Megatron-Core's code, or from a call that its classes do not take."""
    names = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return names[-1].startswith("megatron.") or bool(_CALLED.match(str(error)))


def config_fields() -> frozenset[str]:
    """The fields that this release's TransformerConfig has."""
    return frozenset(field.name for field in dataclasses.fields(find("megatron.core.transformer.TransformerConfig")))


def submodules_of(layer: Any) -> Any:
    """What a layer of a spec is made of; None if it says nothing. Later releases spell some as a call with keywords left."""
    own = getattr(layer, "submodules", None)
    return own if own is not None else getattr(layer, "keywords", {}).get("submodules")


def attending() -> tuple[type, ...]:
    """Classes of Megatron-Core's modules that attend by themselves, as far as they are imported: others have no instances."""
    found = []
    for name in _ATTENDING:
        module, _, attribute = name.rpartition(".")
        kind = getattr(sys.modules.get(module), attribute, None)
        found += [kind] if isinstance(kind, type) else []
    return tuple(found)
