"""``lightning-dcp``: Lightning's own command line (fit, validate, test, predict), and the commands of this package."""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_dcp.commands.options import cause_of, parse
from lightning_dcp.errors import DCPError

if TYPE_CHECKING:
    from lightning.pytorch.cli import ArgsType


@dataclass(frozen=True)
class Command:
    """A command of this package, imported when it is called.

    Attributes:
        module: where its function is.
        function: the function; its arguments are the options.
        about: what it does, in a line.
    """

    module: str
    function: str
    about: str

    def load(self) -> Callable[..., Any]:
        """The function."""
        function: Callable[..., Any] = getattr(import_module(self.module), self.function)
        return function


COMMANDS = {
    "plan": Command("lightning_dcp.commands.plan", "plan", "Compare static with dynamic CP on your sample lengths."),
    "calibrate": Command(
        "lightning_dcp.commands.calibrate", "calibrate", "Measure a model on this machine and write its cost model."
    ),
    "densities": Command(
        "lightning_dcp.commands.densities", "densities", "Learn from a run's record how costly each kind of segment is."
    ),
    "bench plan": Command(
        "lightning_dcp.commands.bench_plan", "bench_plan", "Compare schedulers: quality of the plans, planning time."
    ),
    "bench attention": Command(
        "lightning_dcp.commands.bench_attention.command",
        "bench_attention",
        "Time attention over CP groups against one rank's kernel; check its results.",
    ),
    "bench prediction": Command(
        "lightning_dcp.commands.bench_prediction",
        "bench_prediction",
        "Compare predicted with measured step times of real batches.",
    ),
    "bench boundaries": Command(
        "lightning_dcp.commands.bench_boundaries",
        "bench_boundaries",
        "Simulate how steady steps are: uniform cuts against boundary budgets, rank order against the best ring.",
    ),
    "audit": Command(
        "lightning_dcp.commands.audit", "audit", "Audit where your data is cut, and keep what is safe from breaking."
    ),
    "report": Command(
        "lightning_dcp.commands.report", "report", "Write a run's stability panel: why its steps were steady, or not."
    ),
}
"""Commands of this package; some are two words."""
LIGHTNING = {
    "fit": "Train a model.",
    "validate": "Evaluate it on the validation data.",
    "test": "Evaluate it on the test data.",
    "predict": "Run it on data and collect what it returns.",
}
"""Commands of Lightning's own command line."""
_SHORT = 100
"""Characters of an error on ranks that do not tell all of it."""


def main(args: ArgsType = None) -> None:
    """Run one command. A mistake of the user's ends with its message, not with a traceback.

    Args:
        args: arguments instead of those of the process, such as ``["fit", "--config", "run.yaml"]``.
    """
    words = sys.argv[1:] if args is None else args
    try:
        if not isinstance(words, list) or not _own(words):
            _lightning(args)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (DCPError, ValueError) as error:
        own = cause_of(error)
        if own is None:
            raise
        sys.exit(_message(own))


def _message(error: DCPError) -> str:
    """What this process says at its end: on ranks of a run that others joined, rank 0 tells all, also of errors of one rank.

    A rank that fails tells the others through the run's watchdog, so that rank 0 ends with the same error, or with one
    that names that rank and its error.
    """
    text = f"{type(error).__name__}: {error}"
    rank = _rank()
    if rank == 0:
        return text
    first = " ".join(text.split())
    return f"[rank {rank}] {first[:_SHORT]}{'...' if len(first) > _SHORT else ''} (all of it on rank 0)"


def _rank() -> int:
    """This process's rank in a run that is under way; 0 where it is alone, or joined no run yet."""
    torch = sys.modules.get("torch.distributed")
    return torch.get_rank() if torch is not None and torch.is_available() and torch.is_initialized() else 0


def _own(words: Sequence[str]) -> bool:
    """Run a command of this package, or show which there are; False if the words are for Lightning."""
    name = next((name for name in COMMANDS if list(words[: len(name.split())]) == name.split()), None)
    if name is not None:
        function = COMMANDS[name].load()
        try:
            function(**parse(function, words[len(name.split()) :], prog=f"lightning-dcp {name}"))
        except (OSError, UnicodeDecodeError) as error:  # a file that cannot be read or written after all
            sys.exit(f"{type(error).__name__}: {error}")
        return True
    family = {known for known in COMMANDS if known.split()[0] == (words or [""])[0]}
    shown = overview(family or None)
    rest = words[1:] if family else words
    if rest and rest[0] in ("-h", "--help"):
        sys.stdout.write(shown)
        return True
    if rest and not family and (rest[0] in LIGHTNING or rest[0].startswith("-")):
        return False
    sys.stderr.write(f"{shown}\nerror: {f'no command {rest[0]!r}' if rest else 'a command is needed'}\n")
    sys.exit(2)


def overview(only: set[str] | None = None) -> str:
    """All commands, a line each.

    Args:
        only: the commands of this package to show, without Lightning's; ``None``: all of both.
    """
    groups = [("planning and measuring:", {n: c.about for n, c in COMMANDS.items() if only is None or n in only})]
    if only is None:
        groups.insert(0, ("training and evaluation (Lightning's command line):", LIGHTNING))
    lines = ["usage: lightning-dcp COMMAND [OPTIONS]", ""]
    for heading, commands in groups:
        lines += [heading, *(f"  {name:<18}{about}" for name, about in commands.items()), ""]
    return "\n".join([*lines, "lightning-dcp COMMAND --help shows a command's options.", ""])


def _lightning(args: ArgsType) -> None:
    from lightning.pytorch import LightningDataModule, LightningModule
    from lightning.pytorch.cli import LightningCLI

    import lightning_dcp.data
    import lightning_dcp.lm  # noqa: F401  (so that configurations can name its classes in short)

    # Lightning's own use of torch, of which later releases of torch warn on every rank.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")

    LightningCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
        args=args,
    )


if __name__ == "__main__":
    main()
