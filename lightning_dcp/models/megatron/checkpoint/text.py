"""Long lists of names in error messages."""

from __future__ import annotations

from collections.abc import Sequence

_MOST = 8


def listed(what: str, names: Sequence[str]) -> list[str]:
    """One line with the first names, or none if there are no names."""
    if not names:
        return []
    more = f", and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return [f"  {what}: {', '.join(sorted(names)[:_MOST])}{more}"]
