"""Command-line options from a function's signature and docstring."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser, Namespace

from lightning_dcp.errors import DCPError


def parse(function: Callable[..., Any], args: Sequence[str], *, prog: str) -> dict[str, Any]:
    """The keyword arguments for ``function`` that a command line asks for.

    Beside what jsonargparse takes, options may be spelt with dashes, switches need no value, and lists may be given as
    several words or by repeating the option. Words that belong to no option are the required arguments that were not named,
    in their order (lists must be named). ``--config`` reads options from YAML, unless the function has an argument of that
    name. Bad options end the process with status 2, ``--help`` with 0.

    Args:
        function: annotated, described by a docstring with a section of arguments.
        args: the words after the command.
        prog: the command, for messages.
    """
    short, _, _ = (inspect.getdoc(function) or "").partition("\n")
    description = f"{short} Options may be spelt with dashes, too."
    if unnamed := _without_name(function):
        description += f" Without their names may be given: {', '.join(unnamed)}."
    parser = ArgumentParser(prog=prog, description=description)
    names = inspect.signature(function).parameters
    if "config" not in names:
        parser.add_argument("--config", action="config", help="YAML file of options")
    parser.add_function_arguments(function, as_group=False, fail_untyped=True)
    values = instantiate(parser, parser.parse_args(_normalised(function, args)))
    return {name: values[name] for name in names}


def instantiate(parser: ArgumentParser, values: Namespace) -> Namespace:
    """Build the objects that parsed values describe, by whichever name jsonargparse has for that."""
    build = getattr(parser, "instantiate", None) or parser.instantiate_classes
    built: Namespace = build(values)
    return built


def cause_of(error: BaseException) -> DCPError | None:
    """The error of this package behind another one: jsonargparse wraps what a class raises that it builds."""
    if isinstance(error, DCPError):
        return error
    return None if error.__cause__ is None else cause_of(error.__cause__)


def _normalised(function: Callable[..., Any], args: Sequence[str]) -> list[str]:
    """The same command line as jsonargparse wants it."""
    hints = get_type_hints(function)
    switches = {name for name, hint in hints.items() if hint is bool or set(get_args(hint)) == {bool, NoneType}}
    lists = {name: item for name, hint in hints.items() if (item := _item_type(hint)) is not None}
    words: list[str] = []
    loose: list[str] = []
    collected: dict[str, list[str]] = {}
    options = list(_options(args))
    for name, given in options:
        first = given[0] if given else ""
        if name is None:
            (words if first.startswith("-") else loose).extend(given)
        elif name in lists and not first.startswith("["):
            collected.setdefault(name, []).extend(given)
        elif name in switches and first.lower() not in ("true", "false"):
            words.append(f"--{name}=true")
            loose += given
        else:
            words.append(f"--{name}={first}" if given else f"--{name}")
            loose += given[1:]
    words += [f"--{name}={_as_list(values, lists[name])}" for name, values in collected.items()]
    named = {name for name, _ in options}
    free = [name for name in _without_name(function) if name not in named]
    return [*words, *(f"--{name}={word}" for name, word in zip(free, loose, strict=False)), *loose[len(free) :]]


def _without_name(function: Callable[..., Any]) -> list[str]:
    """Arguments that must be given and hold one value."""
    hints = get_type_hints(function)
    required = (name for name, p in inspect.signature(function).parameters.items() if p.default is p.empty)
    return [name for name in required if _item_type(hints[name]) is None]


def _options(args: Sequence[str]) -> Iterator[tuple[str | None, list[str]]]:
    """Each option as its name with underscores, and what is given for it: after ``=``, or up to the next option."""
    name: str | None = None
    given: list[str] = []
    for word in args:
        if not re.match(r"--?[A-Za-z]", word):  # a value; it may be a negative number
            given.append(word)
            continue
        yield name, given
        spelt, equals, value = word.removeprefix("--").partition("=")
        long = word.startswith("--")
        name, given = (spelt.replace("-", "_"), [value] if equals else []) if long else (None, [word])
    yield name, given


def _item_type(hint: Any) -> Any:
    """What a list holds, where the type is a list of something, or that or ``None``; else ``None``."""
    if get_origin(hint) in (list, Sequence):
        return get_args(hint)[0]
    choices = [choice for choice in get_args(hint) if choice is not NoneType]
    return _item_type(choices[0]) if len(choices) == 1 and NoneType in get_args(hint) else None


def _as_list(values: Sequence[str], item: Any) -> str:
    """A list in YAML's flow style; numbers stay numbers."""
    quoted = values if item in (int, float) else [json.dumps(value) for value in values]
    return f"[{', '.join(quoted)}]"
