"""A directory bears a checkpoint's name only while it is complete."""

from pathlib import Path

import pytest

from lightning_dcp.errors import CheckpointError
from lightning_dcp.models.megatron.checkpoint.directory import begin, commit, is_sharded, local_path, remove, unfinished


def write(path: Path, content: str) -> None:
    begin(path)
    for name in ("metadata.json", "lightning.ckpt"):
        (unfinished(path) / name).write_text(content)


def test_a_checkpoint_has_its_name_once_it_is_committed(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "step=3.ckpt"
    write(path, "3")
    assert not is_sharded(path)
    commit(path)
    assert is_sharded(path)
    assert [p.name for p in path.parent.iterdir()] == ["step=3.ckpt"]


def test_what_an_interrupted_write_has_left_goes(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    begin(path)
    (unfinished(path) / "half").touch()
    begin(path)
    assert list(unfinished(path).iterdir()) == []


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_what_bore_the_name_before_is_replaced(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "last.ckpt", tmp_path / "step=2.ckpt"
    write(other, "2")
    commit(other)
    if kind == "link":
        path.symlink_to(other)
    elif kind == "file":
        path.write_text("1")
    else:
        write(path, "1")
        commit(path)
    write(path, "3")
    commit(path)
    assert (path / "metadata.json").read_text() == "3"
    assert (other / "metadata.json").read_text() == "2"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.ckpt", "step=2.ckpt"]
    remove(path)
    assert [p.name for p in tmp_path.iterdir()] == ["step=2.ckpt"]


def test_urls_are_refused() -> None:
    with pytest.raises(CheckpointError, match="a file system that all ranks share"):
        local_path("s3://bucket/step=3.ckpt")
