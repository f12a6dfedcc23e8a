"""The loss that a Hugging Face model computes when it is given labels, on whole samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from lightning_dcp.batch.labels import IGNORE_INDEX
from lightning_dcp.errors import BatchError, RegionError
from lightning_dcp.models.call import RegionCall

_LOSS_ARGUMENTS = ("num_items_in_batch", "ignore_index")


@dataclass(frozen=True)
class Labels:
    """What a call asks of the loss.

    Attributes:
        labels: as given, in the caller's shape; None if only ``shift_labels`` were given.
        targets: shifted by one inside each sequence, in the caller's shape.
        options: other arguments of the loss function: ``num_items_in_batch``, ``ignore_index``.
    """

    labels: Tensor | None
    targets: Tensor
    options: dict[str, Any]


def take_labels(call: RegionCall) -> Labels | None:
    """Take everything about the loss out of a call; None if it asks for no loss.

    As transformers does, ``labels`` alone are shifted; with ``shift_labels`` beside them these are used as they are.
    """
    labels, shifted = call.take("labels"), call.take("shift_labels")
    options = {name: value for name in _LOSS_ARGUMENTS if (value := call.take(name)) is not None}
    if labels is None:
        return None
    targets = call.targets(labels) if shifted is None else shifted
    if options.get("ignore_index", IGNORE_INDEX) != IGNORE_INDEX:
        targets = targets.masked_fill(targets == options.pop("ignore_index"), IGNORE_INDEX)
    return Labels(labels, targets, {name: value for name, value in options.items() if name != "ignore_index"})


def model_loss(model: PreTrainedModel, logits: Tensor, asked: Labels) -> Tensor:
    """The model's own loss function on whole logits.

    Raises:
        RegionError: a loss function of the user's that takes no shifted labels, which packed samples need.
    """
    function: Callable[..., Tensor] = model.loss_function
    given = {"vocab_size": model.config.get_text_config().vocab_size, "shift_labels": asked.targets, **asked.options}
    parameters = inspect.signature(function).parameters
    if "shift_labels" not in parameters and not any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        raise RegionError(
            f"the loss function of {type(model).__name__} ({getattr(function, '__name__', function)}) takes no shift_labels; "
            "labels are shifted before it is called, inside each sample. Add shift_labels=None to its arguments and use them "
            "where they are given, or compute the loss outside the model"
        )
    return function(logits=logits, labels=asked.labels, **given)


def check_divisor(asked: Labels, *, targets: int, batch_targets: int, normalization: str) -> None:
    """``num_items_in_batch`` says what a sum of losses is divided by; the strategy must be told the same.

    Args:
        asked: of the call.
        targets: of the pack.
        batch_targets: of the whole batch.
        normalization: the strategy's ``loss_normalization``.

    Raises:
        BatchError: both divide, or none does.
    """
    given = asked.options.get("num_items_in_batch")
    if given is None or targets == batch_targets:
        return
    items = int(given)
    if items == targets and normalization == "sum":
        found, remedy = (
            "the pack's own targets",
            'use loss_normalization="tokens", or give the number of the whole batch',
        )
    elif items != targets and normalization != "sum":
        found, remedy = "not the pack's targets", 'use loss_normalization="sum", as the loss is a share of a sum then'
    else:
        return
    raise BatchError(
        f"num_items_in_batch={items} is {found} ({targets}) with loss_normalization={normalization!r}: {remedy}"
    )
