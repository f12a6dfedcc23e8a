"""Calling a module for a look at it, and leaving no trace."""

from __future__ import annotations

import random
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dcp.parallel.randomness import seeded

SMALL = 2**20
"""Bytes up to which tensors that are no parameters are copied beforehand; larger ones when something writes to them."""

_OWN_TABLES = ("_parameters", "_buffers", "_modules")
"""Attributes in which torch keeps a layer's parts."""
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)


@contextmanager
def undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Call a module inside; afterwards it, its tensors and all random streams are as before.

    Kept are: parameters, buffers and other tensors of the module, attributes of it and its layers (with the content of
    lists, tuples, dicts and sets in them, generators included; not what objects of other classes hold), the random
    streams of torch, numpy and Python, and the autocast cache. Inside, nothing is
    recorded for a backward, no warning is shown, compiled parts run as they were written, and hooks are not called but
    those of ``torch.nn`` itself: these make weights (weight norm, pruning), while a user's hook looks at activations and
    would take the made-up ones for real.
    """
    python, numpy = random.getstate(), np.random.get_state()
    with (
        warnings.catch_warnings(),
        torch.no_grad(),
        seeded(0, device),
        torch.compiler.set_stance("force_eager"),
        _tensors_kept(module),
        _attributes_kept(module),
        _without_users_hooks(module),
    ):
        warnings.simplefilter("ignore")
        random.seed(0)
        np.random.seed(0)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            torch.clear_autocast_cache()  # casts made without a graph would be used again in training


@contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    layers = list(module.modules())
    before = [(layer, layer.training, dict(vars(layer))) for layer in layers]
    held = list(_held(value for _, _, names in before for value in names.values()))
    contents = [(value, value.copy()) for value in held if type(value) in _CONTAINERS]
    contents += [(hooks, hooks.copy()) for hooks in _global_hooks()]
    streams = [(value, value.get_state()) for value in held if isinstance(value, torch.Generator)]
    try:
        yield
    finally:
        for stream, state in streams:
            stream.set_state(state)
        for container, content in contents:
            _refill(container, content)
        for layer, training, names in before:
            own = vars(layer)
            for name in own.keys() - names.keys():
                del own[name]
            own.update(names)
            layer.training = training  # not among the attributes of a scripted module


def _held(values: Iterable[Any], seen: set[int] | None = None) -> Iterator[Any]:
    """Values, and what lies in them where they are containers, however deep; each once."""
    seen = set() if seen is None else seen
    for value in values:
        if id(value) not in seen:
            seen.add(id(value))
            yield value
            if type(value) in _CONTAINERS or type(value) is tuple:
                yield from _held(value.values() if isinstance(value, dict) else value, seen)


def _refill(container: Any, content: Any) -> None:
    """Put content back into the very container that held it: hook handles and layers hold on to it."""
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(content)


@contextmanager
def _without_users_hooks(module: nn.Module) -> Iterator[None]:
    """Take users' hooks out; :func:`_attributes_kept` puts them back."""
    tables = [t for layer in module.modules() for t in (layer._forward_pre_hooks, layer._forward_hooks)]
    for hooks in (*tables, *_global_hooks()):
        for number in [n for n, hook in hooks.items() if not _is_torchs_own(hook)]:
            del hooks[number]
    yield


def _global_hooks() -> tuple[dict[int, Any], dict[int, Any]]:
    return nn_module._global_forward_pre_hooks, nn_module._global_forward_hooks


def _is_torchs_own(hook: Callable[..., Any]) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    named = (hook,) if hasattr(hook, "__qualname__") else type(hook).__mro__  # functions and methods, or objects
    return any((getattr(part, "__module__", None) or "").startswith("torch.nn.") for part in named)


@contextmanager
def _tensors_kept(module: nn.Module) -> Iterator[None]:
    values = (value for layer in module.modules() for name, value in vars(layer).items() if name not in _OWN_TABLES)
    others = [value for value in _held(values) if isinstance(value, Tensor)]
    writes = _WatchedWrites([*module.parameters(), *module.buffers(), *others])
    for tensor in (*module.buffers(), *others):
        if tensor.untyped_storage().nbytes() <= SMALL:
            writes.keep(tensor)  # small state is what kernels of other packages write to without saying so
    try:
        with writes:
            yield
    finally:
        writes.undo()


class _WatchedWrites(TorchDispatchMode):
    """Copies a tensor's data before the first operation that writes to it: most are only read, and some are large."""

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._watched = {tensor.untyped_storage().data_ptr() for tensor in tensors} - {0}
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if isinstance(func, OpOverload) and func._schema.is_mutable:
            arguments = func._schema.arguments
            given = dict(zip((argument.name for argument in arguments), args, strict=False)) | named
            for argument in arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = given.get(argument.name)
                    for tensor in value if isinstance(value, list | tuple) else [value]:
                        if isinstance(tensor, Tensor):
                            self.keep(tensor)
        return func(*args, **named)

    def keep(self, tensor: Tensor) -> None:
        """Copy the tensor's data, if it is watched and has no copy yet."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._watched and address not in self._copies:
            self._copies[address] = storage, storage.clone()

    def undo(self) -> None:
        """Put everything back that was copied."""
        for storage, copy in self._copies.values():
            storage.copy_(copy)
