"""How the tokens of whole sequences lie in one tensor: packed, padded or jagged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from lightning_dcp.batch.convert import is_jagged, jagged_offsets
from lightning_dcp.batch.masks import real_tokens
from lightning_dcp.errors import BatchError

IGNORE_INDEX = -100
"""The label of a token that is no target, as in Hugging Face and ``torch.nn.functional.cross_entropy``."""


class SequenceView(ABC):
    """Whole sequences in tensors of one shape, with the maths to pack their tokens and put them back.

    Attributes:
        lengths: tokens of each sequence, in order; 0 for a row without a real token.
    """

    lengths: tuple[int, ...]

    @abstractmethod
    def per_token(self, value: Tensor) -> bool:
        """Whether a tensor holds one entry a token, in this shape."""

    @abstractmethod
    def flatten(self, value: Tensor) -> Tensor:
        """A per-token tensor as ``[T, ...]``: sequence after sequence, without padding."""

    @abstractmethod
    def unflatten(self, packed: Tensor) -> Tensor:
        """The inverse of :meth:`flatten` (padding, where the shape has it, becomes 0)."""

    @property
    @abstractmethod
    def shape_name(self) -> str:
        """The shape of a per-token tensor, for error messages."""

    @abstractmethod
    def _shifted(self, labels: Tensor) -> Tensor: ...

    def refuse_padding_targets(self, labels: Tensor, name: str) -> None:
        """Raise :class:`BatchError` if padding has labels: packs hold no padding, but a loss of padded rows would count it."""
        return  # most shapes have no padding

    def shifted(self, labels: Tensor) -> Tensor:
        """Labels ``[T]`` of this shape, shifted by one inside each sequence: the label of the next token.

        Returns:
            A tensor of the same shape; -100 at a sequence's last token and in padding. ``labels`` stay as they are.

        Raises:
            BatchError: labels of another shape.
        """
        if not self.per_token(labels):
            raise BatchError(
                f"labels must hold one entry a token, {self.shape_name}; found shape {tuple(labels.shape)}"
            )
        return self._shifted(labels)

    def leading(self, positions: Tensor) -> int | None:
        """How many axes position ids have before the ones that this view reads; ``None`` if they are not per-token.

        1 for models with several kinds of positions, ``[k, 1, T]`` or ``[k, N, T']`` (M-RoPE), and 0 otherwise.
        """
        if not positions.is_nested and positions.dim() == 3 and len(positions) and self.per_token(positions[0]):
            return 1
        return 0 if self.per_token(positions) else None

    def counts(self, flags: Tensor) -> tuple[int, ...]:
        """How many entries of a per-token bool tensor are true in each sequence."""
        running = torch.nn.functional.pad(self.flatten(flags).long().cumsum(0), (1, 0)).tolist()
        return tuple(running[end] - running[end - n] for n, end in zip(self.lengths, _ends(self.lengths), strict=True))


@dataclass(frozen=True, eq=False)
class PackedSequences(SequenceView):
    """Sequences one after another along the second axis, ``[1, T, ...]``."""

    lengths: tuple[int, ...]

    def per_token(self, value: Tensor) -> bool:  # noqa: D102
        return not value.is_nested and tuple(value.shape[:2]) == (1, sum(self.lengths))

    def flatten(self, value: Tensor) -> Tensor:  # noqa: D102
        return value[0]

    def unflatten(self, packed: Tensor) -> Tensor:  # noqa: D102
        return packed.unsqueeze(0)

    @property
    def shape_name(self) -> str:  # noqa: D102
        return f"[1, {sum(self.lengths)}, ...]"

    def _shifted(self, labels: Tensor) -> Tensor:
        return shift_packed(labels[0], self.lengths).unsqueeze(0)


@dataclass(frozen=True, eq=False)
class PaddedSequences(SequenceView):
    """One sequence a row, ``[N, T', ...]``, with padding on either side.

    Attributes:
        mask: the real tokens, bool ``[N, T']``, adjacent in each row.
    """

    mask: Tensor
    lengths: tuple[int, ...] = field(init=False)
    _real: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(self.mask.sum(1).tolist()))
        object.__setattr__(self, "_real", self.mask.flatten().nonzero().squeeze(1))

    def per_token(self, value: Tensor) -> bool:  # noqa: D102
        return not value.is_nested and value.shape[:2] == self.mask.shape

    def flatten(self, value: Tensor) -> Tensor:  # noqa: D102
        return value.flatten(0, 1).index_select(0, self._real)

    def unflatten(self, packed: Tensor) -> Tensor:  # noqa: D102
        padded = packed.new_zeros((self.mask.numel(), *packed.shape[1:]))
        return padded.index_copy(0, self._real, packed).unflatten(0, self.mask.shape)

    def refuse_padding_targets(self, labels: Tensor, name: str) -> None:  # noqa: D102
        counted = ((labels != IGNORE_INDEX) & ~self.mask).flatten(1).any(1)
        if bool(counted.any()):
            raise BatchError(
                f"{name} of row {int(counted.nonzero()[0])} are not {IGNORE_INDEX} in its padding, where nothing is computed: "
                f"set them to {IGNORE_INDEX} (labels.masked_fill(attention_mask == 0, {IGNORE_INDEX}))"
            )

    @property
    def shape_name(self) -> str:  # noqa: D102
        return f"[{self.mask.shape[0]}, {self.mask.shape[1]}, ...]"

    def _shifted(self, labels: Tensor) -> Tensor:
        shifted = torch.full_like(labels, IGNORE_INDEX)
        shifted[:, :-1] = labels[:, 1:]
        has_next = torch.zeros_like(self.mask)
        # both: left padding before a sequence must not predict its first token
        has_next[:, :-1] = self.mask[:, :-1] & self.mask[:, 1:]
        return shifted.masked_fill(~has_next, IGNORE_INDEX)


@dataclass(frozen=True, eq=False)
class JaggedSequences(SequenceView):
    """Sequences of a nested tensor of jagged layout, ``[N, (T), ...]``.

    Attributes:
        offsets: cumulative lengths, int64 ``[N + 1]``. Tensors that share them can be added and multiplied.
    """

    offsets: Tensor
    lengths: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(torch.diff(self.offsets).tolist()))

    def per_token(self, value: Tensor) -> bool:  # noqa: D102
        return is_jagged(value) and torch.equal(jagged_offsets(value), self.offsets)

    def flatten(self, value: Tensor) -> Tensor:  # noqa: D102
        return value.values()

    def unflatten(self, packed: Tensor) -> Tensor:  # noqa: D102
        return torch.nested.nested_tensor_from_jagged(packed, self.offsets)

    @property
    def shape_name(self) -> str:  # noqa: D102
        return f"jagged [{len(self.lengths)}, (T), ...]"

    def _shifted(self, labels: Tensor) -> Tensor:
        return self.unflatten(shift_packed(labels.values(), self.lengths))


def read_rows(value: Tensor, attention_mask: object = None) -> SequenceView | None:
    """The sequences of a tensor that is read by itself, or ``None`` if it has no two axes to read.

    A jagged tensor is read by its own offsets, which win over any mask. In any other tensor ``[N, T', ...]`` each row is
    one sequence: the real tokens of the mask ``[N, T']``, or all ``T'`` tokens where there is none.

    Raises:
        BatchError: a mask of another shape, other values than 0 and 1, or holes; a jagged tensor with gaps.
    """
    if is_jagged(value):
        return JaggedSequences(jagged_offsets(value))
    if value.is_nested or value.dim() < 2:
        return None
    return PaddedSequences(real_tokens(attention_mask, value))


def _ends(lengths: Sequence[int]) -> list[int]:
    return list(accumulate(lengths))


def shift_packed(labels: Tensor, lengths: Sequence[int]) -> Tensor:
    """Labels ``[T]`` of sequences one after another, shifted by one; the last token of each (``lengths``) gets -100."""
    shifted = labels.roll(-1, dims=0)
    last = [end - 1 for end, length in zip(_ends(lengths), lengths, strict=True) if length]
    shifted[torch.tensor(last, dtype=torch.int64, device=labels.device)] = IGNORE_INDEX
    return shifted
