"""The loader alone: counting, skipping, workers, refusals."""

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from lightning_dcp.data import EpochSampler, ResumableLoader
from lightning_dcp.errors import ConfigurationError, DataError

ALL_WORKERS = pytest.mark.parametrize(
    ("num_workers", "persistent_workers"), [(0, False), (2, False), (2, True)], ids=["main", "workers", "persistent"]
)


class Numbers(Dataset):
    """Items are their own index; what has been read in this process is written down."""

    def __init__(self, size):
        self.size = size
        self.read = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def make(size=11, *, batch_size=2, sampler=None, limit=1.0, **options):
    dataset = Numbers(size)
    sampler = sampler(dataset) if sampler else EpochSampler(dataset, seed=3)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler, **({"collate_fn": list} | options))
    return ResumableLoader(loader, limit=limit)


def epochs(loader, first, count):
    out = []
    for epoch in range(first, first + count):
        loader.sampler.set_epoch(epoch)
        out.append(list(loader))
    return out


@ALL_WORKERS
@pytest.mark.parametrize("batches", [1, 4, 5])
def test_resumed_epochs_equal_uninterrupted_ones(num_workers, persistent_workers, batches):
    options = {"num_workers": num_workers, "persistent_workers": persistent_workers}
    whole = epochs(make(), 0, 3)
    first = make(**options)
    first.sampler.set_epoch(0)
    iterator = iter(first)
    head = [next(iterator) for _ in range(batches)]
    state = first.state_dict()
    assert state == {"batches": batches}
    second = make(**options)
    second.load_state_dict(state)
    assert second.state_dict() == state
    resumed = epochs(second, 0, 3)
    assert head + resumed[0] == whole[0]
    assert resumed[1:] == whole[1:]
    assert second.state_dict() == {"batches": 0}


@ALL_WORKERS
def test_a_loader_in_use_can_be_set_back(num_workers, persistent_workers):
    loader = make(num_workers=num_workers, persistent_workers=persistent_workers)
    whole = list(loader)
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict({"batches": 3})
    assert list(loader) == whole[3:]
    assert list(loader) == whole


def test_skipped_batches_are_not_read():
    loader = make()
    whole = [index for batch in make() for index in batch]
    loader.load_state_dict({"batches": 4})
    list(loader)
    assert loader.dataset.read == whole[8:]


def test_persistent_workers_are_the_same_from_epoch_to_epoch():
    loader = make(num_workers=2, persistent_workers=True)
    loader.load_state_dict({"batches": 2})
    list(loader)
    iterator = loader._iterator
    pids = [worker.pid for worker in iterator._workers]
    list(loader)
    assert loader._iterator is iterator
    assert [worker.pid for worker in loader._iterator._workers] == pids
    loader._iterator = None
    assert loader._loader._iterator is None


def test_iter_does_nothing_before_the_first_next():
    loader = make()
    loader.load_state_dict({"batches": 2})
    iterator = iter(loader)  # Lightning: in setup_data, before set_epoch
    unused = iter(loader)  # Lightning: only to see whether it can
    loader.sampler.set_epoch(5)
    other = make()
    other.sampler.set_epoch(5)
    assert list(iterator) == list(other)[2:]
    del unused


def test_state_counts_a_batch_as_soon_as_it_is_handed_out_and_wraps_at_the_end():
    loader = make()
    assert loader.state_dict() == {"batches": 0}
    counts = [loader.state_dict()["batches"] for _ in loader]
    assert counts == [1, 2, 3, 4, 5, 0]
    assert loader.state_dict() == {"batches": 0}


@pytest.mark.parametrize(("limit", "expected"), [(4, [1, 2, 3, 0]), (0.5, [1, 2, 0]), (99, [1, 2, 3, 4, 5, 0])])
def test_limit_is_where_the_trainer_ends_the_epoch(limit, expected):
    loader = make(limit=limit)
    iterator = iter(loader)
    counts = []
    for _ in expected:
        next(iterator)
        counts.append(loader.state_dict()["batches"])
    assert counts == expected
    assert len(loader) == 6


def test_an_abandoned_epoch_is_followed_by_a_whole_one():
    loader = make()
    whole = list(loader)
    next(iter(loader))
    assert list(loader) == whole


@ALL_WORKERS
@pytest.mark.parametrize("batches", [1, 4, 5])
def test_a_batch_that_was_only_read_ahead_is_read_again_by_a_resumed_epoch(num_workers, persistent_workers, batches):
    options = {"num_workers": num_workers, "persistent_workers": persistent_workers}
    whole = epochs(make(), 0, 2)
    first, announced = make(**options), []
    first.announce = announced.append
    first.sampler.set_epoch(0)
    iterator = iter(first)
    head = [next(iterator) for _ in range(batches)]
    assert first.state_dict() == {"batches": batches}
    assert announced == whole[0][: batches + 1]
    second = make(**options)
    second.announce = announced.append
    second.load_state_dict(first.state_dict())
    assert [head + epochs(second, 0, 1)[0], *epochs(second, 1, 1)] == whole
    assert second.state_dict() == {"batches": 0}


@pytest.mark.parametrize(("limit", "skip"), [(3, 0), (4, 2), (1.0, 0)])
def test_nothing_beyond_the_trainers_limit_is_read_ahead(limit, skip):
    loader = make(limit=limit)
    loader.announce = lambda batch: None
    loader.load_state_dict({"batches": skip})
    iterator = iter(loader)
    expected = [next(iterator) for _ in range((6 if limit == 1.0 else limit) - skip)]
    assert loader.dataset.read == [index for batch in expected for index in batch]
    assert loader.state_dict() == {"batches": 0}


def test_an_error_while_reading_ahead_leaves_the_batch_before_it_alone():
    class Broken(Numbers):
        def __getitem__(self, index):
            if index == 4:
                raise ValueError("broken")
            return index

    loader = ResumableLoader(DataLoader(Broken(8), batch_size=2, collate_fn=list))
    loader.announce = lambda batch: None
    iterator = iter(loader)
    assert [next(iterator), next(iterator)] == [[0, 1], [2, 3]]
    assert loader.state_dict() == {"batches": 2}
    with pytest.raises(ValueError, match="broken"):
        next(iterator)


@pytest.mark.parametrize("announce", [None, lambda batch: None])
def test_a_batch_sampler_without_length_is_counted_too(announce):
    class Batches:
        def __iter__(self):
            return iter([[0, 1], [2], [3, 4]])

    loader = ResumableLoader(DataLoader(Numbers(5), batch_sampler=Batches(), collate_fn=list))
    loader.announce = announce
    next(iter(loader))
    assert loader.state_dict() == {"batches": 1}
    loader.load_state_dict({"batches": 1})
    assert list(loader) == [[2], [3, 4]]


def test_without_batches():
    loader = make(batch_size=None, collate_fn=int)
    whole = list(loader)
    loader.load_state_dict({"batches": 7})
    assert list(loader) == whole[7:]
    assert isinstance(loader.sampler, EpochSampler)


def test_custom_batch_sampler_and_subclass():
    class Loader(DataLoader):
        extra = "kept"

    batches = [[0, 1], [2], [3, 4]]
    loader = ResumableLoader(Loader(Numbers(5), batch_sampler=batches, collate_fn=list))
    loader.load_state_dict({"batches": 1})
    assert (loader.extra, loader.batch_sampler, list(loader), len(loader)) == ("kept", batches, [[2], [3, 4]], 3)


def test_attributes_are_those_of_the_loader_and_the_loader_is_left_alone():
    dataset = Numbers(5)
    inner = DataLoader(dataset, batch_size=2, num_workers=2, drop_last=True)
    batch_sampler = inner.batch_sampler
    loader = ResumableLoader(inner)
    assert (loader.dataset, loader.num_workers, loader.drop_last, loader.batch_size) == (dataset, 2, True, 2)
    assert loader.sampler is inner.sampler
    assert loader.batch_sampler is batch_sampler is inner.batch_sampler
    with pytest.raises(AttributeError):
        _ = loader.no_such_attribute


def test_worker_init_fn_set_after_wrapping_reaches_the_workers(tmp_path):
    loader = make(num_workers=2)
    assert loader.worker_init_fn is None
    loader.worker_init_fn = lambda worker: (tmp_path / str(worker)).touch()
    list(loader)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def globally_random(dataset):
    return RandomSampler(dataset, generator=torch.Generator().manual_seed(0))


def weighted(dataset):
    return WeightedRandomSampler([1.0] * len(dataset), len(dataset))


def wrapped_by_lightning(dataset):
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper

    return DistributedSamplerWrapper(weighted(dataset), num_replicas=1, rank=0)


@pytest.mark.parametrize("sampler", [RandomSampler, globally_random, weighted, wrapped_by_lightning])
def test_order_from_a_global_random_state_cannot_be_resumed(sampler):
    loader = make(sampler=sampler)
    loader.load_state_dict({"batches": 0})  # an epoch's start needs no order restored
    with pytest.raises(DataError, match=r"EpochSampler.*DistributedSampler"):
        loader.load_state_dict({"batches": 1})


@pytest.mark.parametrize(
    "sampler", [SequentialSampler, EpochSampler, lambda d: DistributedSampler(d, num_replicas=2, rank=1)]
)
def test_order_from_a_seed_can(sampler):
    loader = make(sampler=sampler)
    whole = list(loader)
    loader.load_state_dict({"batches": 2})
    assert list(loader) == whole[2:]


@pytest.mark.parametrize("state", [{}, {"batches": -1}, {"batches": 1.5}, {"steps": 3}])
def test_foreign_states_are_refused(state):
    with pytest.raises(DataError, match="whole number"):
        make().load_state_dict(state)


def test_state_of_a_longer_epoch_is_refused():
    with pytest.raises(DataError, match="after 6 batches of an epoch that has only 6 now"):
        make().load_state_dict({"batches": 6})


@pytest.mark.parametrize("loader", [DataLoader(Stream()), [1, 2], ResumableLoader(DataLoader(Numbers(3)))])
def test_only_map_style_data_loaders_are_wrapped(loader):
    with pytest.raises(ConfigurationError, match="a resumable loader"):
        ResumableLoader(loader)
