"""What a Hugging Face model's mask function says, read from the function instead of a tensor of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from lightning_dcp.errors import UnsupportedAttentionError

_CAUSAL, _BIDIRECTIONAL = "causal_mask_function", "bidirectional_mask_function"
_WINDOWS = {"sliding_window_overlay": 0, "sliding_window_bidirectional_overlay": 1}
"""Windows, and what to add to their size to count the token itself (``transformers/masking_utils.py``: ``kv > q - n`` in the
one, ``abs(q - kv) <= n`` in the other)."""
_BORDERS = (
    *("packed_sequence_mask_function", "remap_positions_for_packed_sequence", "padding_mask_function"),
    *("and_masks", "add_offsets_to_mask_function"),
)
"""Parts that say where samples begin and end, which the plan says better, or that only join others."""


class MaskReadError(UnsupportedAttentionError, AttributeError):
    """A model reads its mask, of which there is none; ``hasattr`` says no."""


@dataclass(frozen=True)
class MaskKind:
    """Stands where a model passes its mask on from layer to layer. A model that reads it as the tensor that it is not gets a
    :class:`MaskReadError`.

    Attributes:
        is_causal: whether a token sees none that comes after it.
        window: how many tokens, itself among them, it sees to each side; None for all.
        strange: parts of the mask that no layer can keep over a CP group: chunks, blocks that see each other, functions of
            the user's. Layers that get such a mask refuse it, so that each of them is named.
    """

    is_causal: bool
    window: int | None
    strange: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # what Python and torch look for on any object
            raise AttributeError(name)
        self._refuse(f".{name}")

    def __getitem__(self, index: Any) -> NoReturn:
        self._refuse("[...]")

    def __add__(self, other: Any) -> NoReturn:
        self._refuse(" + ...")

    __radd__ = __add__

    def _refuse(self, use: str) -> NoReturn:
        raise MaskReadError(
            f"attention of a Hugging Face model that reads its mask (attention_mask{use}), but over a CP group no mask is made: "
            "sample borders are kept without one. Use a model whose layers only hand the mask on to their attention "
            "function, or name a region that leaves this layer out"
        )


def mask_kind(*args: Any, mask_function: Callable[..., Any], **options: Any) -> MaskKind:
    """A mask function for ``transformers.AttentionMaskInterface``: it looks at the function it is given, and makes no mask."""
    parts = dict(_parts(mask_function))
    window = next((parts[name]["sliding_window"] + more for name, more in _WINDOWS.items() if name in parts), None)
    strange = sorted(parts.keys() - {_CAUSAL, _BIDIRECTIONAL, *_WINDOWS, *_BORDERS})
    return MaskKind(is_causal=_CAUSAL in parts, window=window, strange=tuple(strange))


def _parts(function: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The functions that a mask function is made of, by the names of those that made them, with what these closed over."""
    name = getattr(function, "__qualname__", type(function).__name__).split(".")[0]
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    closed = dict(zip(code.co_freevars if code else (), (cell.cell_contents for cell in cells), strict=True))
    yield name, closed
    for value in closed.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if callable(part):
                yield from _parts(part)
