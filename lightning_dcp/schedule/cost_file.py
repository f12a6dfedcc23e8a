"""Cost models as YAML files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from lightning_dcp.errors import ConfigurationError, Problem
from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.hardware import HARDWARE, preset


def load_cost_model(source: CostModel | str | Path) -> CostModel:
    """A cost model: itself, the name of a preset (``a100``, ``h100``, ``h200``, ``cpu``), or a YAML file of its values.

    Raises:
        ConfigurationError: no such preset or file, not YAML, unknown names, bad values.
    """
    if isinstance(source, CostModel):
        return source
    if str(source).lower() in HARDWARE:
        return preset(str(source).lower())
    path = Path(source)
    try:
        values: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        remedy = f"give a file that `lightning-dcp calibrate` wrote, or one of {', '.join(HARDWARE)}"
        raise ConfigurationError([Problem(f"cost model {str(source)!r}", f"cannot be read: {error}", remedy)]) from None
    except yaml.YAMLError as error:
        found = f"not YAML: {error}"
        raise ConfigurationError([Problem(f"cost model {str(path)!r}", found, "write `name: value` lines")]) from None
    return CostModel.from_dict(values, source=str(path))


def save_cost_model(model: CostModel, path: str | Path, *, comment: str = "") -> None:
    """Write a cost model so that :func:`load_cost_model` reads the very same one.

    Args:
        model: what to write.
        path: the file.
        comment: lines put in front, such as where the numbers come from.
    """
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    Path(path).write_text(
        lines + yaml.safe_dump(model.to_dict(), sort_keys=False, default_flow_style=None), encoding="utf-8"
    )
