"""Pictures without a display, by matplotlib, which is an extra of this package."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_dcp.errors import Problem, raise_problems

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".pdf", ".svg")
BOUND = "#d55e00"


def picture_problems(path: str | Path, option: str = "--plot") -> list[Problem]:
    """What keeps a picture from being written to ``path``: found before any work is done.

    Args:
        path: the file to be.
        option: how the user asked for it.
    """
    problems = []
    if find_spec("matplotlib") is None:
        problems.append(Problem(f"{option} {path}", "no matplotlib", "pip install 'lightning-dcp[report]'"))
    if Path(path).suffix.lower() not in SUFFIXES:
        problems.append(Problem(f"{option} {path}", "an unknown kind of picture", f"end it with {', '.join(SUFFIXES)}"))
    return problems + folder_problems(path, option)


def folder_problems(path: str | Path, option: str) -> list[Problem]:
    """What keeps any file from being written to ``path``.

    Args:
        path: the file to be.
        option: how the user asked for it.
    """
    if Path(path).is_dir():
        return [Problem(f"{option} {path}", "a folder", "name a file")]
    folder = Path(path).parent
    if not folder.is_dir():
        return [Problem(f"{option} {path}", f"no folder {folder}", "make it, or name another file")]
    if not os.access(folder, os.W_OK):
        return [Problem(f"{option} {path}", f"no right to write in {folder}", "name a file elsewhere")]
    return []


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this many inches, laid out by constraints, that belongs to no window.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise_problems([Problem("a picture", "no matplotlib", "pip install 'lightning-dcp[report]'")])
    return Figure(figsize=(width, height), layout="constrained")


def colours(sizes: list[int]) -> dict[int, str]:
    """A colour for each CP size, dark to light by size; distinct to colour-blind eyes and in grey.

    Args:
        sizes: CP sizes, ascending.
    """
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    steps = max(len(sizes) - 1, 1)
    return {size: to_hex(colormaps["viridis"](0.1 + 0.8 * i / steps)) for i, size in enumerate(sizes)}


def ink_on(colour: str) -> str:
    """Black or white, whichever is easier to read on this colour."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(colour)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
