"""Attention that cannot run over a CP group is refused before any step, by the names of all layers that ask for it."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from lightning_dcp import ConfigurationError, Decoder, module_checks
from lightning_dcp.attention import AttentionOptions, attention
from lightning_dcp.models.dry_run import LENGTHS, dry_run
from lightning_dcp.models.undisturbed import SMALL
from tests.support.ranks import RankPool
from tests.support.training import VOCAB, TinyModule, loader, trainer

HIDDEN, HEADS = 8, 2


def dropout(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if layer.training else 0.0)


def mask(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(q.shape[2], q.shape[2]).tril().bool())


def by_hand(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def cross(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, torch.cat([k, k], 2), torch.cat([v, v], 2))


def convolution(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.conv1d(q.flatten(0, 1).mT, torch.ones(4, 4, 3).to(q), padding=1).mT.unsqueeze(0)


def roll(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.roll(1, dims=2)


def cumsum(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cumsum(q, 2)


def multi_head(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    x = q[0].permute(1, 0, 2).flatten(-2)
    w, b = torch.ones(24, 8).to(x), torch.ones(24).to(x)
    options: Any = {"need_weights": False, "training": layer.training}
    out = F.multi_head_attention_forward(x, x, x, 8, 2, w, b, None, None, False, 0.0, w[:8], b[:8], **options)[0]
    return out.unflatten(-1, (2, 4)).permute(1, 0, 2).unsqueeze(0)


def without_batch(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q[0], k[0], v[0], is_causal=True).unsqueeze(0)


def impossible(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, softcap=-1.0)


def flex(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v)  # type: ignore[return-value]


def causal(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


WORDS = {
    dropout: ("scaled_dot_product_attention", "dropout_p=0.1"),
    mask: ("scaled_dot_product_attention", "attn_mask is given"),
    by_hand: ("softmax", "softmax over tokens"),
    cross: ("scaled_dot_product_attention", "the key has 10 tokens, the query 5"),
    convolution: ("conv1d", "conv1d over tokens"),
    roll: ("roll", "roll over tokens"),
    cumsum: ("cumsum", "cumsum over tokens"),
    multi_head: ("multi_head_attention_forward", "cannot run over a CP group"),
    without_batch: ("scaled_dot_product_attention", "the query has shape (2, 5, 4)"),
    flex: ("flex_attention", "flex_attention inside a context-parallel region"),
    impossible: ("attention", "softcap=-1.0"),
}


class Layer(nn.Module):
    """A layer that mixes tokens in one way."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend, self.linear = attend, nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q = self.linear(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return x + self.attend(self, q, q, q).transpose(1, 2).flatten(-2)


class Stack(nn.Module):
    """Embedding, layers, head."""

    def __init__(self, *attends: Callable[..., Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer(attend) for attend in attends)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# ------------------------------------------------------------- what is found


@pytest.mark.parametrize("attend", WORDS, ids=lambda f: f.__name__)
def test_every_kind_is_found_by_its_layer(attend: Callable[..., Tensor]) -> None:
    function, words = WORDS[attend]
    result = dry_run(Stack(causal, attend))
    assert result.skipped is None
    (finding,) = result.findings
    assert (finding.layer, finding.kind, finding.function) == ("layers.1", "Layer", function)
    assert words in finding.found
    assert finding.remedy


def test_what_is_found_and_what_to_do_are_told_apart() -> None:
    (finding,) = dry_run(Stack(mask)).findings
    assert finding.found.startswith("scaled_dot_product_attention inside a context-parallel region: attn_mask is given")
    assert finding.remedy == "Change the call, or keep this layer out of the region"


def test_all_layers_are_found_at_once() -> None:
    kinds = list(WORDS)
    findings = dry_run(Stack(*kinds, causal)).findings
    assert [f.layer for f in findings] == [f"layers.{i}" for i in range(len(kinds))]
    assert [f.function for f in findings] == [WORDS[kind][0] for kind in kinds]


def test_two_problems_of_one_layer_are_both_found() -> None:
    def both(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dropout(layer, q, k, v) + mask(layer, q, k, v) + mask(layer, q, k, v)

    assert len(dry_run(Stack(both)).findings) == 2


@pytest.mark.parametrize("module", [Decoder(VOCAB, hidden_size=8, num_layers=2, num_heads=2), Stack(causal)])
def test_models_that_can_run_pass(module: nn.Module) -> None:
    result = dry_run(module)
    assert (result.findings, result.skipped) == ((), None)


def test_a_kernel_that_cannot_serve_the_layers_is_found() -> None:
    findings = dry_run(Stack(causal, causal), AttentionOptions(kernel="flash_attn")).findings
    assert [f.layer for f in findings] == ["layers.0", "layers.1"]
    assert "flash_attn" in findings[0].found


def test_a_function_that_chooses_schemes_does_not_see_the_dry_run() -> None:
    asked = []
    dry_run(Stack(causal), AttentionOptions(scheme=lambda *call: asked.append(call) or "ring"))
    assert not asked


def test_dropout_is_looked_for_in_the_mode_of_the_run() -> None:
    module = Stack(dropout, dropout)
    assert dry_run(module, training=False).findings == ()
    module.layers[0].eval()
    assert [f.layer for f in dry_run(module).findings] == ["layers.1"]
    assert [layer.training for layer in module.layers] == [False, True]


class Low(nn.Module):
    """A layer around another's weights, as LoRA has it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(HIDDEN, 1), nn.Linear(1, HIDDEN)

    def forward(self, *args: Any) -> Tensor:
        return self.base(*args) + self.b(self.a(args[0]))


def test_layers_inside_wrappers_have_their_whole_path() -> None:
    module = Stack(dropout)
    module.layers[0].linear = Low(module.layers[0].linear)
    module.layers[0] = Low(module.layers[0])
    assert [f.layer for f in dry_run(module).findings] == ["layers.0.base"]


def test_a_function_called_by_a_layer_is_the_layers() -> None:
    class Unusual(Layer):
        def forward(this, x: Tensor) -> Tensor:
            return Layer.forward(this, x)

    module = Stack(causal)
    module.layers.append(Unusual(dropout))
    (finding,) = dry_run(module).findings
    assert (finding.layer, finding.kind) == ("layers.1", "Unusual")


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_are_seen(reentrant: bool, recwarn: pytest.WarningsRecorder) -> None:
    class Checkpointed(Stack):
        def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
            return checkpoint(self.layers[0], self.embedding(input_ids), use_reentrant=reentrant)

    assert [f.layer for f in dry_run(Checkpointed(mask)).findings] == ["layers.0"]
    assert not list(recwarn)


@pytest.mark.parametrize("experts", LENGTHS)
def test_router_scores_that_look_square_by_chance_are_not_attention(experts: int) -> None:
    class Router(Stack):
        def __init__(self) -> None:
            super().__init__(by_hand)
            self.router = nn.Linear(HIDDEN, experts)

        def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
            x = self.embedding(input_ids)
            return self.layers[0](x) * self.router(x).softmax(-1).sum(-1, keepdim=True)

    assert [f.layer for f in dry_run(Router()).findings] == ["layers.0"]


@pytest.mark.parametrize("padding", [0, 1])
def test_the_made_up_tokens_are_no_padding_and_differ(padding: int) -> None:
    first = 1 - padding
    seen: list[int] = []

    class Padded(Stack):
        def __init__(self) -> None:
            super().__init__(causal)
            self.embedding = nn.Embedding(VOCAB, HIDDEN, padding_idx=padding)

        def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
            seen.append(int(input_ids.unique()))
            self.layers[0].attend = mask if (input_ids == first).any() else causal
            return super().forward(input_ids, position_ids)

    assert dry_run(Padded()).findings == ()
    assert seen == [first, 2]


# ------------------------------------------------------ how the region is called


def test_positions_and_tokens_reach_every_kind_of_forward() -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def note(ids: Tensor, positions: Tensor | None) -> Tensor:
        assert positions is not None
        seen.append((ids, positions))
        x = torch.zeros(1, 1, ids.shape[1], 4)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True, dropout_p=0.5)

    class Named(nn.Module):
        def forward(self, labels: None = None, *, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
            return note(input_ids, position_ids)

    class Embeds(Named):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(3, 4)

    class First(Embeds):
        def forward(self, tokens: Tensor, position_ids: Tensor, **more: Any) -> Tensor:
            assert not more
            return note(tokens, position_ids)

    class OnlyPositional(Embeds):
        def forward(self, tokens: Tensor, labels: None = None, /, position_ids: Tensor | None = None) -> Tensor:
            return note(tokens, position_ids)

    class Masked(Embeds):
        def forward(self, tokens: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None = None) -> Tensor:
            assert attention_mask is None
            return note(tokens, position_ids)

    for kind in (Named, First, OnlyPositional, Masked):
        seen.clear()
        assert len(dry_run(kind()).findings) == 1
        assert [tuple(ids.shape) for ids, _ in seen] == [(1, n) for n in LENGTHS]
        assert all(ids.dtype == torch.int64 for ids, _ in seen)
        assert [positions.tolist() for _, positions in seen] == [[list(range(n))] for n in LENGTHS]


class Needs(Stack):
    def forward(self, input_ids: Tensor, images: Tensor, position_ids: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids)


class Fails(Stack):
    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        super().forward(input_ids)
        raise KeyError("no such table")


class NoTokens(nn.Module):
    def forward(self, inputs_embeds: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return inputs_embeds


class Lazy(Stack):
    def __init__(self) -> None:
        super().__init__(mask)
        self.layers[0].linear = nn.LazyLinear(HIDDEN)


class FullyShardedDataParallel(Stack):
    """A stand-in by name: the real one needs a process group."""


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (partial(Needs, mask), "Needs.forward needs images"),
        (partial(Fails, mask), "failed: KeyError: 'no such table'"),
        (NoTokens, "NoTokens.forward has no argument for token ids"),
        (Lazy, "layers.0.linear.weight gets its shape at the first call"),
        (lambda: Stack(mask).to("meta"), "embedding.weight is on the meta device"),
        (partial(FullyShardedDataParallel, mask), "(FullyShardedDataParallel) communicates"),
        (lambda: torch.jit.script(nn.Linear(2, 2)), "no argument for token ids"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_what_cannot_be_called_is_left_to_the_first_call(make: Callable[[], nn.Module], words: str) -> None:
    result = dry_run(make())
    assert result.findings == ()
    assert result.skipped is not None
    assert words in result.skipped


# ----------------------------------------------------------- nothing is left behind


class Changes(Stack):
    """Writes to everything that a module can hold."""

    def __init__(self) -> None:
        super().__init__(mask)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(SMALL // 2))
        self.plain, self.calls, self.seen, self.tables = torch.zeros(3), 0, [1], {"a": 1}

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        self.calls += 1
        self.seen.append(2)
        self.added = 3
        self.tables["b"] = 2
        self.late = nn.Linear(2, 2)
        self.steps.add_(torch.rand(()))
        self.cache[:3] = 1.0
        self.plain.numpy()[:] = 1.0  # not seen by torch
        self.head.weight.data.mul_(2.0)
        torch._foreach_add_([self.head.bias], 1.0)
        torch.add(torch.ones(HIDDEN), 1.0, out=self.layers[0].linear.bias)
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.train()
        random.random(), np.random.rand()
        return F.dropout(super().forward(input_ids), 0.5)


def test_the_module_and_all_random_streams_are_left_as_they_were() -> None:
    module = Changes()
    module.layers[0].eval()
    attributes, modes = dict(vars(module)), [m.training for m in module.modules()]
    state, addresses = copy.deepcopy(module.state_dict()), [p.data_ptr() for p in module.parameters()]
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    assert len(dry_run(module).findings) == 1
    assert vars(module) == attributes
    assert (module.calls, module.seen, module.tables, module.plain.tolist()) == (0, [1], {"a": 1}, [0, 0, 0])
    assert [m.training for m in module.modules()] == modes
    assert [p.data_ptr() for p in module.parameters()] == addresses
    assert all(p.grad is None and p.requires_grad for p in module.parameters())
    assert module.state_dict().keys() == state.keys()
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]
    assert (np.random.get_state()[1] == streams[2]).all()


def test_it_is_left_so_when_the_call_fails_too() -> None:
    class Broken(Changes):
        def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
            super().forward(input_ids)
            raise ValueError

    module = Broken()
    weight = module.head.weight.clone()
    module.register_forward_hook(print)
    assert dry_run(module).skipped
    assert torch.equal(module.head.weight, weight)
    assert (module.calls, len(module._forward_hooks)) == (0, 1)


def test_large_tables_that_are_only_read_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    class Table(Stack):
        def __init__(self) -> None:
            super().__init__(causal)
            self.register_buffer("table", torch.ones(SMALL))
            self.register_buffer("small", torch.ones(4))

        def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
            return super().forward(input_ids) * self.table[: input_ids.shape[1], None]

    copied: list[int] = []
    clone = torch.UntypedStorage.clone
    monkeypatch.setattr(torch.UntypedStorage, "clone", lambda s: copied.append(s.nbytes()) or clone(s))
    assert dry_run(Table()).skipped is None
    assert copied == [16]


@pytest.fixture
def hooks() -> Iterator[list[str]]:
    calls: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda *_: calls.append("global"))
    yield calls
    handle.remove()


def test_users_hooks_see_no_made_up_tokens(hooks: list[str]) -> None:
    module = Stack(mask)
    handles = [
        module.register_forward_hook(lambda *_: hooks.append("after")),
        module.layers[0].register_forward_pre_hook(lambda *_, **__: hooks.append("before"), with_kwargs=True),
    ]
    assert len(dry_run(module).findings) == 1
    assert hooks == []
    module(torch.zeros(1, 4, dtype=torch.int64))
    assert {"global", "before", "after"} <= set(hooks)
    hooks.clear()
    for handle in handles:
        handle.remove()
    module(torch.zeros(1, 4, dtype=torch.int64))
    assert set(hooks) == {"global"}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_torchs_hooks_that_make_weights_are_called() -> None:
    class Custom(prune.BasePruningMethod):
        PRUNING_TYPE = "unstructured"

        def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
            return default_mask

    module = Stack(mask)
    nn.utils.weight_norm(module.head)
    Custom.apply(module.layers[0].linear, "weight")
    del module.head.weight, module.layers[0].linear.weight  # without the hooks the call fails
    assert len(dry_run(module).findings) == 1


def test_nothing_is_compiled_in_a_dry_run() -> None:
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    for wrap in ("module", "layer", "in place"):
        torch._dynamo.reset()  # what was compiled for one may serve another
        module: nn.Module = Stack(causal, mask)
        if wrap == "layer":
            module.layers[1] = torch.compile(module.layers[1], backend=backend)
        elif wrap == "in place":
            module.layers[1].compile(backend=backend)
        else:
            module = torch.compile(module, backend=backend)  # type: ignore[assignment]
        assert [f.layer for f in dry_run(module).findings] == ["layers.1"]
        assert compiled == []
        module(torch.zeros(1, 4, dtype=torch.int64))
        assert compiled
        compiled.clear()


def test_casts_of_autocast_are_not_kept_without_a_graph() -> None:
    module = Stack(causal)
    with torch.autocast("cpu", torch.bfloat16):  # as around a whole run
        dry_run(module, forward_context=partial(torch.autocast, "cpu", torch.bfloat16))
        module(torch.zeros(1, 4, dtype=torch.int64)).float().sum().backward()
    assert module.layers[0].linear.weight.grad is not None


# ----------------------------------------------------------------- whole runs


class Module(TinyModule):
    """Trains one or more stacks."""

    def __init__(self, *attends: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = Stack(*attends)  # type: ignore[assignment]
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)


def attempt(
    make: Callable[[], Module], run: str = "fit", precision: str = "32-true", **strategy: Any
) -> dict[str, Any]:
    """Run, and return what was refused, what was logged at info level, and how many steps there were."""
    module, lines = make(), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(handler)
    refused: BaseException | None = None
    try:
        getattr(trainer(strategy=strategy, precision=precision), run)(module, loader((5, 3), 2))
    except Exception as error:
        refused = error
    return {
        "kind": type(refused).__name__,
        "text": str(refused),
        "problems": [(p.asked, p.found, p.remedy) for p in getattr(refused, "problems", ())],
        "info": "\n".join(lines),
        "steps": module.steps,
    }


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_every_layer_is_named_in_one_error_before_any_step(ranks: RankPool, precision: str) -> None:
    kinds = list(WORDS)
    for outcome in ranks.run(attempt, 2, partial(Module, *kinds, causal), precision=precision):
        assert (outcome["kind"], outcome["steps"]) == ("ConfigurationError", 0)
        asked, found, remedies = zip(*outcome["problems"], strict=True)
        names = [f"layer 'model.layers.{i}' (Layer) inside a context-parallel region" for i in range(len(kinds))]
        assert list(asked) == names
        for kind, words in zip(kinds, found, strict=True):
            assert WORDS[kind][1] in words
        assert all(remedies)


class Convolves(Layer):
    def __init__(self) -> None:
        super().__init__(causal)
        self.convolution = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.convolution(x.mT).mT)


class Several(Module):
    def __init__(self) -> None:
        super().__init__(mask)
        self.model.layers.append(torch.compile(Convolves(), backend="eager"))
        self.automatic_optimization = False


def test_layers_found_by_their_class_and_other_problems_are_in_the_same_error(ranks: RankPool) -> None:
    (outcome,) = ranks.run(attempt, 1, Several)
    assert (outcome["kind"], outcome["steps"]) == ("ConfigurationError", 0)
    assert [asked for asked, _, _ in outcome["problems"]] == [
        "manual optimization in Several",
        "layer 'model.layers.1.convolution' (Conv1d) inside a context-parallel region",
        "layer 'model.layers.0' (Layer) inside a context-parallel region",
    ]


class Teaching(Module):
    """A student and a frozen teacher whose attention drops scores in training mode."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__(causal)
        self.teacher = Stack(dropout)
        if frozen:
            self.teacher.eval().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        target = self.teacher(batch["input_ids"]).detach()
        return super().training_step(batch, batch_idx) + F.mse_loss(self.model(batch["input_ids"]), target)


def test_each_region_is_called_in_its_own_mode(ranks: RankPool) -> None:
    regions = ["model", "teacher"]
    (frozen,) = ranks.run(attempt, 1, partial(Teaching, frozen=True), regions=regions)
    assert (frozen["kind"], frozen["steps"]) == ("NoneType", 1)
    (training,) = ranks.run(attempt, 1, partial(Teaching, frozen=False), regions=regions)
    assert (training["kind"], training["steps"]) == ("ConfigurationError", 0)
    assert [asked.split("'")[1] for asked, _, _ in training["problems"]] == ["teacher.layers.0"]


@pytest.mark.parametrize("run", ["validate", "test", "predict"])
def test_runs_without_training_are_checked_as_they_will_be(ranks: RankPool, run: str) -> None:
    (refused,) = ranks.run(attempt, 1, partial(Module, mask), run)
    assert refused["kind"] == "ConfigurationError"
    assert "layer 'model.layers.0'" in refused["text"]
    (done,) = ranks.run(attempt, 1, partial(Module, dropout), run)
    assert done["kind"] == "NoneType"


class Whole(L.LightningModule):
    """Is its own region."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.embedding, self.head = 0, nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids).unsqueeze(1)
        return self.head(F.scaled_dot_product_attention(x, x, x, dropout_p=0.2).squeeze(1))

    training_step = Module.training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_module_that_is_its_own_region_is_called_by_its_class(ranks: RankPool) -> None:
    (outcome,) = ranks.run(attempt, 1, Whole)
    assert outcome["kind"] == "ConfigurationError"
    assert [asked for asked, _, _ in outcome["problems"]] == ["Whole.forward as a context-parallel region"]


class Elsewhere(Module):
    """Its region cannot be called with token ids alone."""

    def __init__(self) -> None:
        super().__init__(mask)
        self.model = Needs(mask)  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch["input_ids"], batch["input_ids"]).sum()


def test_where_a_dry_run_is_not_possible_the_first_call_refuses(ranks: RankPool) -> None:
    (outcome,) = ranks.run(attempt, 1, Elsewhere)
    assert outcome["kind"] == "UnsupportedAttentionError"
    assert "layer 'model.layers.0'" in outcome["text"]
    assert "region 'model' is checked at its first call, not at set-up: Needs.forward needs images" in outcome["info"]


class Noisy(Module):
    """Draws random numbers in and outside its region."""

    def __init__(self) -> None:
        super().__init__(causal)
        self.model.head = nn.Sequential(nn.Dropout(0.5), self.model.head)

    def on_fit_start(self) -> None:
        self.model.embedding.weight.data.add_(torch.rand(HIDDEN))


def weights(*, checked: bool) -> list[Tensor]:
    checking = module_checks.check_attention
    if not checked:
        module_checks.check_attention = lambda *_: None  # type: ignore[assignment]
    try:
        L.seed_everything(3)
        module = Noisy()
        trainer(strategy={}, precision="32-true", max_epochs=2).fit(module, loader((5, 3, 4, 6), 2, shuffle=True))
    finally:
        module_checks.check_attention = checking
    return [p.detach() for p in module.parameters()]


def test_training_is_the_same_to_the_bit_with_and_without_the_check(ranks: RankPool) -> None:
    (with_check,), (without,) = (ranks.run(weights, 1, checked=checked) for checked in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(with_check, without, strict=True))


def test_the_error_reads_as_all_others() -> None:
    regions = module_checks.Regions({"net": Stack(mask)})
    text = str(
        ConfigurationError(module_checks._attention_problems(regions, set(), AttentionOptions(), True, torch.no_grad))
    )
    assert text.splitlines()[1].startswith("  1. asked: layer 'net.layers.0' (Layer) inside a context-parallel region")
    assert "    do: Change the call, or keep this layer out of the region" in text


class Caching(Stack):
    """Keeps what it saw in a nested container and a tuple, and draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__(causal)
        self.cache: dict[str, list[Tensor]] = {"keys": []}
        self.counts = (torch.zeros(1), [torch.zeros(1)])
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = super().forward(input_ids, position_ids)
        self.cache["keys"].append(x)
        self.counts[0].add_(1)
        self.counts[1][0].add_(1)
        return x + torch.rand(1, generator=self.generator)


def test_what_lies_deep_in_containers_and_generators_are_left_as_they_were() -> None:
    module = Caching()
    state = module.generator.get_state()
    assert dry_run(module).skipped is None
    assert module.cache == {"keys": []}
    assert not module.counts[0].any() and not module.counts[1][0].any()
    assert torch.equal(module.generator.get_state(), state)


def leave(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise SystemExit(3)


def test_a_module_that_leaves_the_program_is_left_to_its_first_call() -> None:
    assert "SystemExit: 3" in (dry_run(Stack(leave)).skipped or "")
