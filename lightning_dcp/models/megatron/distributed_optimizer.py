"""Megatron-Core's distributed optimizer under an optimizer of torch's: each rank of the plane updates its share of the weights.

The optimizer that ``configure_optimizers`` returns stays what Lightning, its schedulers and callbacks see. Its learning rates
and other settings are read at each step; weights outside Megatron-Core models are its own to update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lightning_dcp.errors import Problem, raise_problems
from lightning_dcp.models.megatron.clipping import Counted, copies_of
from lightning_dcp.models.megatron.cpu import on_cpu
from lightning_dcp.models.megatron.gradients import finalize, is_expert, models_that_train
from lightning_dcp.models.megatron.model import MegatronModel, megatron_models
from lightning_dcp.parallel.clock import WaitClock
from lightning_dcp.parallel.groups import ParallelGroups

_DTYPES = (torch.float32, torch.bfloat16)


class DistributedOptimizer:
    """The Megatron-Core models of a module, their gradients and weights in buffers, and AdamW on this rank's share of these.

    A rank keeps the state of 1/R of what it holds of the models, in float32, weights in bfloat16 with a copy in float32.
    Gradients are added up in float32 by hooks of Megatron-Core's ``DistributedDataParallel``, whose wrappers are never called;
    ``.grad`` of these weights stays None. They are summed by reduce-scatter, and weights are gathered after a step.

    Args:
        module: whose models to update.
        optimizer: the user's, one without :func:`distributed_problems`.
        groups: the groups in force.
        device: where the models lie.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, groups: ParallelGroups, device: torch.device) -> None:
        self.settings, self.groups, self.device = optimizer, groups, device
        self.every = [*megatron_models(module).values()]
        self.models = [m for m in self.every if any(p.requires_grad for p in m.parameters())]
        self.steps = 0
        self._ready = False
        self._copies = {id(p): n for model in self.models for p, n in copies_of(model, groups)}
        with on_cpu(device):
            self.chunks = [[_with_buffers(chunk) for chunk in model.chunks] for model in self.models]
            with torch.no_grad():  # shares are views of the weights, and not part of any graph
                parts = (self._part(expert=False), self._part(expert=True))
        self.parts = [part for part in parts if part is not None]

    def _part(self, *, expert: bool) -> Any:
        """Megatron-Core's optimizer of dense weights, or of experts, whose ranks are others."""
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as Megatrons

        groups = [
            {**_settings(group), "params": self._held_of(group, expert), "number": number}
            for number, group in enumerate(self.settings.param_groups)
        ]
        if not any(group["params"] for group in groups):
            return None
        chunks = [chunk for own in self.chunks for chunk in own]
        buffers = {n: chunk.expert_parallel_buffers if expert else chunk.buffers for n, chunk in enumerate(chunks)}
        group = self.groups.expert_data if expert else self.groups.plane
        dtype = next(p for g in groups for p in g["params"]).dtype
        return Megatrons(
            AdamW(groups),
            _config(dtype),
            None,
            None,
            chunks,
            buffers,
            group,
            None,
            0,
            distributed_optimizer_instance_id=0,
        )

    def _held_of(self, group: dict[str, Any], expert: bool) -> list[nn.Parameter]:
        return [p for p in group["params"] if self.holds(p) and is_expert(p) == expert and p.requires_grad]

    def holds(self, parameter: Tensor) -> bool:
        """Whether it updates a weight."""
        return id(parameter) in self._copies

    def shards(self) -> Iterator[tuple[nn.Parameter, nn.Parameter, Any]]:
        """Of each weight that this rank has a share of: the weight, the share in float32, the optimizer that it is in."""
        for part in self.parts:
            for weights, shares in (
                (part.model_float16_groups, part.shard_fp32_from_float16_groups),
                (part.model_fp32_groups, part.shard_fp32_groups),
            ):
                for own, parts_of_own in zip(weights, shares, strict=True):
                    yield from ((w, s, part) for w, s in zip(own, parts_of_own, strict=True))

    def zero(self) -> None:
        """Start a step: gradients of 0."""
        for chunk in (chunk for own in self.chunks for chunk in own):
            chunk.zero_grad_buffer()
        self._ready = False

    def reduce(self, clock: WaitClock) -> None:
        """Sum the gradients, as :func:`~lightning_dcp.models.megatron.gradients.reduce_gradients`. Collective over the world.

        Raises:
            ConfigurationError: weights that were frozen or unfrozen since it was made.
        """
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads

        raise_problems(list(self._changed()))
        buffers = {id(model): chunks for model, chunks in zip(self.models, self.chunks, strict=True)}
        with on_cpu(self.device):
            for model in models_that_train(self.every, self.groups, clock):
                if id(model) not in buffers:  # all of this rank's weights are frozen
                    finalize(model.chunks, clock)
                    continue
                with clock.waiting():
                    finalize_model_grads(buffers[id(model)])

    def _changed(self) -> Iterator[Problem]:
        """Weights that train and are in no buffer, so that nobody would sum their gradients; and frozen ones, which decay."""
        every = [(n, p, hasattr(p, "main_grad")) for m in self.every for n, p in m.named_parameters()]
        for was, asked in ((False, "unfrozen"), (True, "frozen")):
            names = [n for n, p, held in every if held == was and p.requires_grad != was]
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                remedy = f"have them {asked} before the run starts, or leave distributed_optimizer out"
                yield Problem("distributed_optimizer=True", f"weights {asked} in the run: {names[0]}{more}", remedy)

    def gradients(self) -> Counted:
        """The gradients of this rank's shares, with the number of ranks that hold the same."""
        self._prepare()
        found: Counted = []
        for weight, share, part in self.shards():
            if share.grad is not None:
                found.append((share.grad, self._copies[id(weight)] // part.data_parallel_group.size()))
        return found

    def shares(self) -> list[nn.Parameter]:
        """This rank's shares, with gradients."""
        self._prepare()
        return [share for _, share, _ in self.shards()]

    def _prepare(self) -> None:
        if not self._ready:
            with on_cpu(self.device):
                for part in self.parts:
                    part.prepare_grads()
            self._ready = True

    def step(self) -> None:
        """Update this rank's shares with the settings in force, and gather the weights. Collective over the plane."""
        self._prepare()
        with on_cpu(self.device):
            for part in self.parts:
                for group in part.optimizer.param_groups:
                    group.update(_settings(self.settings.param_groups[group["number"]]))
                part.step_with_ready_grads()
        self.steps += 1

    def close(self) -> None:
        """Let the weights' gradients be ``.grad`` again."""
        for chunk in (chunk for own in self.chunks for chunk in own):
            chunk.grad_accs.clear()
            for parameter in chunk.module.parameters():
                vars(parameter).pop("main_grad", None)


def distributed_problems(module: nn.Module, optimizers: Sequence[Optimizer], *, scaled: bool) -> list[Problem]:
    """What stands against the distributed optimizer.

    Args:
        module: the module.
        optimizers: what ``configure_optimizers`` returned.
        scaled: whether losses are scaled, for float16.
    """
    asked = "distributed_optimizer=True"
    models = [*megatron_models(module).values()]
    if not models:
        return [Problem(asked, "no MegatronModel in the module", "leave it out, or use a Megatron-Core model")]
    found = []
    if scaled:
        found.append(Problem(asked, "float16 with a scaled loss", "use precision bf16-true, bf16-mixed or 32-true"))
    dtypes = {p.dtype for model in models for p in model.parameters() if p.requires_grad} - {*_DTYPES}
    if dtypes:
        names = ", ".join(sorted(map(str, dtypes)))
        found.append(Problem(asked, f"weights in {names}", "use precision bf16-true, bf16-mixed or 32-true"))
    if len(optimizers) != 1 or type(optimizers[0]) is not AdamW:
        names = ", ".join(type(o).__name__ for o in optimizers) or "no optimizer"
        found.append(
            Problem(asked, f"{names} from configure_optimizers", "return one torch.optim.AdamW, or leave it out")
        )
        return found
    groups = optimizers[0].param_groups
    if any(group["amsgrad"] for group in groups):
        found.append(Problem(asked, "AdamW(amsgrad=True)", "leave amsgrad out"))
    return found + _left_out(models, groups)


def _left_out(models: Sequence[MegatronModel], groups: Sequence[dict[str, Any]]) -> list[Problem]:
    """Weights that get gradients and no update: their buffer is the optimizer's, which would not know them."""
    known = {id(p) for group in groups for p in group["params"]}
    names = [n for m in models for n, p in m.named_parameters() if p.requires_grad and id(p) not in known]
    if not names:
        return []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [
        Problem(
            "distributed_optimizer=True",
            f"weights that train and that the optimizer does not hold: {names[0]}{more}",
            "give them to the optimizer, or freeze them with requires_grad_(False)",
        )
    ]


def _with_buffers(chunk: Any) -> Any:
    """A chunk's gradients and weights in buffers; sums are plain, since the losses are weighted already."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False, check_for_nan_in_grad=False
    )
    return DistributedDataParallel(chunk.config, config, chunk)


def _config(dtype: torch.dtype) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig(
        use_distributed_optimizer=True, bf16=dtype == torch.bfloat16, params_dtype=dtype, clip_grad=0.0
    )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}
