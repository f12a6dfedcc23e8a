"""The table of ``lightning-dcp bench attention``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.table import Table

from lightning_dcp.commands.bench_attention.measure import Row
from lightning_dcp.commands.bench_attention.work import ONE_RANK
from lightning_dcp.commands.bench_tables import milliseconds

_PLACE: dict[str, Callable[[Row], str]] = {
    "kind": lambda row: row.setting.kind.name,
    "kernel": lambda row: row.setting.kernel,
    "dtype": lambda row: row.setting.dtype,
    "pack": lambda row: row.setting.pack.name,
    "CP": lambda row: str(row.setting.size),
}
_NUMBERS: dict[str, Callable[[Row], str]] = {
    "forward\nms": lambda row: milliseconds(row.times.forward_s),
    "backward\nms": lambda row: milliseconds(row.times.backward_s),
    "both\nms": lambda row: milliseconds(row.times.both_s),
    "of\nideal": lambda row: "" if row.scheme == ONE_RANK else f"{row.share:.3f}",
    "auto\nexpects": lambda row: "" if row.estimate_s is None else _expected(row),
    "sent\nMB": lambda row: f"{row.sent_bytes / 1e6:,.3g}",
    "memory\nMB": lambda row: f"{row.peak_bytes / 1e6:,.4g}",
}


def attention_table(rows: Sequence[Row]) -> Table:
    """One row for each setting and scheme; what is the same in all of them is left to the title."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    places = [name for name, cell in _PLACE.items() if name in ("pack", "CP") or len(set(map(cell, rows))) > 1]
    for heading in (*places, "scheme"):
        table.add_column(heading, no_wrap=True)
    numbers = dict(_NUMBERS)
    if any(row.error is not None for row in rows):
        numbers["largest\nerror"] = _error_cell
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    last = None
    for row in rows:
        place = tuple(_PLACE[name](row) for name in places)
        shown = place if place != last else ("",) * len(place)
        table.add_row(*shown, row.scheme, *(cell(row) for cell in numbers.values()))
        last = place
    return table


def same_everywhere(rows: Sequence[Row]) -> str:
    """What the table does not show because it is the same in all rows."""
    values = [{cell(row) for row in rows} for name, cell in _PLACE.items() if name not in ("pack", "CP")]
    setting = rows[0].setting
    heads = f"{setting.heads} heads of {setting.head_dim} ({setting.kv_heads} key heads)"
    return ", ".join([*(value for each in values if len(each) == 1 for value in each), heads, setting.layout])


def _expected(row: Row) -> str:
    return milliseconds(row.estimate_s or 0.0) + (" picks" if row.is_picked else "")


def _error_cell(row: Row) -> str:
    if row.error is None:
        return ""
    return f"{row.error:.1e}" + (" wrong" if row.is_wrong else "")
