"""What is recorded of a model's attention, and the kernel's efficiency."""

import pytest
import torch

from lightning_dcp.attention import AttentionKind, context_parallel_attention
from lightning_dcp.attention.schemes import ALONE as ALONES_SCHEME
from lightning_dcp.attention.schemes import SCHEMES
from lightning_dcp.attention.shape import AttentionShape
from lightning_dcp.calibration.kernel_speed import as_efficiency, attention_efficiency, table_lengths
from lightning_dcp.calibration.record import AttentionCalls, RecordedCall, recording
from lightning_dcp.parallel.blocks import AttentionMask
from lightning_dcp.parallel.context import make_context
from lightning_dcp.parallel.groups import CPGroup
from lightning_dcp.schedule import CostModel

ALONE = CPGroup(None, (0,))


def attend(heads, kv_heads, head_dim, dtype, lengths=(3, 4)):
    context = make_context(ALONE, 0, lengths)
    q, k, v = (
        torch.randn(sum(lengths), n, head_dim, dtype=dtype).requires_grad_() for n in (heads, kv_heads, kv_heads)
    )
    return context_parallel_attention(q, k, v, context), q


def test_calls_are_recorded_by_shape_and_results_stay_the_same():
    with recording() as calls:
        torch.manual_seed(0)
        out, q = attend(4, 2, 8, torch.float32)
        out.sum().backward()
        attend(2, 2, 8, torch.bfloat16)
    torch.manual_seed(0)
    plain, plain_q = attend(4, 2, 8, torch.float32)
    plain.sum().backward()
    assert torch.equal(out, plain)
    assert torch.equal(q.grad, plain_q.grad)
    shapes = AttentionShape(4, 2, 8, 8, torch.float32), AttentionShape(2, 2, 8, 8, torch.bfloat16)
    wide, narrow = (RecordedCall(shape, kernel="cpu_flash") for shape in shapes)
    assert calls.forward == {wide: 1, narrow: 1}
    assert calls.backward == {wide: 1}


def test_bytes_of_a_hop_are_those_of_keys_values_and_their_gradients():
    shape = AttentionShape(4, 2, 8, 8, torch.bfloat16)
    calls = AttentionCalls()
    calls.forward[RecordedCall(shape)], calls.backward[RecordedCall(shape)] = 3, 2
    numbers = 2 * 2 * 8
    assert calls.hop_bytes == 3 * numbers * 2 + 2 * (numbers * 2 + numbers * 4)


def test_recording_leaves_nothing_behind_not_even_after_an_error():
    own = SCHEMES[ALONES_SCHEME]
    with pytest.raises(ZeroDivisionError), recording():
        assert SCHEMES[ALONES_SCHEME] is not own
        raise ZeroDivisionError
    assert SCHEMES[ALONES_SCHEME] is own


def test_the_table_goes_from_one_token_to_the_limit():
    assert table_lengths(8) == (1, 2, 4, 8)
    assert table_lengths(100) == (1, 2, 4, 8, 16, 32, 64, 100)


def test_efficiency_is_speed_relative_to_the_best_and_never_falls():
    assert as_efficiency([1, 2, 4], [1.0, 1.0, 1.0]) == ((1, 1 / 16), (2, 4 / 16), (4, 1.0))
    # speeds 1, 4, 2, 8: the two in the middle that fall share their mean
    assert as_efficiency([1, 2, 4, 8], [1.0, 1.0, 8.0, 8.0]) == ((1, 1 / 8), (2, 3 / 8), (4, 3 / 8), (8, 1.0))


def test_a_real_kernel_is_slow_on_short_samples():
    calls = AttentionCalls()
    shape = AttentionShape(2, 1, 16, 16, torch.float32)
    calls.forward[RecordedCall(shape)] = calls.backward[RecordedCall(shape)] = 2
    table = attention_efficiency(calls, 512, torch.device("cpu"))
    shares = dict(table)
    assert list(shares) == list(table_lengths(512))
    assert 0 < shares[1] < 0.01 < shares[512] == 1.0
    CostModel(linear=1.0, attention=1.0, efficiency=table)  # refuses what is no table


def test_without_attention_the_table_says_full_speed():
    assert attention_efficiency(AttentionCalls(), 512, torch.device("cpu")) == ((1, 1.0),)


def test_windows_caps_and_kernels_are_recorded_and_timed_as_they_are():
    context = make_context(ALONE, 0, (40, 3))
    q, k, v = (torch.randn(43, 2, 8).requires_grad_() for _ in range(3))
    kind = AttentionKind(AttentionMask((True, False), (4, 0)), softcap=2.0)
    with recording() as calls:
        context_parallel_attention(q, k, v, context, kind, kernel="reference").sum().backward()
    expected = RecordedCall(AttentionShape(2, 2, 8, 8, torch.float32), True, (4, 0), 2.0, "reference")
    assert calls.forward == calls.backward == {expected: 1}
    with recording() as timed:
        attention_efficiency(calls, 8, torch.device("cpu"))
    assert timed.forward.keys() == timed.backward.keys() == {expected}
