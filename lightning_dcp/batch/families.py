"""The view of a mapping whose samples have several sequences each, such as a chosen and a rejected answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from lightning_dcp.batch.base import BatchView
from lightning_dcp.batch.fields import like, sample_ids, select_samples
from lightning_dcp.batch.segments import SEGMENTS, BatchSegments
from lightning_dcp.batch.sequences import PaddedSequences, SequenceView, read_rows
from lightning_dcp.batch.single import PaddedView
from lightning_dcp.batch.targets import TARGETS, count_sample_targets, per_sample
from lightning_dcp.errors import BatchError

IDS = "input_ids"
PER_TOKEN = ("attention_mask", "position_ids", *TARGETS)
"""Fields that belong to one family's tokens."""


def family_prefixes(batch: Mapping[str, Any]) -> tuple[str, ...]:
    """What stands before ``input_ids`` in the names of a mapping's token fields; empty if it has plain ``input_ids``."""
    if IDS in batch:
        return ()
    names = [name for name, value in batch.items() if isinstance(value, Tensor) and value.dim() > 1]
    return tuple(name[: -len(IDS)] for name in names if isinstance(name, str) and name.endswith(IDS))


class FamiliesView(BatchView):
    """A mapping with ``chosen_input_ids``, ``rejected_input_ids`` and the like: sample ``i`` is row ``i`` of each.

    A family is all fields of one prefix: ``chosen_attention_mask``, ``chosen_labels``, ... Without the prefix they are a
    batch by themselves, padded, jagged or flattened. Fields of no family belong to samples if they have one entry for
    each.

    Args:
        batch: the mapping.
        view: makes the view of one family, from its prefix and its fields.

    Raises:
        BatchError: a family that breaks the rules of its format, families of different numbers of samples, or a mask or
            labels without a prefix.
    """

    def __init__(self, batch: Mapping[str, Any], view: Callable[[str, Mapping[str, Any]], BatchView]) -> None:
        self.batch, self.tokens = batch, None
        prefixes = family_prefixes(batch)
        self._owners = {name: _owner(name, prefixes) for name in batch}
        self.families = {prefix: _named(prefix, partial(view, prefix), self._fields(prefix)) for prefix in prefixes}
        """The view of each family, by prefix."""
        rows = {f"{prefix}{IDS}": len(family.lengths) for prefix, family in self.families.items()}
        if len(set(rows.values())) > 1:
            raise BatchError(f"each sample has one sequence in every family, but they have {rows}")
        self.lengths = tuple(map(sum, zip(*(family.lengths for family in self.families.values()), strict=True)))
        self.sample_ids = sample_ids(batch, len(self.lengths))
        self._refuse_unowned()

    @cached_property
    def segments(self) -> BatchSegments | None:
        """``None``: segments lie in one sequence, and samples have several here.

        Raises:
            BatchError: the batch has some.
        """
        named = [
            name for name in (SEGMENTS, *(p + SEGMENTS for p in self.families)) if self.batch.get(name) is not None
        ]
        if named:
            raise BatchError(
                f"{named[0]}: samples of several sequences each, such as pairs of answers, have no segments: leave the key out"
            )
        return None

    def _fields(self, prefix: str) -> dict[str, Any]:
        return {name[len(prefix) :]: value for name, value in self.batch.items() if self._owners[name] == prefix}

    def _refuse_unowned(self) -> None:
        for name in PER_TOKEN:
            value = self.batch.get(name)
            if value is not None and not (name == "labels" and per_sample(value, len(self.lengths))):
                raise BatchError(
                    f"{name} does not say which tokens it is for: name it {' or '.join(p + name for p in self.families)}"
                )

    def select(self, indices: Sequence[int]) -> Any:
        """Rows at these indices of every family, without the trailing columns that are padding in all of them.

        Families that are padded to one width stay so, because they may be meant to be joined to ``[2 B, T]``.
        """
        cut = self._cut_families(indices)
        values = {}
        for name, value in self.batch.items():
            owner = self._owners[name]
            if owner is None:
                values[name] = select_samples(value, indices, len(self.lengths))
            else:
                values[name] = cut[owner][name[len(owner) :]]
        return like(self.batch, values)

    def reread(self, selected: Any, indices: Sequence[int]) -> FamiliesView:  # noqa: D102
        return FamiliesView(selected, lambda prefix, fields: self.families[prefix].reread(fields, indices))

    def _cut_families(self, indices: Sequence[int]) -> dict[str, Any]:
        widths: dict[int, int] = {}
        padded = {prefix: family for prefix, family in self.families.items() if isinstance(family, PaddedView)}
        for family in padded.values():
            full = family.mask.shape[1]
            widths[full] = max(widths.get(full, 0), family.width(indices))
        cut = {prefix: family.cut(indices, widths[family.mask.shape[1]]) for prefix, family in padded.items()}
        others = {p: family.select(indices) for p, family in self.families.items() if p not in padded}
        return cut | others

    def sequences(self, value: Tensor, attention_mask: object = None) -> SequenceView | None:
        """A family's own tensor holds its sequences; one of the same shape as only one family's, too, if no mask is given.

        Any other ``[N, T', ...]`` is read by the mask of the call, or as full rows where there is none: joined families
        ``[2 B, T]``, prompts with answers. A jagged tensor is read by its own offsets.

        Raises:
            BatchError: a mask that cannot be read; or no mask for a tensor of the shape of several families, that is none of
                theirs and whose padding differs.
        """
        for family in self.families.values():
            if any(_is_same(value, field) for field in family.batch.values()) and family.per_token(value):
                return family.sequences(value, attention_mask)
        fitting = {prefix: f.tokens for prefix, f in self.families.items() if f.tokens and f.per_token(value)}
        if not fitting or attention_mask is not None:
            return read_rows(value, attention_mask)
        return _agreed(fitting, value)

    def target_counts(self) -> tuple[int, ...]:
        """Targets of each sample, those of all its sequences together; or one, where ``labels`` are one a sample.

        Raises:
            BatchError: a family without labels or a loss mask where another has one, or one that cannot be read.
        """
        labelled = {p: [n for n in TARGETS if n in family.batch] for p, family in self.families.items()}
        having = [prefix + names[0] for prefix, names in labelled.items() if names]
        if "labels" in self.batch:
            if having:
                raise BatchError(
                    f"a batch has labels, one a sample, and {having[0]}: it is not known which are the targets"
                )
            return count_sample_targets(self.batch["labels"])
        missing = [prefix for prefix, names in labelled.items() if not names]
        if having and missing:
            raise BatchError(
                f"{having[0]} says what the targets are, but there is no {missing[0]}labels, shift_labels or loss_mask. Add "
                f"{missing[0]}labels (-100 for no target), or use loss_normalization='samples' or 'sum'"
            )
        counts = [_named(prefix, lambda f: f.target_counts(), family) for prefix, family in self.families.items()]
        return tuple(map(sum, zip(*counts, strict=True)))

    @property
    def shape_name(self) -> str:
        """The shapes of all families' per-token fields, for error messages."""
        return " or ".join(f"{family.shape_name} ({prefix}{IDS})" for prefix, family in self.families.items())


def _owner(name: object, prefixes: Sequence[str]) -> str | None:
    """The family that a field belongs to: the one of the longest prefix."""
    found = [prefix for prefix in prefixes if isinstance(name, str) and name.startswith(prefix)]
    return max(found, key=len, default=None)


def _named(prefix: str, function: Callable[[Any], Any], value: Any) -> Any:
    """A function of one family, whose errors say which."""
    try:
        return function(value)
    except BatchError as error:
        raise BatchError(f"in the fields {prefix}*: {error}") from error


def _is_same(value: Tensor, field: object) -> bool:
    """Whether a tensor is a field, or an alias of all of it."""
    if value is field:
        return True
    if not isinstance(field, Tensor) or field.is_nested or value.is_nested or not value.numel():
        return False
    return (
        value.shape == field.shape
        and value.stride() == field.stride()
        and value.dtype == field.dtype
        and value.device == field.device
        and value.data_ptr() == field.data_ptr() != 0
    )


def _agreed(fitting: Mapping[str, SequenceView], value: Tensor) -> SequenceView:
    """The one reading of a tensor that families of its shape share."""
    first, *others = fitting.values()
    if all(_equal(first, other) for other in others):
        return first
    names = " and ".join(f"{prefix}{IDS}" for prefix in fitting)
    raise BatchError(
        f"a model was called with a tensor of shape {tuple(value.shape)}, as {names} have, but with none of them, and "
        "their padding differs: pass attention_mask, so that it is known which tokens are real"
    )


def _equal(one: SequenceView, other: SequenceView) -> bool:
    if type(one) is not type(other) or one.lengths != other.lengths:
        return False
    return not (isinstance(one, PaddedSequences) and isinstance(other, PaddedSequences)) or torch.equal(
        one.mask, other.mask
    )
