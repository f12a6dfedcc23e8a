"""What the options of ``lightning-dcp bench attention`` ask for, checked all at once."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_dcp.attention.kernels import KERNELS
from lightning_dcp.attention.schemes import SCHEMES
from lightning_dcp.commands.bench_attention.cases import (
    DTYPES,
    Kind,
    Pack,
    Setting,
    one_of,
    parse_all,
    parse_kind,
    parse_pack,
)
from lightning_dcp.errors import Problem, UnsupportedAttentionError, raise_problems
from lightning_dcp.parallel.layout import LAYOUTS

PACKS = ("8192", "mixed:16384")
SIZES = (2, 4, 8)


@dataclass(frozen=True)
class Sweep:
    """What is to be measured, as combinations.

    Attributes:
        packs: their samples.
        sizes: ranks of a group.
        schemes: names.
        kernels: names; ``auto`` is possible.
        dtypes: names.
        kinds: of attention.
        heads: query, key heads, and their width.
        layout: a layout's name.
        device: the kind: cpu or cuda.
        processes: whether ranks are processes; else they are played.
    """

    packs: tuple[Pack, ...]
    sizes: tuple[int, ...]
    schemes: tuple[str, ...]
    kernels: tuple[str, ...]
    dtypes: tuple[str, ...]
    kinds: tuple[Kind, ...]
    heads: tuple[int, int, int]
    layout: str
    device: str
    processes: bool

    def settings(self, size: int) -> tuple[list[Setting], dict[str, str]]:
        """Those that a kernel can compute, each once, and why the others are refused."""
        able: dict[Setting, None] = {}
        refused: dict[str, str] = {}
        for kind, kernel, dtype, pack in itertools.product(self.kinds, self.kernels, self.dtypes, self.packs):
            setting = Setting(pack, size, kind, kernel, dtype, *self.heads, self.layout, self.device)
            try:
                able[dataclasses.replace(setting, kernel=setting.choose_kernel().name)] = None
            except UnsupportedAttentionError as error:
                refused[f"{kind.name}, {kernel}, {dtype}"] = str(error)
        return list(able), refused


def read_sweep(
    *,
    lengths: Sequence[str] | None,
    cp_sizes: Sequence[int] | None,
    schemes: Sequence[str] | None,
    kernels: Sequence[str] | None,
    dtypes: Sequence[str] | None,
    kinds: Sequence[str] | None,
    heads: tuple[int, int, int],
    layout: str,
    ranks: str,
    device: str,
    others: Sequence[Problem],
) -> Sweep:
    """The combinations that are asked for.

    Args:
        lengths: this and all others: as the command has them; None for what the command's help promises.
        cp_sizes: ranks of a group.
        schemes: names.
        kernels: names.
        dtypes: names.
        kinds: of attention.
        heads: query heads, key heads, and their width.
        layout: a layout's name.
        ranks: processes, played or auto.
        device: cpu, cuda or auto.
        others: problems of the remaining options.

    Raises:
        ConfigurationError: bad options, all at once.
    """
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    sizes = tuple(dict.fromkeys(default_sizes(where, ranks) if cp_sizes is None else cp_sizes))
    processes = ranks == "processes" or (ranks == "auto" and (where == "cpu" or _gpus() >= max(sizes, default=0)))
    problems = [*_size_problems(sizes), *_head_problems(*heads), *_device_problems(where, sizes, processes), *others]
    packs, wrong = parse_all(
        PACKS if lengths is None else lengths,
        "--lengths",
        parse_pack,
        "write 8192, or 512,512,8192, or mixed:16384 (of 64 tokens or more)",
    )
    problems += wrong
    known_kinds, wrong = parse_all(
        ("causal",) if kinds is None else kinds,
        "--kinds",
        parse_kind,
        "write causal, bidirectional, window:512, softcap:50, sinks, or several with + between them",
    )
    problems += wrong
    default_dtype = "bfloat16" if where == "cuda" else "float32"
    names = {
        "--schemes": (tuple(SCHEMES) if schemes is None else schemes, tuple(SCHEMES)),
        "--kernels": (("auto",) if kernels is None else kernels, ("auto", *KERNELS)),
        "--dtypes": ((default_dtype,) if dtypes is None else dtypes, tuple(DTYPES)),
        "--layout": ((layout,), tuple(LAYOUTS)),
    }
    chosen = {}
    for option, (given, allowed) in names.items():
        found, wrong = parse_all(given, option, one_of(allowed), f"use some of {', '.join(allowed)}")
        chosen[option], problems = tuple(found), problems + wrong
    raise_problems(problems)
    return Sweep(
        tuple(packs),
        sizes,
        chosen["--schemes"],
        chosen["--kernels"],
        chosen["--dtypes"],
        tuple(known_kinds),
        heads,
        layout,
        where,
        processes,
    )


def default_sizes(device: str, ranks: str) -> tuple[int, ...]:
    """The CP sizes that are measured unless others are asked for."""
    if device == "cpu" and ranks != "played":
        return tuple(size for size in SIZES if size <= max(2, usable_cores()))
    return SIZES


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def number_problems(repeats: int, warmup: int, latency: float, bandwidth: float) -> list[Problem]:
    """Numbers that make no sense."""
    problems = [
        Problem(f"{option} {value}", "nothing to measure", "give 1 or more")
        for option, value in (("--repeats", repeats), ("--warmup", warmup))
        if value < 1
    ]
    if not (latency >= 0 and math.isfinite(latency)):
        problems.append(Problem(f"--latency {latency}", "no time", "give seconds, such as 1.5e-5"))
    if not (bandwidth > 0 and math.isfinite(bandwidth)):
        problems.append(Problem(f"--bandwidth {bandwidth}", "no speed", "give bytes/s, such as 3.6e11"))
    return problems


def _size_problems(sizes: Sequence[int]) -> list[Problem]:
    problems = [
        Problem(f"--cp-sizes {size}", "not a group of several ranks", "give 2 or more; one rank is measured anyway")
        for size in sizes
        if size < 2
    ]
    return problems or ([] if sizes else [Problem("--cp-sizes []", "nothing to measure", "give 2 or more")])


def _head_problems(heads: int, kv_heads: int, head_dim: int) -> list[Problem]:
    given = {"--heads": heads, "--kv-heads": kv_heads, "--head-dim": head_dim}
    problems = [
        Problem(f"{option} {value}", "not a number of 1 or more", "give 1 or more")
        for option, value in given.items()
        if value < 1
    ]
    if not problems and heads % kv_heads:
        problems.append(Problem(f"--heads {heads} --kv-heads {kv_heads}", "no multiple", "give equal groups of heads"))
    return problems


def _device_problems(device: str, sizes: Sequence[int], processes: bool) -> list[Problem]:
    if device == "cuda" and not torch.cuda.is_available():
        return [Problem("--device cuda", "no CUDA device that torch can use", "use --device cpu")]
    largest = max(sizes, default=0)
    if device == "cuda" and processes and largest > _gpus():
        remedy = "use --ranks played, which needs one GPU, or smaller --cp-sizes"
        return [Problem(f"--ranks processes for {largest} ranks on CUDA", f"{_gpus()} GPU(s)", remedy)]
    return []


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
