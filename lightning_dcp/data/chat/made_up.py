"""Made-up chats about orders of a shop: short ones, and a few with long tables that tools return one after another."""

from __future__ import annotations

from random import Random
from typing import Any

from lightning_dcp.data.chat.messages import as_json
from lightning_dcp.data.tokenizer import utf8

CITIES = ("Bergen", "Cusco", "Graz", "Kobe", "Lagos", "Malmö", "Oaxaca", "Porto", "Quito", "Tartu")
ITEMS = ("bolt", "brush", "cable", "hinge", "hose", "lamp", "plane", "pump", "valve", "wheel")
MATERIALS = ("brass", "copper", "oak", "rubber", "steel", "tin")
RULES = (
    "Goods may be returned within thirty days of delivery.",
    "Parts that were cut to size are not taken back.",
    "Damage in transit is reported within three days, with a picture.",
    "Orders of more than forty pieces are sent by freight.",
    "An invoice is sent with each delivery and is due in two weeks.",
)
SYSTEM = "You help the staff of a shop for hardware. Look orders up before you answer, and be brief."
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "find_orders",
            "description": "Orders of one item that went to one city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "item": {"type": "string"}},
                "required": ["city", "item"],
            },
        },
    }
]
MOST_ROWS = 36
"""Rows of the longest table."""


def made_up_chat(number: int, seed: int = 0) -> dict[str, Any]:
    """One chat in the messages format: the same for the same number and seed, on every machine.

    Of ten chats about six are talk alone, three look one thing up, and one compares several cities: then tables stand next
    to each other, up to some thousand bytes each.

    Args:
        number: which chat.
        seed: another one gives other chats.
    """
    random = Random(f"{seed} {number}")
    kind = random.random()
    if kind < 0.6:
        return {"messages": [_system(), *(m for _ in range(random.randint(1, 3)) for m in _talk(random))]}
    rounds, calls = (1, 1) if kind < 0.9 else (random.randint(1, 2), random.randint(2, 4))
    turns = [message for _ in range(rounds) for message in _look_up(random, calls)]
    return {"messages": [_system(), *turns], "tools": TOOLS}


def made_up_line(number: int, seed: int = 0) -> bytes:
    """The same chat as a line of JSON."""
    return utf8(as_json(made_up_chat(number, seed)))


def _system() -> dict[str, Any]:
    return {"role": "system", "content": SYSTEM}


def _talk(random: Random) -> list[dict[str, Any]]:
    """A question with its answer, or one about a document that comes with it."""
    if random.random() < 0.8:
        item, material = random.choice(ITEMS), random.choice(MATERIALS)
        question: Any = f"Do we have a {item} of {material}?"
        answer = f"Yes: a {item} of {material} is on shelf {len(item) + len(material)}."
    else:
        rules = random.sample(RULES, random.randint(2, len(RULES)))
        question = [{"type": "text", "text": "What is the last rule of this page?\n"}]
        question.append({"type": "text", "kind": "document", "text": "\n".join(rules)})
        answer = rules[-1]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _look_up(random: Random, calls: int) -> list[dict[str, Any]]:
    """A question that takes one look at the orders of each of some cities, and the answer."""
    item = random.choice(ITEMS)
    cities = random.sample(CITIES, calls)
    tables = [_orders(random, item) for _ in cities]
    most = max(cities, key=lambda city: _pieces(tables[cities.index(city)]))
    counts = ", ".join(f"{_pieces(table)} to {city}" for city, table in zip(cities, tables, strict=True))
    return [
        {"role": "user", "content": f"How many pieces of {item} went to {' and '.join(cities)}?"},
        {"role": "assistant", "content": "Let me look.", "tool_calls": [_call(city, item) for city in cities]},
        *({"role": "tool", "name": "find_orders", "content": as_json(table)} for table in tables),
        {"role": "assistant", "content": f"{counts}." if calls == 1 else f"{counts}. The most went to {most}."},
    ]


def _call(city: str, item: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": "find_orders", "arguments": as_json({"city": city, "item": item})},
    }


def _orders(random: Random, item: str) -> list[dict[str, Any]]:
    rows = min(MOST_ROWS, int(2 * random.paretovariate(0.9)))
    return [
        {
            "order": random.randint(10_000, 99_999),
            "item": f"{random.choice(MATERIALS)} {item}",
            "pieces": random.randint(1, 60),
            "paid": random.random() < 0.7,
        }
        for _ in range(rows)
    ]


def _pieces(table: list[dict[str, Any]]) -> int:
    return sum(row["pieces"] for row in table)
