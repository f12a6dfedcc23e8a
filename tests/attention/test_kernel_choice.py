"""Which kernel computes a call, and what is said where none of the wanted ones can."""

import math

import pytest
import torch

from lightning_dcp.attention.kernels import KERNELS, Kernel, choose_kernel, kernel_names
from lightning_dcp.attention.shape import AttentionShape, Scores
from lightning_dcp.errors import UnsupportedAttentionError

PLAIN, CAPPED = Scores(0.1), Scores(0.1, softcap=20.0)
NAMES = ["flash_attn_3", "flash_attn", "cuda_flash", "varlen_attn", "cpu_flash", "reference"]


def shape_on(device, dtype=torch.bfloat16, **changes):
    return AttentionShape(
        **{"heads": 8, "kv_heads": 2, "head_dim": 64, "v_head_dim": 64, **changes}, dtype=dtype, device=device
    )


@pytest.fixture
def gpu(monkeypatch):
    """Every CUDA kernel's machine is complete; a set to take kernels away by name."""
    absent = set()
    for name in NAMES[:4]:
        monkeypatch.setattr(
            type(KERNELS[name]), "missing", lambda self: f"no {self.name} here" if self.name in absent else None
        )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    return absent


def test_all_kernels_are_there_by_their_own_names_fastest_first():
    assert list(KERNELS) == NAMES == [kernel.name for kernel in KERNELS.values()]
    assert all(isinstance(kernel, Kernel) for kernel in KERNELS.values())
    assert kernel_names() == ("auto", *NAMES)


def test_auto_takes_the_fastest_that_is_there(gpu):
    taken = []
    for name in NAMES[:4]:
        taken.append(choose_kernel(shape_on("cuda"), PLAIN).name)
        gpu.add(name)
    assert taken == NAMES[:4]
    assert choose_kernel(shape_on("cuda"), PLAIN).name == "reference"


@pytest.mark.parametrize(
    ("shape", "scores", "name"),
    [
        (shape_on("cuda"), PLAIN, "flash_attn_3"),
        (shape_on("cuda"), CAPPED, "flash_attn_3"),
        (shape_on("cuda", torch.float32), PLAIN, "reference"),
        (shape_on("cuda", head_dim=512), PLAIN, "reference"),
        (shape_on("cpu"), PLAIN, "cpu_flash"),
        (shape_on("cpu", torch.float64, v_head_dim=32), PLAIN, "cpu_flash"),
        (shape_on("cpu"), CAPPED, "reference"),
        (shape_on("mps"), PLAIN, "reference"),
        (shape_on("xpu", torch.float16), CAPPED, "reference"),
    ],
)
def test_auto_takes_what_the_call_allows(gpu, shape, scores, name):
    assert choose_kernel(shape, scores).name == name
    assert choose_kernel(shape, scores, "auto") is KERNELS[name]


def test_capped_scores_on_cuda_pass_by_the_kernels_that_cannot(gpu):
    gpu.update(("flash_attn_3", "flash_attn"))
    assert choose_kernel(shape_on("cuda"), PLAIN).name == "cuda_flash"
    assert choose_kernel(shape_on("cuda"), CAPPED).name == "reference"


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_that_is_asked_for_is_taken_where_it_can(gpu, name):
    device = "cpu" if name == "cpu_flash" else "cuda"
    assert choose_kernel(shape_on(device), PLAIN, name) is KERNELS[name]


def test_a_kernel_that_is_asked_for_and_cannot_says_why_and_which_could(gpu):
    gpu.add("flash_attn")
    with pytest.raises(UnsupportedAttentionError) as caught:
        choose_kernel(shape_on("cuda", v_head_dim=32), CAPPED, "flash_attn")
    message = str(caught.value)
    assert "'flash_attn' cannot compute this call: no flash_attn here" in message
    assert "8 query and 2 key heads of size 64 (values 32), torch.bfloat16 on cuda, soft-cap 20" in message
    assert message.endswith("there are: flash_attn_3, reference")


def test_a_kernel_for_another_device_is_refused():
    with pytest.raises(
        UnsupportedAttentionError, match=r"it runs on cuda, not on cpu.*there are: cpu_flash, reference"
    ):
        choose_kernel(shape_on("cpu"), PLAIN, "cuda_flash")


def test_an_unknown_name_is_refused_with_all_names_and_those_that_could_serve():
    with pytest.raises(UnsupportedAttentionError) as caught:
        choose_kernel(shape_on("cpu"), PLAIN, "flash")
    message = str(caught.value)
    assert "unknown attention kernel 'flash'; there are auto, flash_attn_3, flash_attn," in message
    assert message.endswith("there are: cpu_flash, reference")


@pytest.mark.parametrize("asked", ["auto", "reference", "nonsense"])
def test_the_device_without_data_is_refused(asked):
    with pytest.raises(UnsupportedAttentionError, match=f"no attention kernel for device meta; asked for '{asked}'"):
        choose_kernel(shape_on("meta"), PLAIN, asked)


def test_what_is_chosen_for_this_machine_computes():
    from lightning_dcp.parallel.blocks import AttentionMask, attention_blocks
    from lightning_dcp.parallel.layout import build_layout

    q, k, v = torch.randn(7, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 6)
    (blocks,) = attention_blocks(build_layout("zigzag", (7,), 1), None, None, AttentionMask(), torch.device("cpu"))
    for scores in (Scores(1 / math.sqrt(8)), Scores(1 / math.sqrt(8), softcap=3.0)):
        kernel = choose_kernel(AttentionShape.of(q, k, v), scores)
        outs = [out for _, out, _ in kernel.forward(q, k, v, blocks, scores)]
        assert torch.allclose(torch.cat(outs)[0], v[0].repeat_interleave(2, 0), atol=1e-6)
