"""Ring: keys and values travel around the group, each hop's transfer under the hop's compute.

After Liu et al., https://arxiv.org/abs/2310.01889, with the layouts of :mod:`lightning_dcp.parallel.layout`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from lightning_dcp.attention.running import KeyValueGradients, RunningGradients, RunningOutput
from lightning_dcp.attention.schemes.base import AttentionCall, Gradients, Saved, Scheme, finish
from lightning_dcp.attention.sinks import sink_gradient
from lightning_dcp.parallel.context import CPContext
from lightning_dcp.parallel.exchange import Transfer

_KEYS_AND_VALUES, _THEIR_GRADIENTS = 0, 1  # tags of the two kinds of transfer


class Ring(Scheme):
    """c - 1 hops forward; backward as many, and c of the gradients. A rank never has more than two others' keys.

    Hops visit the ranks in the order of the context's ring.
    """

    name = "ring"

    def forward(  # noqa: D102
        self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Saved]:
        running = RunningOutput(q, v)
        for holder, held in _travel([k, v], call.context):
            running.add(call.kernel, q, held[0], held[1], call.blocks(call.context.rank, holder), call.scores)
        out, lse = finish(running, q, sinks)
        return out, (q, k, v, out, lse)

    def backward(self, call: AttentionCall, grad: Tensor, saved: Saved, sinks: Tensor | None) -> Gradients:  # noqa: D102
        q, k, v, out, lse = saved
        context, exchange = call.context, call.context.exchange
        narrow = grad.to(q.dtype)
        running = RunningGradients(q)
        incoming: Transfer | None = None
        for hop, (holder, held) in enumerate(_travel([k, v], context)):
            # The gradients of the keys held now were begun by the ranks that held them before; they arrive while this
            # hop computes, get this rank's part, and travel on. After c hops they are home.
            # (A transfer that is over must not live on: its work holds what was sent.)
            found, incoming = KeyValueGradients(held[0], held[1], lse.dtype, incoming), None
            for blocks in call.blocks(context.rank, holder):
                running.add(call.kernel.backward(narrow, q, held[0], held[1], out, lse, blocks, call.scores), found)
            if context.size > 1:
                tokens = context.layout.tokens(context.holder(hop + 1))
                incoming = exchange.start_hop(found.sums(), tokens, tag=_THEIR_GRADIENTS)
        dk, dv = found.sums() if incoming is None else incoming.wait()
        return running.dq, dk, dv, sink_gradient(grad, out, lse, sinks)


def _travel(held: list[Tensor], context: CPContext) -> Iterator[tuple[int, list[Tensor]]]:
    """What each rank holds, this rank first, and whose it is; the next arrives while the caller works on this.

    It is the caller's own list that is filled anew each time, so that what was used does not live on.
    """
    for hop in range(context.size):
        transfer = None
        if hop < context.size - 1:
            tokens = context.layout.tokens(context.holder(hop + 1))
            transfer = context.exchange.start_hop(held, tokens, tag=_KEYS_AND_VALUES)
        yield context.holder(hop), held
        if transfer is not None:
            held[:] = transfer.wait()
