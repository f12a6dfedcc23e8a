"""Hugging Face models against their imports: logits, tensors written back, and a training step; on every layout."""

import pytest
import torch

from tests.megatron import hf

DENSE = ("llama", "llama-tied", "mistral", "qwen2", "qwen3")
MIXTURES = ("mixtral", "qwen3_moe")
TP, PP, EP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"
LAYOUTS = {
    "one": (1, {}),
    "TP2+SP": (2, {TP: 2, "sequence_parallel": True}),
    "PP2": (2, {PP: 2}),
    "EP2": (2, {EP: 2}),
    "TP2xPP2": (4, {TP: 2, PP: 2}),
    "VPP2xPP2": (4, {PP: 2, "virtual_pipeline_model_parallel_size": 2}),
    "EP2xPP2": (4, {EP: 2, PP: 2}),
    "EP2xTP2": (4, {EP: 2, TP: 2, "sequence_parallel": True}),
    "EP1xTP2, experts whole": (2, {TP: 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}),
    "EP2xTP2, experts whole": (
        4,
        {EP: 2, TP: 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1},
    ),
}
TRAINED = ("TP2xPP2", "EP2xPP2", "EP1xTP2, experts whole", "EP2xTP2, experts whole")
QUICK = {"one": ("mistral", "mixtral"), "TP2xPP2": ("llama", "qwen2"), "EP1xTP2, experts whole": ("qwen3_moe",)}
"""What every test run looks at; the slow ones look at all models on all layouts."""
TOLERANCE = {"mixtral": 1e-5}
"""Transformers computes Mixtral's expert weights in float32, and Megatron-Core in the router's dtype."""


def all_expected(root):
    return {name: hf.expected(root / name, name) for name in hf.MODELS}


def convert_all(root, out, names, strategy, train):
    return {name: hf.convert(root / name, out / name, strategy, train) for name in names}


def reloaded(folders):
    return [hf.logits(hf.read(folder)) for folder in folders]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def expected(ranks, root):
    return ranks.run(all_expected, 1, root)[0]


def near(ours, right, tolerance):
    assert (ours - right).abs().max() <= tolerance * max(1.0, float(right.abs().max()))


def check(ranks, root, expected, out, layout, names):
    (world, strategy), train = LAYOUTS[layout], layout in TRAINED
    for own in ranks.run(convert_all, world, root, out, names, strategy, train):
        for name in names:
            for logits, right in zip(own[name], expected[name], strict=True):
                near(logits, right, TOLERANCE.get(name, 1e-9))
    for name in names:
        written, given = hf.tensors(out / name), hf.tensors(root / name)
        assert written.keys() == given.keys()
        assert all(torch.equal(written[key], given[key]) for key in given), name
        if train:
            trained, right = hf.tensors(out / name / "trained"), hf.tensors(root / name / "trained")
            assert trained.keys() == right.keys()
            for key in right:
                near(trained[key], right[key], TOLERANCE.get(name, 1e-9))
    for name, logits in zip(names, ranks.run(reloaded, 1, [out / n for n in names])[0], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(logits, expected[name], strict=True)), name


@pytest.mark.parametrize("layout", QUICK)
def test_imports_compute_what_transformers_does_and_are_written_back(ranks, root, expected, tmp_path, layout):
    check(ranks, root, expected, tmp_path, layout, QUICK[layout])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_family_on_every_layout(ranks, root, expected, tmp_path, layout):
    names = MIXTURES if "EP" in layout else [*DENSE, *MIXTURES] if layout == "one" else DENSE
    check(ranks, root, expected, tmp_path, layout, names)
