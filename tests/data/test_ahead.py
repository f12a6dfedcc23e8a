"""Reading one batch ahead changes nothing about what is read, and when errors are raised."""

import gc
import math
import weakref
from collections import UserList

import pytest
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader, IterableDataset

from lightning_dcp.data.ahead import AheadLoader, epoch_batches, read_ahead


class Log(list):
    """What was read, announced and handed out, in order."""

    def reading(self, batches, fail_at=None, error=ValueError):
        for number, batch in enumerate(batches):
            if number == fail_at:
                raise error("broken")
            self.append(("read", batch))
            yield batch

    def announced(self, batch):
        self.append(("announced", batch))


def test_each_batch_is_handed_out_after_the_next_one_is_announced():
    log = Log()
    for batch in read_ahead(log.reading("abc"), log.announced):
        log.append(("used", batch))
    steps = [
        *[("read", "a"), ("announced", "a")],
        *[("read", "b"), ("announced", "b"), ("used", "a")],
        *[("read", "c"), ("announced", "c"), ("used", "b")],
        ("used", "c"),
    ]
    assert log == steps


@pytest.mark.parametrize("size", [0, 1, 2, 5])
@pytest.mark.parametrize("most", [0, 1, 2, 4, 5, 9, math.inf])
def test_the_batches_are_the_same_whatever_limit_is_told(size, most):
    log = Log()
    assert list(read_ahead(log.reading(range(size)), log.announced, most)) == list(range(size))
    assert [batch for kind, batch in log if kind == "announced"] == list(range(size))


@pytest.mark.parametrize("most", [1, 3])
def test_nothing_is_read_beyond_what_will_be_asked_for(most):
    log = Log()
    reader = read_ahead(log.reading(range(9)), log.announced, most)
    assert [next(reader) for _ in range(most)] == list(range(most))
    assert [batch for kind, batch in log if kind == "read"] == list(range(most))


@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_an_error_is_raised_when_its_batch_is_asked_for(fail_at):
    log = Log()
    reader = read_ahead(log.reading(range(5), fail_at), log.announced)
    assert [next(reader) for _ in range(fail_at)] == list(range(fail_at))
    with pytest.raises(ValueError, match="broken"):
        next(reader)
    assert [batch for kind, batch in log if kind == "announced"] == list(range(fail_at))


def test_an_iterator_at_its_end_is_let_go_at_once():
    """Worker processes end with it; the garbage collector would come late, and wait for them."""

    class Source:
        def __init__(self):
            self.left = [1, 2]

        def __iter__(self):
            return self

        def __next__(self):
            if not self.left:
                raise StopIteration
            return self.left.pop(0)

    source = Source()
    watched = weakref.ref(source)
    reader = read_ahead(source, lambda batch: None)
    gc.disable()
    try:
        assert [next(reader), next(reader)] == [1, 2]
        assert list(reader) == []
        del source, reader
        assert watched() is None
    finally:
        gc.enable()


def test_an_interrupt_is_not_kept_waiting():
    log = Log()
    reader = read_ahead(log.reading(range(5), 1, KeyboardInterrupt), log.announced)
    with pytest.raises(KeyboardInterrupt):
        next(reader)


def test_nothing_happens_before_the_first_batch_is_asked_for():
    log = Log()
    reader = read_ahead(log.reading(range(3)), log.announced)
    assert log == []
    next(reader)
    assert log


def test_a_loader_keeps_its_attributes_and_what_is_set_reaches_it():
    inner = DataLoader(range(6), batch_size=2)
    loader = AheadLoader(inner, lambda batch: None, lambda wrapped: math.inf)
    assert (len(loader), loader.batch_size, loader.sampler) == (3, 2, inner.sampler)
    loader.worker_init_fn = print
    assert inner.worker_init_fn is print
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    assert not hasattr(loader, "state_dict")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def test_a_loader_without_length_has_none_either():
    loader = AheadLoader(DataLoader(Stream()), lambda batch: None, lambda wrapped: math.inf)
    assert sized_len(loader) is None
    assert len(list(loader)) == 3


def test_the_limit_is_asked_for_when_an_iteration_begins():
    log, limits = Log(), [1, 3]
    loader = AheadLoader(UserList("abcd"), log.announced, lambda wrapped: limits.pop(0))
    for expected in (["a"], ["a", "b", "c"]):
        log.clear()
        iterator = iter(loader)
        for _ in expected:
            next(iterator)
        assert [batch for _, batch in log] == expected


@pytest.mark.parametrize(
    ("loader", "limit", "expected"),
    [
        ([0] * 7, 1.0, 7),
        ([0] * 7, 0.5, 3),
        ([0] * 7, 3, 3),
        ([0] * 7, 99, 7),
        (iter([]), 1.0, math.inf),
        (iter([]), 4, 4),
        (DataLoader(Stream()), 1.0, math.inf),
    ],
)
def test_batches_of_an_epoch(loader, limit, expected):
    assert epoch_batches(loader, limit) == expected
