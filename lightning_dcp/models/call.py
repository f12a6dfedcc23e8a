"""One call of a region on one pack: arguments cut to this rank's tokens, outputs made whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_dcp.attention.sdpa import ContextParallelAttention
from lightning_dcp.batch.sequences import IGNORE_INDEX, SequenceView, shift_packed
from lightning_dcp.errors import PlanError, RegionError
from lightning_dcp.models.pack import ActivePack
from lightning_dcp.models.positions import POSITIONS, shaped_positions
from lightning_dcp.parallel.context import CPContext
from lightning_dcp.parallel.randomness import seeded
from lightning_dcp.parallel.shard import gather, shard

MASK = "attention_mask"
TOKENS = ("input_ids", "inputs_embeds")
"""Arguments that say which sequences a call is about, if it has them; else its first per-token tensor does."""


class RegionCall:
    """One call of a region's module while a step runs.

    Args:
        name: the region's name, for errors.
        pack: the pack under way.
        forward: the module's own forward, compiled or not.
        arguments: what it was called with, bound to its signature; adapters may change them before :meth:`run`.
        positions: the argument that takes positions.
        seed: of random numbers drawn inside.
        mark: the identity of an output, whose backward says which call's part of the graph follows.
        first_position: of a sample's first token.
    """

    def __init__(
        self,
        name: str,
        pack: ActivePack,
        forward: Callable[..., Any],
        arguments: inspect.BoundArguments,
        positions: str,
        seed: int,
        mark: Callable[[Tensor, CPContext], Tensor],
        first_position: int = 0,
    ) -> None:
        self.name, self.pack, self.forward, self.bound = name, pack, forward, arguments
        self.positions, self.seed, self._mark = positions, seed, mark
        self.first_position = first_position

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name, but those that the signature does not name."""
        return self.bound.arguments

    @cached_property
    def extra(self) -> dict[str, Any]:
        """The arguments that the signature takes as ``**kwargs``."""
        kinds = self.bound.signature.parameters.values()
        name = next((parameter.name for parameter in kinds if parameter.kind == parameter.VAR_KEYWORD), None)
        return {} if name is None else self.bound.arguments.setdefault(name, {})

    def take(self, argument: str, default: Any = None) -> Any:
        """An argument's value, and leave it out of the call; the default if it is not given or None."""
        found = self.extra.pop(argument, None) if argument in self.extra else self.arguments.pop(argument, None)
        return default if found is None else found

    def give(self, argument: str, value: Any) -> None:
        """Set an argument that the module takes, by name or as ``**kwargs``."""
        named = argument in self.bound.signature.parameters
        (self.arguments if named else self.extra)[argument] = value

    # ------------------------------------------------------------- sequences

    @cached_property
    def sequences(self) -> SequenceView:
        """The sequences that the call is about.

        Raises:
            RegionError: no tensor among the arguments is per-token.
        """
        mask = self.arguments.get(MASK, self.extra.get(MASK))
        for argument, value in self._tensors():
            if value.dim() > 1:  # a nested tensor has more, too
                found = self.pack.view.sequences(value, mask if isinstance(mask, Tensor) else None)
                if found is None:
                    raise self._refusal(argument, value, "the batch's tokens")
                return found
        raise RegionError(f"region {self.name!r} was called without a per-token tensor; give it whole samples")

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors among the arguments, those that say what the call is about first."""
        named = [(name, self.arguments.get(name)) for name in TOKENS]
        given = (self.arguments | self.extra).items()
        every = [(n, v) for n, value in given if n not in (MASK, self.positions) for v in pytree.tree_leaves(value)]
        yield from ((name, value) for name, value in [*named, *every] if isinstance(value, Tensor))

    @cached_property
    def context(self) -> CPContext:
        """Group and layout of these sequences.

        Raises:
            PlanError: more tokens on a rank than the limit.
        """
        if self.pack.sharded:
            return self.pack.context
        context = self.pack.context_of(self.sequences.lengths)
        held = context.with_padding.tokens
        if max(held) > self.pack.max_tokens:
            raise PlanError(
                f"region {self.name!r}: {max(held)} tokens of one call on one rank; "
                f"max_seqlen_per_dp_cp_rank is {self.pack.max_tokens}. Pass attention_mask, so that padding is left out, or "
                "raise the limit."
            )
        return context

    # ------------------------------------------------------------ local and whole

    def local(self, argument: str, value: Any) -> Any:
        """A per-token tensor cut to this rank's tokens, ``[1, T_local, ...]``; scalars and other values as they are."""
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if argument in (POSITIONS, self.positions) and value.dim() == 3 and self._per_token(value[0]):
            return torch.stack([self.local(argument, part) for part in value])  # one row a rotary axis, [k, 1, T]
        if not self._per_token(value):
            raise self._refusal(argument, value, "the call's tokens")
        if self.pack.sharded:
            return value
        return self.filled(self.sequences.flatten(value)).unsqueeze(0)

    def filled(self, packed: Tensor) -> Tensor:
        """This rank's tokens of a packed tensor ``[T, ...]``, with fill tokens between and behind them.

        These are copies of the pack's first: any valid one will do.
        """
        return self.context.with_fill(shard(packed, self.context), packed[0])

    def _per_token(self, value: Tensor) -> bool:
        if self.pack.sharded:
            return tuple(value.shape[:2]) == (1, self.context.num_region_tokens)
        return self.sequences.per_token(value)

    def whole(self, local: Tensor) -> Tensor:
        """All ranks' tokens of a local tensor ``[1, T_local, ...]``, in the caller's shape; in a sharded step as it is."""
        if self.pack.sharded:
            return self._mark(local, self.context)
        return self.sequences.unflatten(self.packed(local))

    def packed(self, local: Tensor) -> Tensor:
        """All ranks' tokens of a local tensor ``[1, T_local, ...]``, packed: ``[T, ...]``."""
        return gather(self.context.without_fill(self._mark(local, self.context)[0]), self.context)

    def targets(self, labels: Tensor) -> Tensor:
        """Labels in the caller's shape, shifted by one inside each sequence; -100 where nothing is to be predicted."""
        if not self.pack.sharded:
            return self.sequences.shifted(labels)
        shifted = shift_packed(self.packed(labels), self.context.layout.lengths)
        return shard(shifted, self.context).unsqueeze(0)  # a shard has no fill tokens

    def local_targets(self, targets: Tensor) -> Tensor:
        """Shifted labels cut to this rank's tokens, ``[1, T_local]``; fill tokens have none."""
        if self.pack.sharded:
            return targets
        return self.context.with_fill(shard(self.sequences.flatten(targets), self.context), IGNORE_INDEX).unsqueeze(0)

    # ----------------------------------------------------------------- running

    def run(
        self, forward: Callable[..., Any] | None = None, *, all_ones: bool = False, serve_attention: bool = True
    ) -> Any:
        """Run the module, or a function of its named arguments, on this rank's tokens; local outputs.

        Args:
            forward: the function; by default the module's own forward.
            all_ones: give the module a mask of ones instead of none.
            serve_attention: serve what the module calls as attention; not needed where its layers know the pack.
        """
        given, context = self.arguments, self.context
        for arguments in (given, self.extra):
            if MASK in arguments:  # sample borders come from the plan; a mask, all ones or not, must not change them
                arguments[MASK] = None
        for arguments in (given, self.extra):
            for argument, value in arguments.items():
                if value is not self.extra:
                    arguments[argument] = pytree.tree_map(partial(self.local, argument), value)
        if given.get(self.positions) is None:
            # Fill tokens are at 0: the next positions may lie beyond a learned table, or stretch a rotary one.
            filled = context.with_fill(context.positions[0]).unsqueeze(0) + self.first_position
            self.give(self.positions, shaped_positions(self.positions, filled))
        if all_ones:
            self.give(MASK, torch.ones(1, context.num_region_tokens, dtype=torch.int64, device=context.device))
        served = ContextParallelAttention(context, self.pack.attention) if serve_attention else nullcontext()
        with served, seeded(self.seed, context.device):
            if forward is None:
                return self.forward(*self.bound.args, **self.bound.kwargs)
            named = {name: value for name, value in given.items() if value is not self.extra}
            return forward(**named, **self.extra)

    def gathered(self, out: Any) -> Any:
        """Local outputs made whole.

        Raises:
            RegionError: a tensor that is not per-token.
        """
        return pytree.tree_map_with_path(self._whole_output, out)

    def _whole_output(self, path: pytree.KeyPath, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        local = (1, self.context.num_region_tokens)
        if tuple(value.shape[:2]) == local:
            return self.whole(value)
        raise RegionError(
            f"region {self.name!r} returned a tensor of shape {list(value.shape)} at {pytree.keystr(path) or 'the top'}; it must "
            f"be per-token, {list(local)} and more on this rank, to be gathered. Reduce over tokens outside the region."
        )

    def _refusal(self, argument: str, value: Tensor, expected: str) -> RegionError:
        shape = f"[1, {self.context.num_region_tokens}, ...]" if self.pack.sharded else self._expected_shape(argument)
        return RegionError(
            f"region {self.name!r} was called with a tensor of shape {list(value.shape)} (argument {argument!r}) that does not "
            f"hold {expected}: its tensors must be per-token, {shape} here, or scalars. Keep per-sample tensors out of the "
            "region; give shorter or joined sequences as [N, T] with their attention_mask."
        )

    def _expected_shape(self, argument: str) -> str:
        known = vars(self).get("sequences")  # refusing the very tensor that says which they are
        return known.shape_name if known is not None else self.pack.view.shape_name
