import lightning as L
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, SequentialSampler

from lightning_dcp.batch import PackedBatch
from lightning_dcp.data import (
    DocumentDataModule,
    EpochSampler,
    PythonLibraryDataModule,
    TextDataModule,
    pick_documents,
    python_library_documents,
    split_of,
)
from lightning_dcp.errors import ConfigurationError, DataError


@pytest.fixture
def corpus(tmp_path):
    for i in range(30):
        (tmp_path / f"{i:02}.txt").write_text("x" * (i + 1))
    return str(tmp_path)


def ids(loader):
    return [i for batch in loader for i in batch.sample_ids]


def set_up(module):
    module.setup("fit")
    return module


def test_library():
    module = set_up(PythonLibraryDataModule(limit=60, max_length=512, val_fraction=0.2, batch_size=4))
    documents = pick_documents(python_library_documents(), limit=60)
    assert list(module.train_dataset.documents) == [d for d in documents if split_of(d.id, 0.2) == "train"]
    assert list(module.val_dataset.documents) == [d for d in documents if split_of(d.id, 0.2) == "val"]
    batch = next(iter(module.train_dataloader()))
    assert isinstance(batch, PackedBatch)
    assert len(batch) == 4
    assert batch.max_seqlen <= 512
    lengths = module.train_dataset.lengths
    assert batch.lengths == tuple(lengths[i] for i in batch.sample_ids)


def test_loaders(corpus):
    module = set_up(TextDataModule(corpus, val_fraction=0.3, batch_size=4, seed=5))
    train, val = len(module.train_dataset), len(module.val_dataset)
    assert train + val == 30
    assert isinstance(module.train_dataloader().sampler, EpochSampler)
    assert module.train_dataloader().sampler.seed == 5
    shuffled = ids(module.train_dataloader())
    assert shuffled != sorted(shuffled) == list(range(train))
    for loader in (module.val_dataloader(), module.test_dataloader(), module.predict_dataloader()):
        assert type(loader) is DataLoader
        assert isinstance(loader.sampler, SequentialSampler)
        assert ids(loader) == list(range(val))


def test_options_reach_the_loaders(corpus):
    module = set_up(TextDataModule(corpus, shuffle=False, drop_last=True, batch_size=7, num_workers=1, format="padded"))
    train = module.train_dataloader()
    assert (train.batch_size, train.num_workers, train.drop_last) == (7, 1, True)
    assert list(train.sampler) == list(range(len(module.train_dataset)))
    assert not module.val_dataloader().drop_last
    assert set(next(iter(module.val_dataloader()))) == {"input_ids", "labels", "attention_mask"}
    kept = set_up(TextDataModule(corpus, num_workers=1, persistent_workers=True, pin_memory=True)).val_dataloader()
    assert kept.persistent_workers
    assert kept.pin_memory


def test_set_up_once_for_all_stages(corpus):
    module = set_up(TextDataModule(corpus))
    first = module.train_dataset
    module.setup("test")
    assert module.train_dataset is first


def test_all_argument_problems_at_once():
    bad = {"batch_size": 0, "max_length": 1, "format": "thd", "val_fraction": 1.0, "num_workers": -1, "limit": 0}
    with pytest.raises(ConfigurationError) as error:
        TextDataModule("x", suffixes=["txt", ".md"], **bad)
    asked = [problem.asked for problem in error.value.problems]
    assert sorted(asked) == sorted(
        [
            "suffixes=['txt', '.md']",
            "batch_size=0",
            "max_length=1",
            "format='thd'",
            "val_fraction=1.0",
            "num_workers=-1",
            "limit=0",
        ]
    )


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 2.5},
        {"batch_size": True},
        {"val_fraction": -0.1},
        {"val_fraction": float("nan")},
        {"val_fraction": "half"},
        {"format": ["packed"]},
        {"persistent_workers": True},
    ],
)
def test_each_argument_problem(options):
    with pytest.raises(ConfigurationError) as error:
        PythonLibraryDataModule(**options)
    assert len(error.value.problems) == 1
    with pytest.raises(ConfigurationError, match="no suffix"):
        TextDataModule("x", suffixes=[])


def test_split_that_leaves_a_side_empty(corpus):
    with pytest.raises(DataError, match=r"1 document\(s\) at val_fraction=0\.\d+ \(limit=1\) gave \d for training"):
        # whichever side the one document is on, the other is empty
        set_up(TextDataModule(corpus, limit=1))
    with pytest.raises(DataError, match=r"30 document\(s\).*gave 0 for training and 30 for validation"):
        set_up(TextDataModule(corpus, val_fraction=0.9999999))
    with pytest.raises(DataError, match=r"30 document\(s\).*gave 30 for training and 0 for validation"):
        set_up(TextDataModule(corpus, val_fraction=1e-9))
    with pytest.raises(DataError, match=r"drop_last=True leaves no batch of 31"):
        set_up(TextDataModule(corpus, batch_size=31, drop_last=True))


def test_without_validation(corpus):
    module = set_up(TextDataModule(corpus, val_fraction=0))
    assert len(module.train_dataset) == 30
    assert module.val_dataloader() == []
    with pytest.raises(DataError, match="val_fraction=0 leaves no documents"):
        module.test_dataloader()


def test_before_set_up_and_without_documents(corpus):
    with pytest.raises(DataError, match="not set up"):
        TextDataModule(corpus).train_dataloader()
    with pytest.raises(NotImplementedError, match="DocumentDataModule must define documents"):
        DocumentDataModule().setup()


class Counter(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen = {"train": 0, "val": 0, "test": 0, "predict": 0}

    def training_step(self, batch, batch_idx):
        self.seen["train"] += len(batch)
        return self.weight.sum()

    def validation_step(self, batch, batch_idx):
        self.seen["val"] += len(batch)

    def test_step(self, batch, batch_idx):
        self.seen["test"] += len(batch)

    def predict_step(self, batch, batch_idx):
        self.seen["predict"] += len(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("val_fraction", [0, 0.3])
def test_in_a_trainer(corpus, val_fraction):
    module = TextDataModule(corpus, val_fraction=val_fraction)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, num_sanity_val_steps=0, enable_model_summary=False, **options
    )
    model = Counter()
    trainer.fit(model, datamodule=module)
    train, val = len(module.train_dataset), len(module.val_dataset)
    assert model.seen == {"train": 2 * train, "val": 2 * val, "test": 0, "predict": 0}
    if val:
        trainer.test(model, datamodule=module, verbose=False)
        trainer.predict(model, datamodule=module)
        assert (model.seen["test"], model.seen["predict"]) == (val, val)


def test_from_the_command_line(corpus):
    args = [f"--data.path={corpus}", "--data.suffixes=[.txt]", "--data.batch_size=3", "--data.format=jagged"]
    cli = LightningCLI(BoringModel, TextDataModule, run=False, args=args, save_config_callback=None)
    module = cli.datamodule
    assert (module.suffixes, module.batch_size, module.format, module.limit) == ((".txt",), 3, "jagged", None)
