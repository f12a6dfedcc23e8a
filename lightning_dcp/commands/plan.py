"""``lightning-dcp plan``: whether dynamic context parallelism is worth it for one's data, without training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from lightning_dcp.commands.comparison import Comparison, SchedulerName, Setting, compare
from lightning_dcp.commands.lengths import LengthBatches, LengthSource, check_longest
from lightning_dcp.commands.plan_report import PlanReport
from lightning_dcp.commands.sweep import default_limits, sweep_settings
from lightning_dcp.errors import Problem, raise_problems
from lightning_dcp.report.figure import folder_problems, picture_problems
from lightning_dcp.schedule.cost_file import load_cost_model
from lightning_dcp.schedule.plan import Mode, divisors

SAMPLES_PER_RANK = 8
NAMES: dict[SchedulerName, str] = {"dynamic": "dynamic CP", "megatron": "Megatron dynamic CP"}


def plan(
    lengths: str | None = None,
    *,
    data: str | None = None,
    field: str | None = None,
    ranks: int = 8,
    max_seqlen_per_dp_cp_rank: int = 8192,
    context_parallel_size: int | None = None,
    batch_size: int | None = None,
    batches: int = 10,
    cost_model: str = "h100",
    scheduler: SchedulerName = "dynamic",
    mode: Mode = "free",
    min_context_parallel_size: int = 1,
    max_context_parallel_size: int | None = None,
    ranks_per_node: int | None = None,
    microbatch_multiple: int = 1,
    seed: int = 0,
    longest: int | None = None,
    json: str | None = None,
    plot: str | None = None,
    sweep: bool = False,
    sweep_limits: list[int] | None = None,
) -> Comparison:
    """Compare static with dynamic context parallelism on lengths like yours, by a cost model; nothing is trained.

    Args:
        lengths: a file of sample lengths (one a line, JSON lines with --field, or .npy), or a distribution:
            megatron-mock, rl, longalign, llama3-sft.
        data: instead, the YAML of a LightningDataModule (class_path, init_args), or a run's whole configuration.
        field: of JSON lines, what holds the length, or a list whose items are counted.
        ranks: ranks of the DPxCP plane: all GPUs, divided by tensor and pipeline parallel sizes.
        max_seqlen_per_dp_cp_rank: most tokens that a rank may hold of one micro-batch.
        context_parallel_size: of the static plans; by default the smallest that fits the longest sample.
        batch_size: samples a batch over all ranks; by default 8 a rank, or what the data module makes.
        batches: how many batches are planned. The numbers are means; JSON and picture show the one of median speed-up.
        cost_model: a preset (a100, h100, h200, cpu: a 7B model) or a YAML file as `lightning-dcp calibrate` writes it.
        scheduler: what is compared with static plans: dynamic, or megatron (the installed Megatron-Core's own).
        mode: free (no barriers between micro-batches) or lockstep (as pipelines and sharded weights need it).
        min_context_parallel_size: smallest group of the dynamic scheduler.
        max_context_parallel_size: largest group of the dynamic scheduler; by default all ranks.
        ranks_per_node: ranks of the plane in one node; by default what the cost model says.
        microbatch_multiple: in lockstep, the number of micro-batches is a multiple of this.
        seed: of the random batches.
        longest: samples are cut to this many tokens.
        json: file for the plans and numbers; `StepPlan.from_json` reads the dynamic plan from it.
        plot: file (.png, .pdf, .svg) for a timeline of both plans; with a sweep also NAME-sweep.png.
        sweep: also try all static CP sizes and several token limits, and recommend a setting.
        sweep_limits: the token limits of the sweep; by default half, once, twice and four times the one given.

    Raises:
        ConfigurationError: bad options, all at once; samples that no group can hold.
        DataError: lengths that cannot be used.
        PlanError: batches that cannot be planned, such as too few samples for lock-step.
    """
    source = LengthSource(lengths, data, field, batch_size, SAMPLES_PER_RANK * ranks, batches, seed, longest)
    cost = load_cost_model(cost_model)
    if ranks_per_node is not None:
        cost = replace(cost, ranks_per_node=ranks_per_node)
    setting = Setting(
        ranks,
        max_seqlen_per_dp_cp_rank,
        cost,
        scheduler,
        mode,
        min_context_parallel_size,
        max_context_parallel_size,
        microbatch_multiple,
    )
    limits = sweep_limits or (default_limits(max_seqlen_per_dp_cp_rank) if sweep else ())
    raise_problems(
        source.problems()
        + setting.problems()
        + _size_problems(context_parallel_size, ranks)
        + _limit_problems(sweep_limits)
        + ([] if json is None else folder_problems(json, "--json"))
        + ([] if plot is None else picture_problems(plot))
    )
    if json is not None and json == plot:
        raise_problems([Problem(f"--json {json} --plot {plot}", "one file for both", "name two files")])
    read = source.read()
    static_size = _static_size(setting, read, context_parallel_size)
    with Console(stderr=True).status("planning"):
        comparison = compare(setting, read.batches, static_size)
        swept = sweep_settings(setting, read.batches, limits, dynamic=NAMES[scheduler]) if limits else None
    report = PlanReport(comparison, swept, read, cost_model, NAMES[scheduler])
    report.print()
    if json is not None:
        report.write_json(Path(json))
    if plot is not None:
        report.draw(Path(plot))
    return comparison


def _size_problems(size: int | None, ranks: int) -> list[Problem]:
    if size is None or ranks < 1 or size in divisors(ranks):
        return []
    remedy = f"use one of {', '.join(map(str, divisors(ranks)))}"
    return [Problem(f"--context-parallel-size {size}", f"not a divisor of the plane of {ranks} ranks", remedy)]


def _limit_problems(limits: list[int] | None) -> list[Problem]:
    if limits is None or (limits and min(limits) >= 1):
        return []
    return [Problem(f"--sweep-limits {limits}", "no limits, or one below 1", "give token limits of at least 1")]


def _static_size(setting: Setting, read: LengthBatches, size: int | None) -> int:
    """The static CP size, after both ways were found to hold the longest sample."""
    limit = setting.max_seqlen_per_dp_cp_rank
    largest = setting.sizes[-1]
    larger = "use more ranks" if largest == setting.ranks else "raise --max-context-parallel-size"
    check_longest(read.batches, largest, limit, group="the largest group", larger=larger)
    if size is not None:
        larger = "raise --context-parallel-size"
        check_longest(read.batches, size, limit, group="a static group", larger=larger)
        return size
    return setting.smallest_static(read.longest)
