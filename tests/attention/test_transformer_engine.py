"""Transformer Engine's CP group for each micro-batch, on a stand-in for its module that records calls."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types

import pytest
import torch
from torch import nn

from lightning_dcp.attention import transformer_engine as te
from lightning_dcp.attention.transformer_engine import (
    packed_seq_params,
    te_arguments,
    te_context_parallel,
    te_refusal,
    te_ring_order_problem,
)
from lightning_dcp.errors import UnsupportedAttentionError
from lightning_dcp.parallel.context import make_context
from lightning_dcp.parallel.groups import CPGroup


class DotProductAttention(nn.Module):
    """What transformer_engine.pytorch.DotProductAttention of 2.9 has of this: names, defaults, and its checks."""

    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        window_size=None,
        tp_size=1,
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type="p2p",
        softmax_type="vanilla",
    ):
        super().__init__()
        self.num_attention_heads, self.tp_size, self.softmax_type = num_attention_heads, tp_size, softmax_type
        widths = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = widths
        self.num_gqa_groups_per_partition = (num_gqa_groups or num_attention_heads) // tp_size
        self.window_size = (-1, 0) if window_size is None else window_size
        self.cp_group, self.cp_global_ranks = cp_group, cp_global_ranks
        self.cp_stream, self.cp_comm_type = cp_stream, cp_comm_type
        self.calls = []

    def set_context_parallel_group(self, cp_group, cp_global_ranks, cp_stream, cp_comm_type="p2p"):
        self.cp_group, self.cp_global_ranks = cp_group, cp_global_ranks
        self.cp_stream, self.cp_comm_type = cp_stream, cp_comm_type

    def state(self):
        return self.cp_group, self.cp_global_ranks, self.cp_stream, self.cp_comm_type

    def forward(
        self,
        query_layer,
        key_layer,
        value_layer,
        attention_mask=None,
        qkv_format=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        attn_mask_type=None,
    ):
        assert qkv_format == "thd" and attn_mask_type in ("padding_causal", "padding")
        size = 1 if self.cp_group is None else self.cp_group.size()
        for cu in (cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded):
            assert cu.dtype == torch.int32 and cu.dim() == 1 and cu[0] == 0
        assert (cu_seqlens_q_padded.diff() % (2 * size if size > 1 else 1) == 0).all()
        assert (cu_seqlens_q.diff() <= cu_seqlens_q_padded.diff()).all()
        assert cu_seqlens_q_padded[-1] == len(query_layer) * size  # boundaries are those of the whole pack
        assert max_seqlen_q == max_seqlen_kv == cu_seqlens_q_padded.diff().max() and max_seqlen_q % size == 0
        assert (self.cp_group is None) == (self.cp_global_ranks is None) == (self.cp_stream is None)
        self.calls.append(self.state())
        return query_layer


class Group:
    """A process group as far as Transformer Engine asks it."""

    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    """Transformer Engine 2.15 on a machine whose tensors lie on the CPU; calling it sets another version."""
    clear = [lookup.cache_clear for lookup in (te._version, te._cp_stream)]
    package, pytorch = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    package.__spec__ = importlib.machinery.ModuleSpec("transformer_engine", None)
    pytorch.DotProductAttention = DotProductAttention
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", pytorch)
    monkeypatch.setattr(te, "_DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: ("stream", device, object()))

    def set_version(version):
        package.__version__ = version
        for each in clear:
            each()

    set_version("2.15.0")
    yield set_version
    for each in clear:
        each()


def context_of(lengths, size=2, rank=1, layout="zigzag", ring=None):
    group = CPGroup(Group(size) if size > 1 else None, tuple(range(4, 4 + size)))
    return make_context(group, rank if size > 1 else 0, lengths, layout=layout, ring=ring)


def run(module, context, **arguments):
    tokens = torch.zeros(context.num_local_tokens, module.num_attention_heads, 8)
    return module(tokens, tokens, tokens, **te_arguments(context, **arguments))


@pytest.mark.parametrize(("scheme", "comm_type"), [("ring", "p2p"), ("all_gather", "all_gather"), ("ulysses", "a2a")])
def test_inside_the_module_runs_over_the_packs_group_and_after_it_over_the_one_before(scheme, comm_type):
    static = Group(8)
    module = DotProductAttention(8, 16, cp_group=static, cp_global_ranks=[0, 1], cp_stream="own", cp_comm_type="p2p")
    context = context_of([8, 4])
    with te_context_parallel(module, context, scheme):
        run(module, context)
    ((group, ranks, stream, used),) = module.calls
    assert group is context.group.handle and ranks == [4, 5] and used == comm_type
    assert stream[:2] == ("stream", context.device)
    assert module.state() == (static, [0, 1], "own", "p2p")


@pytest.mark.parametrize("static", [None, Group(4)])
def test_at_size_1_it_runs_without_a_group_whatever_the_static_size_is(static):
    before = (static, None if static is None else [0, 1, 2, 3], None if static is None else "own", "p2p")
    module = DotProductAttention(8, 16, None, None, 1, *before)
    context = context_of([7, 3], size=1)
    with te_context_parallel(module, context):
        run(module, context)
    assert module.calls == [(None, None, None, "p2p")]
    assert module.state() == before


def test_a_module_of_static_size_1_gets_a_group_and_loses_it_again():
    module = DotProductAttention(8, 16)
    for size in (2, 4, 1, 2):
        context = context_of([16, 8], size=size)
        with te_context_parallel(module, context):
            run(module, context)
        assert module.state() == (None, None, None, "p2p")
    assert [len(ranks or [0]) for _, ranks, _, _ in module.calls] == [2, 4, 1, 2]


def test_the_group_before_is_back_after_an_error_and_contexts_nest():
    module, outer, inner = DotProductAttention(8, 16), context_of([8]), context_of([16], size=4)
    with te_context_parallel(module, outer):
        with pytest.raises(ZeroDivisionError), te_context_parallel(module, inner):
            assert module.cp_group is inner.group.handle
            raise ZeroDivisionError
        assert module.cp_group is outer.group.handle
    assert module.cp_group is None


def test_every_attention_of_a_model_is_set_with_one_stream_a_process():
    model = nn.Sequential(DotProductAttention(4, 8), nn.Sequential(nn.Linear(2, 2), DotProductAttention(4, 8)))
    attentions = [part for part in model.modules() if isinstance(part, DotProductAttention)]
    streams = set()
    for context in (context_of([8]), context_of([16], size=4)):
        with te_context_parallel(model, context):
            assert [part.cp_group for part in attentions] == [context.group.handle] * 2
            streams |= {part.cp_stream for part in attentions}
    assert len(streams) == 1


def test_a_stream_is_made_only_where_there_is_a_group(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda **_: pytest.fail("no stream is needed"))
    with te_context_parallel(DotProductAttention(4, 8), context_of([5], size=1)):
        pass


# --- boundaries


def test_boundaries_are_those_of_the_whole_pack_and_one_tensor():
    arguments = te_arguments(context_of([8, 4, 12]))
    assert arguments["cu_seqlens_q"].tolist() == [0, 8, 12, 24]
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    assert len({id(arguments[name]) for name in names}) == 1
    assert (arguments["max_seqlen_q"], arguments["max_seqlen_kv"]) == (12, 12)
    assert (arguments["qkv_format"], arguments["attn_mask_type"]) == ("thd", "padding_causal")
    assert te_arguments(context_of([8]), causal=False)["attn_mask_type"] == "padding"


def test_padding_can_be_kept_out():
    arguments = te_arguments(context_of([8, 4]), lengths=[5, 4])
    assert arguments["cu_seqlens_q"].tolist() == arguments["cu_seqlens_kv"].tolist() == [0, 5, 9]
    assert arguments["cu_seqlens_q_padded"].tolist() == arguments["cu_seqlens_kv_padded"].tolist() == [0, 8, 12]
    assert arguments["max_seqlen_q"] == 8
    module, context = DotProductAttention(4, 8), context_of([8, 4])
    with te_context_parallel(module, context):
        run(module, context, lengths=[5, 4])


@pytest.mark.parametrize("lengths", [[8], [8, 5], [8, 4, 4], [-1, 4]])
def test_lengths_that_do_not_fit_the_pack_are_refused(lengths):
    with pytest.raises(UnsupportedAttentionError, match="do not fit the pack"):
        te_arguments(context_of([8, 4]), lengths=lengths)


def test_megatrons_parameters_are_the_same_and_name_no_group():
    context = context_of([8, 4])
    packed, arguments = packed_seq_params(context, lengths=[6, 4]), te_arguments(context, lengths=[6, 4])
    del arguments["attn_mask_type"]
    for name, value in arguments.items():
        found = getattr(packed, name)
        assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value
    assert packed.cp_group is None and packed.local_cp_size is None


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_holds_the_chunks_that_transformer_engine_takes_for_its_own(size):
    """As its thd_get_partitioned_indices has it: of 2c equal chunks of each sample rank r holds r and 2c - 1 - r."""
    lengths = [2 * size * n for n in (1, 3, 2)]
    for rank in range(size):
        expected, start = [], 0
        for length in lengths:
            chunk = length // (2 * size)
            for number in (rank, 2 * size - 1 - rank):
                expected += range(start + number * chunk, start + (number + 1) * chunk)
            start += length
        context = context_of(lengths, size, rank)
        assert context.pack_index.tolist() == expected
        assert te_refusal(context) is None


# --- refusals


def test_samples_that_2c_does_not_divide_are_refused_with_the_lengths_to_pad_to():
    reason = te_refusal(context_of([8, 9, 3, 10, 11, 16], size=2))
    assert "multiples of 2c = 4 tokens" in reason
    assert "pad sample 1 of 9 to 12, sample 2 of 3 to 4, sample 3 of 10 to 12 and 1 more" in reason
    assert te_refusal(context_of([7, 9], size=1)) is None


def test_another_layout_is_refused():
    assert "must be zigzag" in te_refusal(context_of([8, 16], layout="contiguous"))
    assert te_refusal(context_of([8, 16], size=1, layout="contiguous")) is None


def test_a_ring_in_another_order_is_refused_where_there_is_a_ring():
    other, turned = context_of([16], size=4, ring=(0, 2, 1, 3)), context_of([16], size=4, ring=(2, 3, 0, 1))
    assert "order of the ranks in their process group, not (0, 2, 1, 3)" in te_refusal(other)
    assert te_refusal(other, "all_gather") is None and te_refusal(other, "ulysses") is None
    assert te_refusal(turned) is None
    assert te_refusal(context_of([8], size=2, ring=(1, 0))) is None  # two ranks have one ring


@pytest.mark.parametrize(
    ("ring_order", "refused"), [("rank", False), ([0, 1, 2], False), ("measured", True), ([0, 2, 1], True)]
)
def test_ring_orders_are_refused_at_set_up(ring_order, refused):
    problem = te_ring_order_problem(ring_order)
    assert (problem is not None) == refused
    assert te_ring_order_problem(ring_order, "all_gather") is None
    if problem is not None:
        assert repr(ring_order) in problem.asked and "ring_order='rank'" in problem.remedy


def test_an_unknown_scheme_is_refused():
    assert "no exchange scheme 'p2p'; it has ring, all_gather, ulysses" in te_refusal(context_of([8]), "p2p")


def test_another_device_is_refused(monkeypatch):
    monkeypatch.setattr(te, "_DEVICE", "cuda")
    assert te_refusal(context_of([8])) == "Transformer Engine runs on cuda, the pack lies on cpu"


@pytest.mark.parametrize(
    ("version", "refused"),
    [
        ("1.9.0", {"ring", "all_gather", "ulysses"}),
        ("1.10.0", {"all_gather", "ulysses"}),
        ("2.9.0", {"all_gather", "ulysses"}),
        ("2.10.0+abc", {"all_gather"}),
        ("2.15.0", set()),
    ],
)
def test_versions_that_do_not_take_packs_with_a_scheme_are_refused(engine, version, refused):
    engine(version)
    assert {scheme for scheme in te.COMM_TYPES if te_refusal(context_of([8]), scheme)} == refused
    assert all(te_refusal(context_of([8], size=1), s) is None for s in te.COMM_TYPES if version != "1.9.0")


@pytest.mark.parametrize(
    ("module", "schemes"),
    [
        (DotProductAttention(8, 16), {"ring", "all_gather", "ulysses"}),
        (DotProductAttention(8, 16, num_gqa_groups=2), {"ring", "all_gather"}),
        (DotProductAttention(8, 16, tp_size=4), {"ring", "all_gather"}),
        (DotProductAttention(8, 16, window_size=(127, 0)), {"all_gather", "ulysses"}),
        (DotProductAttention(8, 16, window_size=(-1, -1)), {"ring", "all_gather", "ulysses"}),
        (DotProductAttention(8, 16, softmax_type="learnable"), {"ulysses"}),
        (DotProductAttention(8, (192, 128)), {"ring", "all_gather", "ulysses"}),
    ],
)
def test_what_a_module_asks_for_restricts_the_schemes(module, schemes):
    context = context_of([16], size=4)
    assert {scheme for scheme in te.COMM_TYPES if te_refusal(context, scheme, [module]) is None} == schemes
    assert all(te_refusal(context_of([16], size=1), scheme, [module]) is None for scheme in te.COMM_TYPES)


def test_older_versions_take_values_of_another_head_size_in_a_ring_only(engine):
    engine("2.14.1")
    module = DotProductAttention(8, (192, 128))
    assert te_refusal(context_of([8]), "ring", [module]) is None
    assert "192 and 128" in te_refusal(context_of([8]), "ulysses", [module])


def test_all_reasons_come_at_once_and_nothing_is_set():
    module = DotProductAttention(8, 16, window_size=(3, 0))
    with pytest.raises(UnsupportedAttentionError, match=r"multiples of 2c.*; a ring has no sliding window"):
        te_context_parallel(module, context_of([5])).__enter__()
    assert module.state() == (None, None, None, "p2p")


def test_a_model_without_such_a_module_is_refused():
    with pytest.raises(UnsupportedAttentionError, match="Linear has no DotProductAttention"):
        te_context_parallel(nn.Linear(2, 2), context_of([8])).__enter__()


def test_a_machine_without_transformer_engine_is_refused(engine, monkeypatch):
    engine("2.15.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert te_refusal(context_of([8])) == "Transformer Engine is not installed"
    with pytest.raises(UnsupportedAttentionError, match="not installed"):
        te_context_parallel(nn.Linear(2, 2), context_of([8])).__enter__()
