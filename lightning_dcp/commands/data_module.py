"""Lengths of the batches that a Lightning data module makes, without reading samples where that can be avoided."""

from __future__ import annotations

from argparse import ArgumentError
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

import lightning_dcp.data  # noqa: F401  (so that configurations can name its classes in short)
from lightning_dcp.batch.view import view
from lightning_dcp.commands.options import cause_of, instantiate
from lightning_dcp.errors import ConfigurationError, DataError, Problem


def build_data_module(path: str) -> LightningDataModule:
    """Build what a YAML file describes.

    Args:
        path: ``class_path`` and ``init_args`` of a data module, or a whole configuration of a run with these under
            ``data:``.

    Raises:
        ConfigurationError: the file cannot be read, describes no data module, or one whose arguments are wrong.
    """
    values = _read(path)
    described = values.get("data", values) if isinstance(values, Mapping) else None
    if not isinstance(described, str) and not (isinstance(described, Mapping) and "class_path" in described):
        found = "no class_path, neither under data: nor at the top"
        raise _problem(path, found, "name the class: data: {class_path: ..., init_args: ...}")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--data", type=LightningDataModule, required=True)
    try:
        parsed = parser.parse_object({"data": described})
    except ArgumentError as error:
        raise _problem(path, str(error), "correct class_path and init_args") from None
    try:
        module: LightningDataModule = instantiate(parser, parsed).data
    except ValueError as error:
        raise cause_of(error) or error from None
    return module


def _read(path: str) -> Any:
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise _problem(path, f"cannot be read: {error}", "give a YAML file") from None


def _problem(path: str, found: str, remedy: str) -> ConfigurationError:
    return ConfigurationError([Problem(f"the data module of {path}", found, remedy)])


def batches_of(module: LightningDataModule, count: int, batch_size: int | None = None) -> list[Sequence[int]]:
    """Lengths of the first training batches, up to ``count`` of the loader's own size.

    Where the data set knows its ``lengths`` (one a sample, as :class:`~lightning_dcp.data.dataset.TokenDataset` does),
    the loader's sampler is asked for indices only and no sample is read; otherwise whole batches are read.

    Args:
        module: the data module; it is prepared and set up for training.
        count: most batches, of ``batch_size`` samples.
        batch_size: samples a batch; ``None``: the loader's own. The batches come as the loader makes them; only enough
            of them for ``count`` batches of this size are read.

    Raises:
        DataError: it makes no batches, or several loaders instead of one.
        BatchError: batches of an unknown format.
    """
    batches = list(_enough(_lengths(training_loader(module)), count, batch_size))
    if not batches:
        raise DataError(f"the training loader of {type(module).__name__} makes no batches")
    return batches


def training_loader(module: LightningDataModule) -> Iterable[Any]:
    """The training loader of a data module, which is prepared and set up.

    Raises:
        DataError: several loaders instead of one.
    """
    module.prepare_data()
    module.setup("fit")
    loader = module.train_dataloader()
    if isinstance(loader, Mapping | list | tuple) or not isinstance(loader, Iterable):
        found = type(loader).__name__
        raise DataError(
            f"train_dataloader() of {type(module).__name__} gave a {found}, not one loader: give a data module of one "
            "(for lengths alone, write them to a file and give that as --lengths)"
        )
    return loader


def _enough(batches: Iterator[Sequence[int]], count: int, batch_size: int | None) -> Iterator[Sequence[int]]:
    if batch_size is None:
        yield from islice(batches, count)
        return
    samples = 0
    for batch in batches:
        yield batch
        samples += len(batch)
        if samples >= count * batch_size:
            return


def _lengths(loader: Iterable[Any]) -> Iterator[Sequence[int]]:
    known = _known_lengths(loader)
    if known is not None and isinstance(loader, DataLoader) and loader.batch_sampler is not None:
        for indices in loader.batch_sampler:
            yield [known[index] for index in indices]
        return
    for batch in loader:
        seen = view(batch)
        seen.check()
        yield seen.lengths


def _known_lengths(loader: Iterable[Any]) -> Sequence[int] | None:
    """The data set's own ``lengths``, if it has one for each sample."""
    dataset: Any = getattr(loader, "dataset", ())
    lengths = getattr(dataset, "lengths", None)
    if isinstance(lengths, Sequence) and hasattr(dataset, "__len__") and len(lengths) == len(dataset):
        return lengths
    return None
