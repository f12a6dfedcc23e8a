"""Numbers and switches of a TransformerConfig that are given as text, as YAML reads ``"1e-5"`` or ``1e-5``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_dcp.errors import Problem

_SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def text_problems(fields: Mapping[str, Any]) -> Iterator[Problem]:
    """Fields whose value is text that stands for a number or a switch: no field takes such text.

    Megatron-Core checks no types: text of a number fails in a step, and any text switches a field on, ``"false"`` too.

    Args:
        fields: of the TransformerConfig, by name.
    """
    for name, value in fields.items():
        meant = meaning(value)
        if meant is None:
            continue
        kind = "switch" if isinstance(meant, bool) else "number"
        yield Problem(
            f"{name}={value!r} in the config", f"a {kind} as text", f"write it as a {kind}: {name}: {_yaml(meant)}"
        )


def meaning(value: Any) -> bool | int | float | None:
    """The number or switch that a text stands for; None for other text, and for what is no text."""
    if not isinstance(value, str):
        return None
    if value.strip().lower() in _SWITCHES:
        return _SWITCHES[value.strip().lower()]
    for number in (int, float):
        try:
            return number(value)
        except ValueError:
            continue
    return None


def _yaml(value: bool | int | float) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
