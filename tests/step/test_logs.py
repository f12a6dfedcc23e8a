import math
import pickle
from types import SimpleNamespace

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from lightning_dcp.errors import BatchError
from lightning_dcp.step.logs import WeightedLogs, recording, replay


class Module(L.LightningModule):
    """Keeps what is logged in the end."""

    def __init__(self, training=True):
        super().__init__()
        self.said = []
        self.given = SimpleNamespace(training=training)
        self.metric = MeanMetric()
        self.several = MetricCollection({"mean": MeanMetric(), "sum": SumMetric()}, prefix="m/")

    @property
    def trainer(self):
        return self.given

    def log(self, name, value, **options):
        self.said.append((name, value, options))


def record(module, step):
    with recording(module) as logs:
        step(module)
    return logs


def logged(steps, weights, samples=(1, 1), *, summed=False, module=None):
    """What is logged once for packs that run these steps."""
    module = module or Module()
    packs = [WeightedLogs(record(module, step), w, n) for step, w, n in zip(steps, weights, samples, strict=True)]
    replay(module, packs, samples=sum(samples), summed=summed)
    return module.said


def log(value, name="x", **options):
    return lambda module: module.log(name, value, **options)


def one(steps, weights=(0.25, 0.75), **options):
    ((_, value, _),) = logged(steps, weights, **options)
    return float(value)


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("make", [float, torch.tensor, lambda v: torch.tensor([v], dtype=torch.float64)])
def test_a_value_is_weighted_like_the_loss(make):
    assert one([log(make(4.0)), log(make(8.0))]) == 7.0


def test_a_value_is_weighted_by_the_batch_size_given():
    ((_, value, options),) = logged([log(4.0, batch_size=3), log(8.0, batch_size=1)], (0.25, 0.75))
    assert float(value) == 5.0
    assert options["batch_size"] == 4


def test_without_a_batch_size_lightning_gets_the_number_of_samples():
    ((_, _, options),) = logged([log(1.0), log(2.0)], (0.5, 0.5), samples=(5, 2))
    assert options == {"batch_size": 7}


@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [(name, 12.0) for name in ("sum", torch.sum, sum)]
    + [(name, 4.0) for name in ("min", min, torch.min)]
    + [(name, 8.0) for name in ("MAX", torch.max)]
    + [(name, 7.0) for name in ("mean", "avg", torch.mean)],
)
def test_reductions(reduce_fx, expected):
    assert one([log(4.0, reduce_fx=reduce_fx), log(8.0, reduce_fx=reduce_fx)]) == expected


def test_packs_without_weight_do_not_count_even_if_they_are_nan():
    assert one([log(math.nan), log(8.0)], (0.0, 1.0)) == 8.0
    assert one([log(math.nan, batch_size=0), log(8.0, batch_size=2)], (0.5, 0.5)) == 8.0


@pytest.mark.parametrize(("reduce_fx", "expected"), [("max", 8.0), ("min", 2.0), ("sum", 10.0), ("mean", 5.0)])
def test_a_nan_over_nothing_does_not_count_whatever_the_reduction(reduce_fx, expected):
    steps = [log(value, reduce_fx=reduce_fx) for value in (math.nan, 8.0, 2.0)]
    assert one(steps, (0.0, 0.5, 0.5), samples=(1, 1, 1)) == expected
    sized = [log(v, reduce_fx=reduce_fx, batch_size=n) for v, n in ((math.nan, 0), (8.0, 1), (2.0, 1))]
    assert one(sized, (0.2, 0.4, 0.4), samples=(1, 1, 1)) == expected
    sized[0] = log(math.nan, reduce_fx=reduce_fx, batch_size=3)  # sequences, of which none has a target
    assert one(sized, (0.0, 0.5, 0.5), samples=(3, 1, 1)) == expected


@pytest.mark.parametrize("reduce_fx", ["max", "min", "sum", "mean"])
def test_other_nans_and_other_values_without_weight_count(reduce_fx):
    nan, two = log(math.nan, reduce_fx=reduce_fx), log(2.0, reduce_fx=reduce_fx)
    assert math.isnan(one([two, nan], (0.5, 0.5)))
    assert math.isnan(one([two, nan], (0.0, 0.0)))  # a batch without any target: one process has NaN, too
    nine = log(9.0, reduce_fx=reduce_fx)
    assert one([nine, two], (0.0, 1.0)) == {"max": 9.0, "min": 2.0, "sum": 11.0, "mean": 2.0}[reduce_fx]


def test_without_any_weight_samples_count():
    assert one([log(1.0), log(4.0)], (0.0, 0.0), samples=(1, 2)) == 3.0
    assert one([log(1.0, batch_size=0), log(4.0, batch_size=0)], (0.0, 0.0), samples=(1, 2)) == 3.0


def test_dtypes_are_those_that_lightning_keeps():
    for value, kept in [
        (1, torch.float32),
        (torch.tensor(1), torch.float32),
        (torch.tensor(1.0).double(), torch.float64),
    ]:
        ((_, ours, _),) = logged([log(value), log(value)], (0.5, 0.5))
        assert (ours.dtype, ours.shape) == (kept, ())
    ((_, ours, _),) = logged([log(torch.tensor(1.0).bfloat16())], (1.0,), (1,))
    assert ours.dtype == torch.float32


def test_options_are_passed_on_but_for_those_of_ranks():
    options = {"prog_bar": True, "on_epoch": True, "add_dataloader_idx": False, "rank_zero_only": True, "logger": False}
    ((name, _, ours),) = logged([log(1.0, "a", sync_dist=True, sync_dist_group=3, **options)], (1.0,), (4,))
    assert name == "a"
    assert ours == options | {"batch_size": 4}


def test_values_lose_their_graphs():
    weight = torch.ones((), requires_grad=True)
    ((_, value, _),) = logged([log(weight * 2)], (1.0,), (1,))
    assert not value.requires_grad


def test_names_keep_their_order_and_calls_their_number():
    def step(module):
        for value, name in [(1.0, "b"), (2.0, "a"), (3.0, "b")]:
            module.log(name, value)

    assert [(name, float(value)) for name, value, _ in logged([step], (1.0,), (1,))] == [
        ("b", 1.0),
        ("b", 3.0),
        ("a", 2.0),
    ]


def test_log_dict_and_positional_arguments():
    ((first, _, options), _) = logged([lambda m: m.log_dict({"a": 1.0, "b": 2.0}, True)], (1.0,), (1,))
    assert first == "a"
    assert options["prog_bar"] is True


def test_the_module_has_its_own_log_again_even_after_an_error():
    module = Module()
    with pytest.raises(ValueError, match="step"), recording(module):
        raise ValueError("step")
    assert "log" not in vars(module)


def lightning_takes(reduce_fx):
    try:
        _Metadata("training_step", "x", reduce_fx=reduce_fx)
    except MisconfigurationException:
        return False
    return True


@pytest.mark.parametrize("value", [1.0, MeanMetric()], ids=["number", "metric"])
@pytest.mark.parametrize(
    "reduce_fx",
    [
        "mean",
        "AVG",
        "Max",
        "median",
        "",
        torch.mean,
        sum,
        max,
        torch.median,
        torch.nanmean,
        lambda x: x[0],
        [],
        None,
        3,
    ],
    ids=lambda given: getattr(given, "__name__", repr(given)),
)
def test_reductions_are_taken_that_lightning_takes_and_can_be_sent(reduce_fx, value):
    module = Module()
    module.metric = module.metric if isinstance(value, float) else value
    if lightning_takes(reduce_fx):
        logs = record(module, log(value, reduce_fx=reduce_fx))
        assert pickle.loads(pickle.dumps(logs))["x"][0].options["reduce_fx"] in ("mean", "max", "sum")
        return
    with pytest.raises(BatchError, match=r"'x', reduce_fx=.*Lightning knows mean, sum, min and max"):
        record(module, log(value, reduce_fx=reduce_fx))


# ------------------------------------------------------------------ metric objects


def calling(value):
    def step(module):
        module.metric(torch.tensor(value))
        module.log("m", module.metric, on_step=True, on_epoch=True)

    return step


def test_a_called_metric_has_the_value_of_the_batch():
    module = Module()
    module.metric(torch.tensor([100.0]))
    ((name, metric, options),) = logged([calling([1.0, 2.0]), calling([6.0])], (0.5, 0.5), module=module)
    assert name == "m"
    assert metric is module.metric
    assert float(metric._forward_cache) == 3.0
    assert options["metric_attribute"] == "metric"
    assert float(metric.compute()) == 109 / 4


@pytest.mark.parametrize(
    ("training", "options"), [(True, {"on_step": True}), (True, {"on_step": None}), (False, {"on_step": True})]
)
def test_an_updated_metric_has_no_value_for_the_batch(training, options):
    module = Module(training=training)
    module.metric(torch.tensor([100.0]))

    def step(module):
        module.metric.update(torch.tensor([1.0]))
        module.log("m", module.metric, **options)

    logged([step], (1.0,), (1,), module=module)
    assert module.metric._forward_cache is None


def test_collections():
    module = Module()

    def step(value):
        def run(module):
            module.several(torch.tensor(value))
            module.log_dict(module.several)

        return run

    said = logged([step([1.0, 2.0]), step([6.0])], (0.5, 0.5), module=module)
    assert {name: float(metric._forward_cache) for name, metric, _ in said} == {"m/mean": 3.0, "m/sum": 9.0}
    assert {options["metric_attribute"] for _, _, options in said} == {"several.mean", "several.sum"}


def test_a_metric_that_is_no_attribute_is_refused():
    with pytest.raises(BatchError, match="the metric is no attribute of the LightningModule"):
        record(Module(), log(MeanMetric(), "m"))


# ------------------------------------------------------------------ what is refused


def nothing(module):
    pass


def twice(module):
    log(1.0)(module)
    log(1.0)(module)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (log(1.0, "a"), log(1.0, "b"), r"with \['a', 'b'\] for some packs"),
        (log(1.0, "a"), nothing, r"with \['a'\] for some packs"),
        (nothing, log(1.0, "a"), r"with \['a'\] for some packs"),
        (log(1.0), twice, r"with \['x'\] for some packs .*not as often"),
        (log(1.0, reduce_fx="sum"), log(1.0, reduce_fx="max"), "different options"),
        (log(1.0, on_epoch=True), log(1.0), "different options"),
        (log(1.0, batch_size=2), log(1.0), "different options"),
        (log(1.0, enable_graph=True), nothing, "keeps no graph"),
        (log({"a": 1.0}), nothing, "got a dict; log a number"),
        (log("one"), nothing, "got a str; log a number"),
        (log(torch.ones(3)), nothing, r"a tensor of shape \[3\]; log a single element"),
    ],
)
def test_logs_without_a_right_value_are_refused(first, second, message):
    module = Module()
    with pytest.raises(BatchError, match=message):
        logged([first, second], (0.5, 0.5), module=module)
    assert module.said == []


def test_a_mean_of_a_summed_loss_must_say_what_it_is_over():
    for reduce_fx in ("mean", "avg", torch.mean):
        with pytest.raises(BatchError, match="is this value a sum or a mean"):
            one([log(1.0, reduce_fx=reduce_fx), log(2.0, reduce_fx=reduce_fx)], (1.0, 1.0), summed=True)
    assert one([log(1.0, reduce_fx="sum"), log(2.0, reduce_fx="sum")], (1.0, 1.0), summed=True) == 3.0
    assert one([log(1.0, batch_size=1), log(2.0, batch_size=3)], (1.0, 1.0), summed=True) == 1.75
