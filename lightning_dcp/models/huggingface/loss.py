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
    name, used = ("labels", labels) if shifted is None else ("shift_labels", shifted)
    if not call.pack.sharded and call.sequences.per_token(used):
        call.sequences.refuse_padding_targets(used, name)  # which transformers would count
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
    if logits.is_nested:  # loss functions reshape, which jagged tensors cannot
        given["shift_labels"], labels = asked.targets.values(), None if asked.labels is None else asked.labels.values()
        return function(logits=logits.values(), labels=labels, **given)
    return function(logits=logits, labels=asked.labels, **given)


def check_divisor(call: RegionCall, asked: Labels) -> None:
    """``num_items_in_batch`` says what a sum of losses is divided by; the strategy must be told the same.

    A pack's own number makes a mean of its loss, which the strategy weighs by tokens; a number of the whole batch makes it
    a share of a sum. A pack that has all targets of the batch is both. In a sharded step the number is not looked at: there
    the strategy compares the loss with that of whole samples.

    Raises:
        BatchError: the pack's own number with ``loss_normalization="sum"``, or another number without it.
    """
    given, normalization = asked.options.get("num_items_in_batch"), call.pack.normalization
    if given is None or normalization is None or call.pack.whole_batch or call.pack.sharded:
        return
    items, own = float(given), int(count_targets(asked.targets))
    if normalization == "sum" and (items != own or own == call.pack.count_batch_targets()):
        return
    if normalization != "sum" and items == own:
        return
    found = f"the pack's own number of targets ({own})" if items == own else f"not the pack's number of targets ({own})"
    remedy = (
        'use loss_normalization="tokens", or give the number of the whole batch'
        if items == own
        else 'use loss_normalization="sum", as the loss is a share of a sum then, or leave num_items_in_batch out'
    )
    raise BatchError(
        f"num_items_in_batch={given} of region {call.name!r} is {found}, with loss_normalization={normalization!r}. Do one "
        f"of these: {remedy}"
    )


def check_targets(call: RegionCall, asked: Labels) -> None:
    """A mean over other targets than the batch's would be weighed wrongly: labels that the step masks, learned prompts.

    Raises:
        BatchError: under ``loss_normalization="tokens"``, a call about all of the pack's samples whose number of targets is
            not that of the batch.
    """
    pack = call.pack
    if pack.targets is None or pack.whole_batch or pack.sharded or "num_items_in_batch" in asked.options:
        return
    if pack.view.tokens is None:  # a call is about some of each sample's sequences
        return
    found = int(count_targets(asked.targets))
    if found != pack.targets:
        raise BatchError(
            f"region {call.name!r} computes a mean over {found} targets in {sum(call.sequences.lengths)} tokens, but "
            f"the batch has {pack.targets} targets in {sum(pack.view.lengths)} tokens, by which the strategy weighs it. Mask "
            "labels in the data set or collate function, not in the step, so that they are in the batch; or return a sum or a "
            "mean over samples and say so (loss_normalization). Behind a learned prompt each sample's first token is a target, "
            "too: set its label to -100"
        )


def count_targets(targets: Tensor) -> Tensor:
    """How many targets count, of ``[N, T]`` or jagged ``[N, (T)]``; a scalar."""
    return (targets.values() if targets.is_nested else targets).ne(IGNORE_INDEX).sum()
