"""Megatron-Core on CPU ranks: stand-ins for what it takes from ``torch.cuda``.

Megatron-Core is written for CUDA: it asks for the current device, makes streams and events, and names ``"cuda"`` where it
makes tensors. Each of its modules holds torch as a global name; on a run without a GPU that name is given a torch whose
``cuda`` is the CPU. torch itself, and every other package's view of it, stays as it is.
"""

from __future__ import annotations

import importlib
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_PACKAGE = "megatron.core"
_LOADED_FIRST = (
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.transformer.moe.experts",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.distributed.finalize_model_grads",
    "megatron.core.tensor_parallel.random",
)
"""Modules that import others when they are used; loaded before the stand-ins are given out."""

_FACTORIES = (
    *("tensor", "as_tensor", "empty", "zeros", "ones", "full", "arange", "linspace", "rand", "randn", "randint"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "empty_strided", "eye"),
)
_SWITCHED = "_lightning_dcp_on_cpu"
_RENAMED = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}
_NEWER = {old: getattr(dist, new) for old, new in _RENAMED.items() if hasattr(dist, new)}
"""Collectives that Megatron-Core calls by names of which later releases of torch warn."""


class _Nothing:
    """A stream or an event: whatever is asked of it has been done already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: _Nothing()


class _Cuda:
    """``torch.cuda`` of a machine whose only device is the CPU; the rest is torch's own."""

    Stream = Event = _Nothing
    FloatTensor, HalfTensor, BFloat16Tensor = torch.FloatTensor, torch.HalfTensor, torch.BFloat16Tensor
    default_generators = (torch.default_generator,)
    nvtx = _Nothing()

    def __init__(self) -> None:
        self.random = self

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    @staticmethod
    def current_device() -> torch.device:
        return torch.device("cpu")

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    @staticmethod
    def manual_seed(seed: int) -> None:
        torch.manual_seed(seed)

    @staticmethod
    def stream(stream: Any) -> Any:
        return nullcontext()

    @staticmethod
    def current_stream(device: Any = None) -> _Nothing:
        return _Nothing()

    default_stream = current_stream

    @staticmethod
    def synchronize(device: Any = None) -> None:
        return None

    set_device = empty_cache = synchronize


def _on_cpu(device: Any) -> Any:
    return "cpu" if device is not None and torch.device(device).type == "cuda" else device


def _moved(arguments: Mapping[str, Any]) -> dict[str, Any]:
    moved = dict(arguments)
    if "device" in moved:
        moved["device"] = _on_cpu(moved["device"])
    if moved.get("pin_memory"):
        moved["pin_memory"] = False
    return moved


def _factory(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def made(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **_moved(kwargs))

    return made


class _Torch(types.ModuleType):
    """torch as Megatron-Core sees it on a CPU rank."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _Cuda()
        for name in _FACTORIES:
            setattr(self, name, _factory(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_TORCH = _Torch()


def use_cpu() -> None:
    """Give Megatron-Core's modules the stand-ins, for the life of this process. Does nothing the second time.

    Functions that it wraps in ``torch.compile`` are unwrapped: compiling small functions for the CPU takes longer than
    they ever run.
    """
    for name in _LOADED_FIRST:
        importlib.import_module(name)
    for name, module in list(sys.modules.items()):
        if name.startswith(_PACKAGE) and module is not None and not hasattr(module, _SWITCHED):
            _switch(module)
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_no_rng_warning)
    _silence()


@cache
def _silence() -> None:
    """Megatron-Core advises how to order kernels of a GPU, by an environment variable."""
    advice = r"When using (sequence parallelism|async grad allreduce) it is recommended to set the environment variable CUDA_"
    warnings.filterwarnings("ignore", message=advice, module=r"megatron\.core\.tensor_parallel\.layers")


def _switch(module: types.ModuleType) -> None:
    setattr(module, _SWITCHED, True)
    names = vars(module)
    if names.get("torch") is torch:
        module.torch = _TORCH  # type: ignore[attr-defined]
    for name, value in list(names.items()):
        original = getattr(value, "_torchdynamo_orig_callable", None)
        if original is not None:
            setattr(module, name, original)
        elif value is dist.all_gather_into_tensor or value is dist.reduce_scatter_tensor:
            setattr(module, name, _NEWER.get(value.__name__, value))
        elif isinstance(value, type) and value.__module__ == module.__name__:
            _uncompile_methods(value)
    vars(module).update(_STAND_INS.get(module.__name__, {}))
    for name, wrapper in _WRAPPERS.get(module.__name__, {}).items():
        setattr(module, name, wrapper(names[name]))
    if "maybe_move_tensor_to_cpu" in names:
        module.maybe_move_tensor_to_cpu = _to_host  # type: ignore[attr-defined]


def _uncompile_methods(kind: type) -> None:
    for name, value in list(vars(kind).items()):
        original = getattr(value, "_torchdynamo_orig_callable", None)
        if original is not None:
            setattr(kind, name, original)


def _no_rng_warning(record: logging.LogRecord) -> bool:
    """The device's generator is the CPU's here, so that its tracker always finds the CPU's changed."""
    return "CPU RNG state changed" not in record.getMessage()


def _get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Split sizes are wanted as an array, which Megatron-Core makes of tensors on a GPU only."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


_STAND_INS: dict[str, dict[str, Any]] = {
    "megatron.core.tensor_parallel.random": {"_get_cuda_rng_state": _get_state, "_set_cuda_rng_state": _set_state},
    "megatron.core.transformer.moe.moe_utils": {"te_general_gemm": None},
}
"""Functions of Megatron-Core's that reach below ``torch.cuda``, by module."""


def _unequal_gather(gather: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Gloo's ``all_gather`` takes equal parts only; its ``all_to_all`` takes any."""

    @wraps(gather)
    def gathered(input_: torch.Tensor, group: Any, output_split_sizes: Any = None, *rest: Any) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, *rest)
        out = input_.new_empty((sum(output_split_sizes), *input_.shape[1:]))
        copies = torch.cat([input_] * group.size())
        sent = [len(input_)] * group.size()
        dist.all_to_all_single(out, copies, list(output_split_sizes), sent, group=group)
        return out

    return gathered


def _unequal_reduce_scatter(scatter: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(scatter)
    def scattered(input_: torch.Tensor, group: Any, input_split_sizes: Any = None, *rest: Any) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return scatter(input_, group, input_split_sizes, *rest)
        own = input_split_sizes[group.rank()]
        parts = input_.new_empty((group.size(), own, *input_.shape[1:]))
        sent = list(input_split_sizes)
        dist.all_to_all_single(parts.flatten(0, 1), input_.contiguous(), [own] * group.size(), sent, group=group)
        return parts.sum(0)

    return scattered


_WRAPPERS: dict[str, dict[str, Callable[..., Any]]] = {
    "megatron.core.tensor_parallel.mappings": {
        "_gather_along_first_dim": _unequal_gather,
        "_reduce_scatter_along_first_dim": _unequal_reduce_scatter,
    },
}
"""Functions of Megatron-Core's that gloo cannot carry out for all arguments, by module, and what they are wrapped in."""


class _CudaMethods(TorchFunctionMode):
    """``tensor.cuda()`` and ``tensor.to("cuda")`` leave tensors where they are; ``tensor.type()`` names them as a GPU's."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = [args[0], *(_on_cpu(a) if isinstance(a, str | torch.device) else a for a in args[1:])]
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:  # the name of a kind, compared with a GPU's
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **_moved(kwargs or {}))


@contextmanager
def on_cpu(device: torch.device) -> Iterator[None]:
    """Around Megatron-Core code that moves tensors to ``"cuda"`` by their methods; does nothing on other devices."""
    if device.type != "cpu":
        yield
        return
    use_cpu()
    with _CudaMethods():
        yield
