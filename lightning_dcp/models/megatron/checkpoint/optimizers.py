"""States of torch optimizers in a checkpoint, by the names of weights, which do not depend on the layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dcp.errors import CheckpointError
from lightning_dcp.models.megatron.checkpoint.weights import NamedParameter, Sharded

PREFIX = "optimizer"
"""Of the keys of optimizer states; the number of the optimizer and the state's name follow, then the weight's key."""

MASTER = "master"
"""A weight in float32, in the state of an optimizer that trains one of less precision; of those only that keep one."""

Catalog = dict[str, dict[str, Any]]
"""Of each weight with a state: ``values``, single values by name, and ``tensors``, the dtypes of sharded ones by name."""


def hyper_parameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """An optimizer's parameter groups without the parameters."""
    return [
        {k: v for k, v in group.items() if k not in ("params", "param_names")}
        for group in optimizer.state_dict()["param_groups"]
    ]


def sharded_state(
    optimizers: Sequence[Optimizer], named: Mapping[int, NamedParameter]
) -> tuple[Sharded, list[Catalog]]:
    """What this rank holds of the optimizers' states.

    Args:
        optimizers: the run's.
        named: the module's parameters, by ``id``.

    Returns:
        Tensors of their parameter's shape, sharded like it; and a catalog for each optimizer of those parameters that this
        rank speaks of.

    Raises:
        CheckpointError: a state that is neither a single value nor of its parameter's shape.
    """
    from megatron.core.dist_checkpointing.mapping import is_main_replica
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

    sharded: Sharded = {}
    catalogs: list[Catalog] = []
    for number, optimizer in enumerate(optimizers):
        catalog: Catalog = {}
        for parameter, own in _parameters(optimizer, named, number):
            state = optimizer.state.get(parameter, {})
            values = {key: value for key, value in state.items() if not _is_sharded(key, value, parameter, own.name)}
            tensors = {key: value for key, value in state.items() if key not in values}
            for key, tensor in tensors.items():
                sharded[f"{number}/{key}/{own.name}"] = make_sharded_optimizer_tensor(
                    own.sharded, tensor, prefix=f"{PREFIX}.{number}.{key}"
                )
            if state and is_main_replica(own.sharded.replica_id):
                catalog[own.name] = {
                    "values": _copied(values),
                    "tensors": {k: str(t.dtype) for k, t in tensors.items()},
                }
        catalogs.append(catalog)
    return sharded, catalogs


def joined(catalogs: list[Catalog], control: dist.ProcessGroup) -> list[Catalog]:
    """The catalogs of all ranks in one, on rank 0; elsewhere this rank's. Collective over the world."""
    first = dist.get_rank() == 0
    every: list[Any] | None = [None] * dist.get_world_size() if first else None
    dist.gather_object(catalogs, every, dst=0, group=control)
    if every is None:
        return catalogs
    return [{name: entry for part in parts for name, entry in part.items()} for parts in zip(*every, strict=True)]


def wanted_state(optimizer: Optimizer, number: int, catalog: Catalog, named: Mapping[int, NamedParameter]) -> Sharded:
    """Empty sharded tensors, on the CPU, for what a checkpoint holds of one optimizer's states on this rank.

    Args:
        optimizer: the optimizer; one that keeps weights in float32 says so by ``keeps_master``.
        number: its place among the run's.
        catalog: of all ranks that wrote the checkpoint.
        named: the module's parameters, by ``id``.
    """
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

    sharded: Sharded = {}
    for parameter, own in _parameters(optimizer, named, number):
        for key, dtype in _kept_tensors(optimizer, parameter, catalog.get(own.name, {})).items():
            empty = torch.empty(parameter.shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
            sharded[f"{number}/{key}/{own.name}"] = make_sharded_optimizer_tensor(
                own.sharded, empty, prefix=f"{PREFIX}.{number}.{key}"
            )
    return sharded


def load_state(
    optimizer: Optimizer,
    number: int,
    saved: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    named: Mapping[int, NamedParameter],
) -> None:
    """Give an optimizer its state.

    Args:
        optimizer: the optimizer.
        number: its place among the run's.
        saved: ``param_groups`` and the catalog, ``parameters``.
        tensors: what was loaded in the place of :func:`wanted_state`.
        named: the module's parameters, by ``id``.

    Raises:
        CheckpointError: another number of parameter groups.
    """
    groups = optimizer.state_dict()["param_groups"]
    if len(groups) != len(saved["param_groups"]):
        raise CheckpointError(
            f"optimizer {number} has {len(groups)} parameter groups and the checkpoint's has {len(saved['param_groups'])}: "
            "resume with the configure_optimizers that the checkpoint was written with"
        )
    state = {}
    for index, (parameter, own) in enumerate(_parameters(optimizer, named, number)):
        entry = saved["parameters"].get(own.name)
        if entry is not None:
            kept = _kept_tensors(optimizer, parameter, entry)
            state[index] = _copied(entry["values"]) | {k: tensors[f"{number}/{k}/{own.name}"] for k in kept}
    merged = [
        loaded | {k: group[k] for k in ("params", "param_names") if k in group}
        for loaded, group in zip(saved["param_groups"], groups, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": merged})


def _parameters(
    optimizer: Optimizer, named: Mapping[int, NamedParameter], number: int
) -> Iterator[tuple[nn.Parameter, NamedParameter]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in named:
                raise CheckpointError(
                    f"optimizer {number} holds a parameter of shape {tuple(parameter.shape)} that is not the module's, or that "
                    "its layer's sharded_state_dict leaves out: a sharded checkpoint names states by weights of the module"
                )
            yield parameter, named[id(parameter)]


def _kept_tensors(optimizer: Optimizer, parameter: Tensor, entry: Mapping[str, Any]) -> dict[str, str]:
    """The dtypes of the tensors that an optimizer takes of a weight's entry in a catalog.

    One of torch's would carry a weight in float32 through its steps as it is, into checkpoints, and to an optimizer that goes
    on from there.
    """
    wanted = getattr(optimizer, "keeps_master", False) and parameter.dtype != torch.float32
    return {key: dtype for key, dtype in entry.get("tensors", {}).items() if wanted or key != MASTER}


def _is_sharded(key: str, value: Any, parameter: Tensor, name: str) -> bool:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return False
    if value.shape == parameter.shape:
        return True
    raise CheckpointError(
        f"state {key!r} of {name} has shape {tuple(value.shape)}, its parameter's part {tuple(parameter.shape)}: a sharded "
        "checkpoint takes states of their parameter's shape, and single values. Use SGD, Adam, AdamW or one like them, or "
        "ModelCheckpoint(save_weights_only=True)"
    )


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.detach().cpu().clone() if isinstance(v, Tensor) else v for k, v in values.items()}
