import copy
import pickle

import pytest
import torch
from torch import nn
from torchmetrics import (
    CatMetric,
    MaxMetric,
    MeanMetric,
    Metric,
    MetricCollection,
    MinMetric,
    PearsonCorrCoef,
    SumMetric,
)
from torchmetrics.classification import (
    BinaryAccuracy,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)
from torchmetrics.retrieval import RetrievalMRR
from torchmetrics.wrappers import MinMaxMetric, Running

from lightning_dcp.step.metric_state import StateSync, put_aside, state_of_update, value_of_states
from lightning_dcp.step.metrics import counted_once, metrics_of_batch, noting_calls

CLASSES = 5


class Module(nn.Module):
    """Metrics as users keep them: as attributes, in containers, in submodules."""

    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()
        self.accuracy = MulticlassAccuracy(num_classes=CLASSES, average="micro")
        self.inner = nn.ModuleDict({"all": CatMetric()})


def feed(module, seed, *, forward=False):
    """One batch for every metric; returns what forward gave."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(4, generator=generator)
    scores, labels = torch.rand(4, CLASSES, generator=generator), torch.randint(CLASSES, (4,), generator=generator)
    calls = [(module.mean, (values,)), (module.accuracy, (scores, labels)), (module.inner["all"], (values,))]
    return [metric(*given) if forward else metric.update(*given) for metric, given in calls]


def states(module):
    """Everything that a metric adds up, bit for bit."""
    found = {}
    for name, metric in module.named_modules():
        if isinstance(metric, Metric):
            for key, value in metric.metric_state.items():
                found[name, key] = [v.clone() for v in value] if isinstance(value, list) else value.clone()
            found[name, "updates"] = metric.update_count
    return found


def assert_same(ours, expected):
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, list):
            kept = [part for part in ours[key] if part.numel()]  # an empty part may stay, for its dimensions
            assert len(kept) == len(value)
            assert all(torch.equal(own, right) for own, right in zip(kept, value, strict=True)), key
        elif isinstance(value, torch.Tensor):
            assert torch.equal(ours[key], value), key
        else:
            assert ours[key] == value, key


def computed(module):
    return [metric.compute() for metric in module.modules() if isinstance(metric, Metric)]


updates = pytest.mark.parametrize("count", [1, 3])
forward_or_update = pytest.mark.parametrize("forward", [False, True], ids=["update", "forward"])
earlier = pytest.mark.parametrize("before", [0, 2], ids=["fresh", "used"])


@updates
@forward_or_update
@earlier
def test_ranks_that_do_not_lead_forget_the_update(count, forward, before):
    module = Module()
    for seed in range(before):
        feed(module, seed)
    expected = states(module)
    with counted_once(module, leader=False):
        for seed in range(10, 10 + count):
            feed(module, seed, forward=forward)
        assert module.mean.update_count == before + count
    assert_same(states(module), expected)


@updates
@forward_or_update
def test_leaders_keep_the_update(count, forward):
    ours, plain = Module(), Module()
    for seed in range(count):
        with counted_once(ours, leader=True):
            feed(ours, seed, forward=forward)
        feed(plain, seed, forward=forward)
    assert_same(states(ours), states(plain))
    assert all(torch.equal(own, right) for own, right in zip(computed(ours), computed(plain), strict=True))


@forward_or_update
def test_values_after_some_updates_counted_and_some_not(forward):
    ours, plain = Module(), Module()
    for seed in range(6):
        leader = seed % 3 != 1
        with counted_once(ours, leader=leader):
            feed(ours, seed, forward=forward)
        if leader:
            feed(plain, seed, forward=forward)
    assert_same(states(ours), states(plain))
    assert all(torch.equal(own, right) for own, right in zip(computed(ours), computed(plain), strict=True))


def test_values_computed_inside_are_not_remembered():
    module = Module()
    feed(module, 0)
    expected = module.mean.compute().clone()
    with counted_once(module, leader=False):
        feed(module, 1)
        assert not torch.equal(module.mean.compute(), expected)
    assert torch.equal(module.mean.compute(), expected)


@pytest.mark.parametrize("leader", [True, False])
def test_the_step_sees_the_same_values_on_every_rank(leader):
    module, plain = Module(), Module()
    with counted_once(module, leader=leader):
        inside = feed(module, 3, forward=True)
        inside.append(module.accuracy.compute())
    outside = [*feed(plain, 3, forward=True), plain.accuracy.compute()]
    assert all(torch.equal(own, right) for own, right in zip(inside, outside, strict=True))


def test_a_step_that_fails_changes_nothing():
    module = Module()
    feed(module, 0)
    expected = states(module)
    with pytest.raises(ValueError, match="the step"), counted_once(module, leader=False):
        feed(module, 1)
        raise ValueError("the step")
    assert_same(states(module), expected)


def test_a_reset_inside_is_undone():
    module = Module()
    feed(module, 0)
    expected = states(module)
    with counted_once(module, leader=False):
        module.mean.reset()
        module.inner["all"].reset()
    assert_same(states(module), expected)


def test_groups_of_metrics_that_share_a_state():
    def make():
        return nn.ModuleDict(
            {
                "scores": MetricCollection(
                    [
                        MulticlassAccuracy(num_classes=CLASSES, average="macro"),
                        MulticlassF1Score(num_classes=CLASSES, average="macro"),
                    ]
                )
            }
        )

    def batch(seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(9, CLASSES, generator=generator), torch.randint(CLASSES, (9,), generator=generator)

    ours, plain = make(), make()
    for seed, leader in enumerate([False, True, False, True, True, False]):
        with counted_once(ours, leader=leader):
            ours["scores"].update(*batch(seed))
            if seed == 2:
                ours["scores"].compute()
        if leader:
            plain["scores"].update(*batch(seed))
    expected = plain["scores"].compute()
    assert expected.keys() == ours["scores"].compute().keys()
    assert all(torch.equal(value, expected[name]) for name, value in ours["scores"].compute().items())


@pytest.mark.parametrize(
    "make", [lambda: Running(MeanMetric(), window=2), lambda: MinMaxMetric(MeanMetric())], ids=["running", "min-max"]
)
def test_metrics_that_keep_more_than_their_states(make):
    ours, plain = nn.ModuleList([make()]), nn.ModuleList([make()])
    for number, leader in enumerate([True, False, True, False, False, False, True, False]):
        value = torch.tensor([3.0, 100.0, -100.0, 5.0, 50.0, 1.0, 2.0, 70.0][number])
        with counted_once(ours, leader=leader):
            ours[0](value)
        if leader:
            plain[0](value)
    assert str(ours[0].compute()) == str(plain[0].compute())


def test_parameters_and_other_modules_are_left_alone():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = module[0].weight
    with counted_once(module, leader=False):
        module(torch.rand(4, 2))
        with torch.no_grad():
            module[0].weight.add_(1)
    assert module[0].weight is before
    assert int(module[1].num_batches_tracked) == 1


# ------------------------------------------------------------------ the value of a batch


def scores_of(generator, count):
    return torch.rand(count, CLASSES, generator=generator), torch.randint(CLASSES, (count,), generator=generator)


def numbers(generator, count):
    return (torch.rand(count, generator=generator),)


def pairs(generator, count):
    return torch.rand(count, generator=generator), torch.rand(count, generator=generator)


def queries(generator, count):
    relevant, query = (torch.randint(2, (count,), generator=generator) for _ in range(2))
    return torch.rand(count, generator=generator), relevant, query


OF_BATCH = {
    "accuracy": (lambda: MulticlassAccuracy(CLASSES, average="macro"), scores_of),
    "confusion": (lambda: MulticlassConfusionMatrix(CLASSES), scores_of),
    "area": (lambda: MulticlassAUROC(CLASSES), scores_of),
    "binned area": (lambda: MulticlassAUROC(CLASSES, thresholds=7), scores_of),
    "mean": (MeanMetric, numbers),
    "sum": (SumMetric, numbers),
    "max": (MaxMetric, numbers),
    "min": (MinMetric, numbers),
    "values": (CatMetric, numbers),
    "correlation": (PearsonCorrCoef, pairs),
    "rank": (RetrievalMRR, queries),
}


def assert_kept(ours, before):
    if isinstance(before, list):
        assert all(torch.equal(own, right) for own, right in zip(ours, before, strict=True))
    else:
        assert torch.equal(ours, before)


@pytest.mark.parametrize("name", OF_BATCH)
@pytest.mark.parametrize("sizes", [(7,), (3, 4), (1, 5, 2, 9)])
def test_the_value_of_a_batch_is_that_of_its_packs_together(name, sizes):
    make, draw = OF_BATCH[name]
    generator = torch.Generator().manual_seed(len(sizes))
    packs = [draw(generator, size) for size in sizes]
    ours, plain = make(), make()
    ours.update(*draw(generator, 6))  # of the epoch so far: it must neither count nor be lost
    before = {key: copy.deepcopy(value) for key, value in ours.metric_state.items()}
    states = [state_of_update(ours, pack, {}) for pack in packs]
    value = value_of_states(ours, pickle.loads(pickle.dumps(states)))
    expected = plain(*(torch.cat(parts) for parts in zip(*packs, strict=True)))
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    assert ours.update_count == 1
    for key, kept in before.items():
        now = getattr(ours, key)
        assert (
            all(torch.equal(a, b) for a, b in zip(now, kept, strict=True))
            if isinstance(kept, list)
            else torch.equal(now, kept)
        )


def test_a_collection_that_shares_lists_keeps_them_while_one_is_put_aside():
    collection = MetricCollection({name: MulticlassAUROC(CLASSES, average=name) for name in ("macro", "weighted")})
    collection.update(*scores_of(torch.Generator().manual_seed(0), 4))
    first, second = collection.values(copy_state=False)
    assert first.preds is second.preds
    with put_aside(first):
        assert first.preds == []
        assert len(second.preds) == 1
    assert len(first.preds) == len(second.preds) == 1


def test_only_the_last_call_of_a_step_is_its_value():
    module = Module()
    with noting_calls(module) as calls:
        assert calls.state(module.mean) is None
        module.mean(torch.tensor([100.0]))
        module.mean(torch.tensor([1.0, 2.0]))
        module.accuracy.update(torch.eye(CLASSES), torch.arange(CLASSES))
        state = calls.state(module.mean)
        assert calls.state(module.accuracy) is None
    assert float(value_of_states(module.mean, [state])) == 1.5
    assert float(module.mean.compute()) == pytest.approx(103 / 3)
    assert not {"forward"} & vars(module.mean).keys()


def test_an_update_with_nothing_in_it_is_left_out():
    module = Module()
    with noting_calls(module) as calls:
        empty = torch.empty(0, CLASSES), torch.empty(0, dtype=torch.long)
        module.accuracy.update(*empty)
        assert torch.isnan(module.accuracy(*empty))
        assert calls.state(module.accuracy) is None
    assert module.accuracy.update_count == 0
    with pytest.raises(RuntimeError):
        module.accuracy.update(*empty)


# ------------------------------------------------------------------ over ranks


def agreed_by_accident():
    """Two metrics that give the same on the first pack, of one token, and differ on the next."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    module = nn.ModuleDict({"both": MetricCollection({"low": BinaryAccuracy(0.3), "high": BinaryAccuracy(0.7)})})
    with metrics_of_batch(module, dist.group.WORLD):
        if dist.get_rank() == 0:
            module["both"].update(torch.tensor([0.9]), torch.tensor([1]))
            module["both"].update(torch.tensor([0.5]), torch.tensor([1]))
    return {name: float(value) for name, value in module["both"].compute().items()}


def test_metrics_that_happen_to_agree_on_the_first_pack_do_not_share_a_state(ranks):
    assert ranks.run(agreed_by_accident, 2) == [{"low": 1.0, "high": 0.5}] * 2


def computed_again():
    """A value that all ranks computed is forgotten on all, though only one has a pack afterwards; and copies work."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    module, rank = nn.ModuleList([SumMetric(), RetrievalMRR()]), dist.get_rank()
    given = [torch.tensor([0.5, 0.2]), torch.tensor([0, 1]), torch.tensor([rank, rank])]
    values = []
    for _ in range(2):
        with metrics_of_batch(module, dist.group.WORLD):
            if rank == 1:
                for _ in range(3):  # lists of unequal lengths
                    module[0].update(torch.tensor(2.0))
                    module[1].update(*given)
        values.append([float(metric.compute()) for metric in module])
    copied, saved = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    assert isinstance(vars(copied[0])["_sync_dist"], StateSync)
    assert vars(copied[0])["_sync_dist"].metric is copied[0]
    values.append([float(copied[0].compute()), float(saved[0].compute())])
    return values


def test_ranks_with_unequal_packs_compute_together(ranks):
    # the only relevant document of each query comes after 3 others, and after 6
    expected = [[6.0, 1 / 4], [12.0, 1 / 7], [12.0, 12.0]]
    for values in ranks.run(computed_again, 2):
        assert values == [pytest.approx(value) for value in expected]
