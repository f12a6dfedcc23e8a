"""How dense the tokens of each kind of segment are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from lightning_dcp.data.chat.messages import is_density
from lightning_dcp.errors import Problem, raise_problems

DENSITIES: Mapping[str, float] = MappingProxyType({"tool": 2.0, "tool_call": 1.5, "document": 1.5})
"""Densities of kinds that nothing else is said of; 1.0 for every other kind. A choice, not a measurement."""


def densities_of(given: Mapping[str, float] | str | None) -> dict[str, float]:
    """A density for each kind: those given, else :data:`DENSITIES`.

    Args:
        given: a mapping, or the path of a YAML file that holds one, ``kind: density``.

    Raises:
        ConfigurationError: a file that cannot be read, or everything that is no density.
    """
    found, problems = _read(given)
    raise_problems(problems)
    return dict(DENSITIES) | found


def density_problems(given: Mapping[str, float] | str | None) -> list[Problem]:
    """What is wrong with densities."""
    return _read(given)[1]


def _read(given: Mapping[str, float] | str | None) -> tuple[dict[str, float], list[Problem]]:
    values: Any = {} if given is None else given
    asked, remedy = f"densities={given!r}", "give kind: density for each kind, or a YAML file of these"
    if isinstance(given, str):
        try:
            values = yaml.safe_load(Path(given).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            return {}, [Problem(asked, f"cannot be read: {error}", remedy)]
    if not isinstance(values, Mapping):
        return {}, [Problem(asked, f"a {type(values).__name__}", remedy)]
    wrong = {kind: value for kind, value in values.items() if not (isinstance(kind, str) and is_density(value))}
    problems = [
        Problem(f"a density of {value!r} for {kind!r}", "no finite number above 0", "give one, beside 1.0 for text")
        for kind, value in wrong.items()
    ]
    return {kind: float(value) for kind, value in values.items() if kind not in wrong}, problems
