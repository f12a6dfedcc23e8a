"""Router replay: routes that come with the batch, and routes that were recorded, on any layout."""

import lightning.pytorch as L
import pytest
import torch

from lightning_dcp import ConfigurationError, PackedBatch, RouterReplay
from lightning_dcp.batch.view import view
from lightning_dcp.data import COLLATORS
from lightning_dcp.errors import BatchError, RegionError
from lightning_dcp.models.megatron.replay import LayerReplay, Mode, ModelReplay, MoELayers, RouteStore, TokenPart
from lightning_dcp.models.megatron.replay.binding import live_routers, moe_layers
from lightning_dcp.models.megatron.scope import PackScope, Scope
from lightning_dcp.models.megatron.weights import whole_weights
from lightning_dcp.parallel.context import make_context
from lightning_dcp.parallel.groups import CPGroup
from lightning_dcp.parallel.layout import build_layout
from tests.megatron import runs
from tests.megatron.test_parity import LENGTHS
from tests.support.plans import GivenPlan
from tests.support.ranks import RankFailure
from tests.support.training import RaggedTokens, assert_same, trainer

EXPERTS, LAYERS = 4, 3
CONFIG = runs.MOE | {"num_layers": 4, "moe_layer_freq": [0, 1, 1, 1]}
"""All layers but the first have experts: with a virtual pipeline, both chunks of one stage and one of the other."""
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def scrambled(model):
    """Send each token to the experts that it liked least: no replayed route is the live one."""
    for router in live_routers(model):
        router.weight.data.neg_()


def made_up_routes(index, tokens):
    """Two different experts for each token and layer, of no router's choosing."""
    t, layer = torch.arange(tokens)[:, None], torch.arange(LAYERS)[None]
    first = (t + layer) % EXPERTS
    return torch.stack([first, (first + 1 + (index + t) % 3) % EXPERTS], dim=-1)


class Routed(RaggedTokens):
    """Samples that know their routes."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return sample | {"routed_experts": made_up_routes(index, len(sample["input_ids"])).to(torch.uint8)}


def routed(fmt="packed"):
    collate = COLLATORS[fmt]
    if fmt == "packed":
        return torch.utils.data.DataLoader(Routed(LENGTHS), batch_size=3, collate_fn=collate)
    return torch.utils.data.DataLoader(
        Routed(LENGTHS),
        batch_size=3,
        collate_fn=lambda samples: collate(samples) | {"sample_ids": [sample["index"] for sample in samples]},
    )


class Policy(runs.SmallGPT):
    """Replays in its step if it is told to, else leaves it to the loop.

    The backward comes when the step has ended: layers that run again in it must replay as well.
    """

    def __init__(self, config, replay=None, scramble=False):
        super().__init__(config)
        self.replay, self.scramble = replay, scramble
        self.compared = []

    def on_train_start(self):
        if self.scramble:
            scrambled(self.model)

    def training_step(self, batch, batch_idx):
        if self.replay is None:
            return self._loss(batch)[0]
        live = None
        if self.replay.field is None:
            with torch.no_grad(), self.replay.record():
                self._loss(batch)
            live = self._loss(batch)[0].detach()
        with self.replay.replay():
            loss = self._loss(batch)[0]
        self.compared.append((live, loss.detach().clone()))
        return loss

    def predict_step(self, batch, batch_idx):
        return self.model(input_ids=batch["input_ids"])


PLANS = {
    1: [[(0, 1, [0]), (0, 1, [1, 2])]],
    2: [[(0, 2, [0]), (0, 1, [1]), (1, 1, [2])], [(0, 1, [1]), (1, 1, [0]), (0, 2, [2])]],
    4: [[(0, 4, [0]), (0, 2, [1]), (2, 2, [2])], [(0, 2, [1, 2]), (2, 2, [0])]],
}
"""By ranks of the plane: plans for batches of three samples, in other orders and sizes."""


def plan(ranks, number):
    return GivenPlan(ranks, PLANS[ranks][number % len(PLANS[ranks])])


def run(method, model, replay, strategy, world, number, fmt="packed"):
    sizes = strategy.get("tensor_model_parallel_size", 1) * strategy.get("pipeline_model_parallel_size", 1)
    recorder = runs.WholeGradients()
    made = trainer(
        strategy={"scheduler": plan(world // sizes, number)} | strategy,
        callbacks=[recorder, *([] if replay is None else [replay])],
    )
    getattr(made, method)(model, routed(fmt))
    if method != "fit":
        return None
    return {
        "losses": recorder.losses,
        "gradients": recorder.gradients,
        "weights": whole_weights(model.model),
        "logged": {},
    }


def parity_job(world, strategy, recompute=False, fmt="packed"):
    """R3; R2 over two passes with other CP sizes; R2 in one step, where there is no pipeline."""
    config = CONFIG | (RECOMPUTED if recompute else {})
    replay = RouterReplay(field="routed_experts", replay=[])
    found = {"R3": run("fit", Policy(config, replay), replay, strategy, world, 0, fmt)}
    replay = RouterReplay(record=["predict"])
    run("predict", Policy(config), replay, strategy, world, 1, fmt)
    routes = {index: replay.routes(index) for index in range(len(LENGTHS))}
    found["R2"] = run("fit", Policy(config, scramble=True), replay, strategy, world, 0, fmt)
    if strategy.get("pipeline_model_parallel_size", 1) == 1:
        replay = RouterReplay()
        model = Policy(config, replay)
        found["in step"] = run("fit", model, replay, strategy, world, 1, fmt)
        found["compared"] = model.compared
    return found, routes


@pytest.fixture(scope="module")
def alone(ranks):
    return ranks.run(parity_job, 1, 1, {})[0]


@pytest.fixture(scope="module")
def live(ranks):
    return ranks.run(live_job, 1)[0]


def live_job():
    return [
        run("fit", Policy(CONFIG), None, {}, 1, 0),
        run("fit", Policy(CONFIG, scramble=True), None, {}, 1, 0),
    ]


STAGES = {"PP2": ([0], [1, 2]), "VPP2xPP2": ([1], [0, 2])}
"""Which of the layers with experts each stage has."""
LAYOUTS = {
    "CP2": (2, {}, {}),
    "CP2 recomputed, padded": (2, {}, {"recompute": True, "fmt": "padded"}),
    "CP4, EP2": (4, {"expert_model_parallel_size": 2}, {}),
    "TP2+SP": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"recompute": True}),
    "PP2": (4, {"pipeline_model_parallel_size": 2}, {"recompute": True}),
    "VPP2xPP2": (4, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, {"fmt": "jagged"}),
}
IN_SHORT = ("CP2 recomputed, padded", "TP2+SP")
"""What make test runs; the others are near-repeats."""


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name in IN_SHORT else pytest.mark.slow) for name in LAYOUTS]
)
def test_replayed_training_agrees_with_one_process(ranks, alone, layout):
    world, strategy, options = LAYOUTS[layout]
    expected, routes = alone
    stages = STAGES.get(layout, ([0, 1, 2],))
    for rank, (own, recorded) in enumerate(ranks.run(parity_job, world, world, strategy, **options)):
        for name in own:
            if name != "compared":
                assert_same(own[name], expected[name], 1e-9)
        for live, replayed in own.get("compared", []):
            assert torch.equal(live, replayed)  # a model's own routes change nothing
        layers = stages[rank * len(stages) // world]
        for index, whole in routes.items():
            assert torch.equal(recorded[index].sort(-1).values, whole[:, layers].sort(-1).values)


def test_one_process_replays_what_its_router_would_not_choose(alone, live):
    """Else parity would say nothing: with the same weights, live routers give other losses."""
    found, routes = alone
    assert abs(found["R3"]["losses"][0] - live[0]["losses"][0]) > 1e-3
    assert abs(found["R2"]["losses"][0] - live[1]["losses"][0]) > 1e-3
    assert all(torch.equal(a, b) for a, b in found["compared"])
    assert len(found["compared"]) == 4  # both packs of both batches
    for index, length in enumerate(LENGTHS):
        assert routes[index].shape == (length, LAYERS, 2)
        assert routes[index].dtype == torch.int8
        first, second = routes[index].unbind(-1)
        assert int(routes[index].min()) >= 0
        assert bool((first != second).all())
    router = [name for name in found["R2"]["gradients"][0] if name.endswith("router.weight")]
    assert len(router) == LAYERS
    assert all(found["R2"]["gradients"][0][name].abs().max() > 1e-6 for name in router)


def scope_of(lengths, size, rank, samples=None):
    context = make_context(CPGroup(None, tuple(range(size))), rank, lengths)
    return PackScope(context, samples=tuple(range(len(lengths))) if samples is None else samples)


def alternating(context, rows):
    """A router's choice: token t of the pack goes to t mod 4; fill tokens to 3."""
    index = torch.full((rows,), 3)
    index[: context.num_local_tokens] = context.pack_index % EXPERTS
    return index[:, None]


def made_replays(count, part=None):
    """Routes of one layer of a model on each of so many ranks, with one router each, that meet in no process group."""
    layers = MoELayers((1,), (1,), 1, EXPERTS, 1)
    replays = [ModelReplay(layers, RouteStore((1,)), part or TokenPart()) for _ in range(count)]
    return [LayerReplay(replay, 0, Scope()) for replay in replays]


def routed_by(layer, scope, indices=None):
    """What a router with this object does in a call; without indices no router may be asked for its own choice."""
    rows = scope.context.num_region_tokens
    scores = torch.rand(rows, EXPERTS, dtype=torch.float64)

    def choose(scores, topk, num_groups=None, group_topk=None):
        chosen = torch.full((rows, 1), 3) if indices is None else indices
        return scores.gather(1, chosen), chosen

    with layer.scope.inside(scope):
        weights, chosen = layer.get_replay_topk(scores, 1, None, None, choose)
    assert torch.equal(weights, scores.gather(1, chosen))
    return chosen[: scope.context.num_local_tokens, 0]


@pytest.mark.parametrize(("recorded_on", "replayed_on"), [(1, 2), (2, 1), (2, 4)])
def test_each_token_keeps_its_expert_at_another_cp_size(recorded_on, replayed_on):
    """Alignment padding was recorded in another system, which moved the routes of all tokens behind it."""
    lengths = (3, 5)
    batch = view(PackedBatch({"input_ids": torch.arange(8)[None]}, torch.tensor([0, 3, 8])))
    before, after = made_replays(recorded_on), made_replays(replayed_on)
    pieces = []
    for rank, layer in enumerate(before):
        layer.model.begin(batch, Mode.RECORD, None)
        scope = scope_of(lengths, recorded_on, rank)
        routed_by(layer, scope, alternating(scope.context, scope.context.num_region_tokens))
        pieces.append(layer.model._pieces())
    before[0].model.keep(lambda own: pieces)
    for rank, layer in enumerate(after):
        layer.model.store = before[0].model.store
        layer.model.begin(batch, Mode.REPLAY, None)
        scope = scope_of(lengths, replayed_on, rank)
        assert torch.equal(routed_by(layer, scope), scope.context.pack_index % EXPERTS)
    # a sample alone, and the samples in another order
    scope = scope_of((5, 3), 1, 0, samples=(1, 0))
    one = after[0]
    assert routed_by(one, scope).tolist() == [3, 0, 1, 2, 3, 0, 1, 2]


def test_tokens_lie_on_ranks_as_they_always_did():
    layout = build_layout("zigzag", (4, 4), 2)
    assert [layout.pack_index(rank).tolist() for rank in range(2)] == [[0, 3, 4, 7], [1, 2, 5, 6]]


def test_a_call_that_runs_again_does_what_it_did_whatever_the_mode_is():
    batch = view(PackedBatch({"input_ids": torch.arange(8)[None]}, torch.tensor([0, 3, 8])))
    (layer,) = made_replays(1)
    layer.model.begin(batch, Mode.RECORD, None)
    recorded, replayed, alive = (scope_of((3, 5), 1, 0) for _ in range(3))
    own = alternating(recorded.context, 8)
    routed_by(layer, recorded, own)
    layer.model.mode = Mode.REPLAY
    assert torch.equal(routed_by(layer, replayed), own[:, 0])
    layer.model.mode = Mode.LIVE
    other = (own + 1) % EXPERTS
    assert torch.equal(routed_by(layer, alive, other), other[:, 0])
    layer.model.mode = Mode.RECORD
    assert torch.equal(routed_by(layer, replayed, other), own[:, 0])
    layer.model.mode = Mode.REPLAY
    assert torch.equal(routed_by(layer, alive, other), other[:, 0])


def layered(count):
    """Routers of several layers of one model."""
    numbers = tuple(range(1, count + 1))
    replay = ModelReplay(MoELayers(numbers, numbers, count, EXPERTS, 1), RouteStore(numbers), TokenPart())
    scope = Scope()
    return replay, [LayerReplay(replay, index, scope) for index in range(count)]


def test_a_second_recorded_call_leaves_the_first_as_it_was():
    """Also when the first records again, in its backward, after the second."""
    batch = view(PackedBatch({"input_ids": torch.arange(8)[None]}, torch.tensor([0, 3, 8])))
    replay, layers = layered(2)
    replay.begin(batch, Mode.RECORD, None)
    first, second = scope_of((3, 5), 1, 0), scope_of((3, 5), 1, 0)
    own = alternating(first.context, 8)
    for scope, shift in ((first, 0), (second, 1)):
        for layer in layers:
            routed_by(layer, scope, (own + shift) % EXPERTS)
    assert torch.equal(replay.call(first).recorded([0, 1])[:, 0], own)
    routed_by(layers[0], first, (own + 2) % EXPERTS)
    replay.mode = Mode.REPLAY
    replayed = scope_of((3, 5), 1, 0)
    assert all(torch.equal(routed_by(layer, replayed), (own[:, 0] + 1) % EXPERTS) for layer in layers)


def test_chunks_of_a_virtual_pipeline_are_recorded_together():
    """A pack that runs twice, to fill a round, goes through a chunk twice before the next begins."""
    batch = view(PackedBatch({"input_ids": torch.arange(8)[None]}, torch.tensor([0, 3, 8])))
    replay, layers = layered(2)
    replay.begin(batch, Mode.RECORD, None)
    own = alternating(scope_of((3, 5), 1, 0).context, 8)
    for layer, experts in ((0, own), (0, own), (1, 3 - own), (1, 3 - own)):
        routed_by(layers[layer], scope_of((3, 5), 1, 0), experts)
    replay.keep(lambda pieces: [pieces])
    assert torch.equal(replay.store.packed(batch, (0, 1))[..., 0], torch.cat([own, 3 - own], 1).to(torch.int8))


class Compared(Policy):
    """Calls the model on the batch, on equal tokens, and on others of the same lengths."""

    def __init__(self, *args):
        super().__init__(*args)
        self.refused = []

    def training_step(self, batch, batch_idx):
        ids = batch["input_ids"]
        for tokens in (ids, ids.clone(), (ids + 1) % 17):
            try:
                with torch.no_grad():
                    self.model(input_ids=tokens)
                self.refused.append(None)
            except RegionError as error:
                self.refused.append(str(error))
        with self.replay.live():
            return self.model(input_ids=(ids + 1) % 17).sum()


def compared_job(fmt, world=2):
    replay = RouterReplay(field="routed_experts")
    model = Compared(CONFIG, replay)
    run("fit", model, replay, {}, world, 0, fmt)
    return model.refused


@pytest.mark.parametrize(
    "fmt", ["packed", *(pytest.param(fmt, marks=pytest.mark.slow) for fmt in ("padded", "jagged"))]
)
def test_routes_are_not_for_other_tokens_of_the_same_lengths(ranks, fmt):
    for refused in ranks.run(compared_job, 2, fmt):
        assert refused
        for same, equal, other in zip(*(refused[i::3] for i in range(3)), strict=True):
            assert same is equal is None
            assert "other sequences than the batch's samples" in other


def test_routes_of_other_tokens_are_refused():
    def packed(tokens, ids):
        return view(PackedBatch({"input_ids": torch.tensor([tokens])}, torch.tensor([0, len(tokens)]), ids))

    (layer,) = made_replays(1)
    scope = scope_of((3,), 1, 0)
    layer.model.begin(packed([5, 6, 7], [9]), Mode.RECORD, None)
    routed_by(layer, scope, torch.zeros(3, 1, dtype=torch.int64))
    layer.model.keep(lambda own: [own])
    for tokens, ids, message in [([5, 6, 8], [9], "other tokens"), ([5, 6, 7], [4], "no routes of sample 4")]:
        layer.model.begin(packed(tokens, ids), Mode.REPLAY, None)
        with pytest.raises(BatchError, match=message):
            routed_by(layer, scope_of((3,), 1, 0))
    with pytest.raises(RegionError, match="other sequences"):
        routed_by(layer, PackScope(scope.context))
    with pytest.raises(RegionError, match="outside a step"):
        layer.get_replay_topk(torch.rand(3, EXPERTS), 1, None, None, lambda *args: None)


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (torch.zeros(1, 3, 2), "integers"),
        (torch.zeros(1, 3, 2, 2, dtype=torch.int64), r"sample 7 to experts \[0, 0\]"),
        (torch.tensor([0, 4]).expand(1, 3, 2, 2), r"\[0, 4\]"),
        (torch.tensor([0, -1]).expand(1, 3, 2, 2), r"\[0, -1\]"),
        (torch.tensor([0, 1]).expand(1, 3, 3, 2), r"\[3, 2\] entries a token.*2 mixture-of-experts layers among 4"),
        (torch.tensor([0, 1, 2]).expand(1, 3, 2, 3), "moe_router_topk=2"),
        (None, "NoneType"),
    ],
)
def test_fields_that_are_no_routes_are_refused(routes, message):
    fields = {"input_ids": torch.arange(3)[None]} | ({} if routes is None else {"routed_experts": routes})
    replay = ModelReplay(MoELayers((2, 3), (2, 3), 4, EXPERTS, 2), RouteStore((2, 3)), TokenPart())
    replay.begin(view(PackedBatch(fields, torch.tensor([0, 3]), [7])), Mode.REPLAY, "routed_experts")
    with pytest.raises(BatchError, match=message):
        replay.call(scope_of((3,), 1, 0))


@pytest.mark.parametrize("layers", [2, 4])
def test_tokens_without_a_route_are_routed_live(layers):
    """Fields may count all layers of the model, or those with experts."""
    given = torch.tensor([0, 1]).repeat(1, 3, layers, 1)
    given[0, 2] = -1
    replay = ModelReplay(MoELayers((2, 3), (3,), 4, EXPERTS, 2), RouteStore((3,)), TokenPart())
    fields = {"input_ids": torch.arange(3)[None], "routed_experts": given}
    replay.begin(view(PackedBatch(fields, torch.tensor([0, 3]))), Mode.REPLAY, "routed_experts")
    layer = LayerReplay(replay, 0, Scope())
    with layer.scope.inside(scope_of((3,), 1, 0)):
        _, chosen = layer.get_replay_topk(
            torch.tensor([[0.0, 1, 2, 3]] * 3), 2, None, None, lambda scores, k, *limits: scores.topk(k)
        )
    assert chosen.tolist() == [[0, 1], [0, 1], [3, 2]]


@pytest.mark.parametrize("arguments", [{"record": ["fit"]}, {"record": ["train"], "replay": ["train"]}])
def test_loops_that_make_no_sense_are_refused(arguments):
    with pytest.raises(ConfigurationError, match="1 problem"):
        RouterReplay(**arguments)
    with pytest.raises(ConfigurationError, match="two sources"):
        RouterReplay(field="routed_experts", keep=True)


class TwoModels(Policy):
    """A policy and a second model with experts, rebuilt by every configure_model."""

    def configure_model(self):
        self.model = self.second = None
        super().configure_model()
        first, self.model = self.model, None
        super().configure_model()
        self.second = self.model
        self.model = first


def binding_job():
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
    from megatron.core.transformer.moe.router_replay import RouterReplay as OfMegatron

    replay = RouterReplay(field="routed_experts")
    seen = []

    class Look(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            models = [model for model in (module.model, getattr(module, "second", None)) if model is not None]
            seen.append([[router.router_replay for router in live_routers(model)] for model in models])
            seen[-1].append([len(moe_layers(model)) for model in models])

    def fit(model, replay, look=None):
        made = trainer(strategy={}, callbacks=[c for c in (replay, look) if c is not None], max_steps=1)
        made.fit(model, routed())

    model = TwoModels(CONFIG)
    fit(model, replay, Look())
    unbound = [router.router_replay for router in live_routers(model.model)]
    fit(model, replay, Look())  # configure_model has made both anew
    (first, second, counts), (again, _, counts_again) = seen
    assert counts == counts_again == [LAYERS, LAYERS]
    assert len({id(x) for x in [*first, *second, *again]}) == 3 * LAYERS
    assert len({id(x.model) for x in first}) == 1
    assert first[0].model is not second[0].model
    assert unbound == [None] * LAYERS

    dense = runs.SmallGPT(runs.DENSE)
    fit(dense, RouterReplay())  # there, and off
    assert OfMegatron.global_router_replay_instances == []

    errors = {}

    class Odd(Policy):
        """Asks for what takes no routes, and for a layer with experts that is not there."""

        def configure_model(self):
            super().configure_model()
            config = self.model.config
            config.moe_layer_freq, config.moe_router_fusion, config.moe_enable_routing_replay = [0, 1, 1, 0], True, True

    for name, model, own in [
        ("dense", runs.SmallGPT(runs.DENSE), RouterReplay(field="routed_experts")),
        ("odd", Odd(CONFIG), RouterReplay(field="routed_experts")),
        ("other loop", Policy(CONFIG), RouterReplay(record=["predict"])),
    ]:
        try:
            fit(model, own)
        except (ConfigurationError, BatchError) as error:
            errors[name] = str(error)

    weights = {}
    for pre in (True, False):
        logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
        layers = MoELayers((1,), (1,), 1, EXPERTS, 2)
        fields = {"input_ids": torch.zeros(1, 1, dtype=torch.int64), "r": torch.tensor([[[[3, 1]]]])}
        model_replay = ModelReplay(layers, RouteStore((1,)), TokenPart())
        model_replay.begin(view(PackedBatch(fields, torch.tensor([0, 1]))), Mode.REPLAY, "r")
        layer = LayerReplay(model_replay, 0, Scope())
        with layer.scope.inside(scope_of((1,), 1, 0)):
            probs, chosen = topk_routing_with_score_function(logits, 2, use_pre_softmax=pre, router_replay=layer)
        (gradient,) = torch.autograd.grad(probs[0, 3], logits)
        weights[pre] = (probs.detach()[0], chosen[0], gradient[0])
    return errors, weights


def test_routers_are_bound_by_model_and_misuse_is_refused(ranks):
    errors, weights = ranks.run(binding_job, 1)[0]
    assert "['model']" in errors["dense"]
    assert "of which [] have experts" in errors["dense"]
    assert "3 problem(s)" in errors["odd"]
    assert "do: moe_router_fusion=False" in errors["odd"]
    assert "moe_enable_routing_replay=True" in errors["odd"]
    assert "3 mixture-of-experts layers on this rank (numbers [2, 3, 4])" in errors["odd"]
    assert "makes 2 ([2, 3])" in errors["odd"]
    assert "no routes of sample 0" in errors["other loop"]

    logits = torch.tensor([2.0, 1.0, 0.0, -1.0], dtype=torch.float64)
    expected = {True: torch.softmax(logits, 0), False: torch.zeros(4, dtype=torch.float64)}
    expected[False][[3, 1]] = torch.softmax(logits[[3, 1]], 0)
    for pre, (probs, chosen, gradient) in weights.items():  # expert 3 is not in the live top 2
        assert chosen.tolist() == [False, True, False, True]
        torch.testing.assert_close(probs, expected[pre] * chosen, rtol=1e-6, atol=0)
        assert probs[3] > 0.01
        assert gradient.abs().max() > 0.01


def no_callback_job():
    replay = RouterReplay()
    run("fit", Policy(CONFIG, replay), None, {}, 1, 0)


def test_a_step_that_replays_without_the_callback_is_refused(ranks):
    with pytest.raises(RankFailure, match="Put the RouterReplay among the trainer's callbacks"):
        ranks.run(no_callback_job, 1)
