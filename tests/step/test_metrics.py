import pytest
import torch
from torch import nn
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.wrappers import MinMaxMetric, Running

from lightning_dcp.step.metrics import counted_once

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
