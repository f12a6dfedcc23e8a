"""The command line: which commands there are, how options are spelt, how mistakes end."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
from lightning.pytorch.cli import LightningCLI

from lightning_dcp.cli import COMMANDS, LIGHTNING, main, overview
from lightning_dcp.commands.options import cause_of, parse
from lightning_dcp.errors import DataError
from lightning_dcp.schedule import StepPlan

PLAN = ["plan", "--lengths", "megatron-mock", "--ranks", "4", "--max-seqlen-per-dp-cp-rank=2048", "--batches", "1"]
ROOT = Path(__file__).parents[2]


def some_command(
    name: str | None = None,
    *,
    per_rank_limit: int = 3,
    fast: bool = False,
    sizes: list[int] | None = None,
    files: list[str] | None = None,
    peers: Sequence[Literal["a", "b"]] = ("a",),
    share: float = 0.5,
) -> None:
    """Do something.

    Args:
        name: what to call it.
        per_rank_limit: a number.
        fast: a switch.
        sizes: some numbers.
        files: some words.
        peers: some names.
        share: a fraction.
    """


def parsed(*words):
    return parse(some_command, list(words), prog="some")


# ------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {}),
        ("--per-rank-limit 5", {"per_rank_limit": 5}),
        ("--per_rank_limit=5", {"per_rank_limit": 5}),
        ("--name a-b_c --fast", {"name": "a-b_c", "fast": True}),
        ("--fast --name x", {"fast": True, "name": "x"}),
        ("--fast false", {"fast": False}),
        ("--fast=true", {"fast": True}),
        ("--sizes 4 8 --fast", {"sizes": [4, 8], "fast": True}),
        ("--sizes 4 --sizes=8", {"sizes": [4, 8]}),
        ("--sizes [4,8]", {"sizes": [4, 8]}),
        ("--sizes []", {"sizes": []}),
        ("--sizes=[4]", {"sizes": [4]}),
        ("--sizes -4", {"sizes": [-4]}),
        ("--files a=b.txt --files c=d:e.txt 7", {"files": ["a=b.txt", "c=d:e.txt", "7"]}),
        ("--peers b a", {"peers": ["b", "a"]}),
        ("--share -1e-3", {"share": -1e-3}),
    ],
)
def test_options_are_taken_in_the_usual_spellings(words, expected):
    defaults = {"name": None, "per_rank_limit": 3, "fast": False, "sizes": None, "files": None, "share": 0.5}
    found = parsed(*words.split())
    assert {key: list(v) if isinstance(v, tuple) else v for key, v in found.items()} == (
        defaults | {"peers": ["a"]} | expected
    )


def of_a_folder(folder: str, sizes: list[int], *, times: int, output: str = "a.html", fast: bool = False) -> None:
    """Do something.

    Args:
        folder: where.
        sizes: some numbers.
        times: how often.
        output: a file.
        fast: a switch.
    """


@pytest.mark.parametrize(
    "words",
    [
        "runs/a 3 --sizes 1",
        "--sizes 1 --output a.html runs/a 3",
        "--fast=false runs/a --times 3 --sizes=1",
        "--times=3 --sizes=[1] --folder runs/a",
        "3 --folder runs/a --sizes=[1]",
    ],
)
def test_required_arguments_may_be_given_without_their_names(words):
    expected = {"folder": "runs/a", "times": 3, "sizes": [1], "output": "a.html", "fast": False}
    assert parse(of_a_folder, words.split(), prog="some") == expected


@pytest.mark.parametrize("words", ["runs/a 3 4 --sizes 1", "runs/a --sizes 1", "runs/a --folder b --times 3 --sizes 1"])
def test_words_too_many_or_too_few_are_refused(words, capsys):
    with pytest.raises(SystemExit) as end:
        parse(of_a_folder, words.split(), prog="some")
    assert end.value.code == 2


def test_options_may_come_from_a_file(tmp_path):
    (tmp_path / "options.yaml").write_text("per_rank_limit: 9\nsizes: [1, 2]\n")
    found = parsed("--config", str(tmp_path / "options.yaml"), "--sizes", "3")
    assert (found["per_rank_limit"], found["sizes"]) == (9, [3])


@pytest.mark.parametrize(
    "words",
    ["--nothing 3", "--per-rank-limit many", "--per-rank-limit", "--peers c", "--sizes x", "word", "--fast maybe"],
)
def test_bad_options_end_with_status_2(words, capsys):
    with pytest.raises(SystemExit) as end:
        parsed(*words.split())
    assert end.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_help_tells_every_option_with_its_description(capsys):
    with pytest.raises(SystemExit) as end:
        parsed("--sizes", "3", "-h")
    assert end.value.code == 0
    text = capsys.readouterr().out
    for words in ("Do something.", "a switch", "some numbers", "a fraction", "default: 3", "with dashes"):
        assert words in text


def test_the_cause_is_found_behind_what_was_raised_from_it():
    try:
        try:
            raise DataError("own")
        except DataError as error:
            raise ValueError("wrapped") from error
    except ValueError as error:
        assert str(cause_of(error)) == "own"
    assert cause_of(ValueError("other")) is None


# ----------------------------------------------------------------------- commands


def test_the_overview_lists_all_commands_of_lightning_and_of_this_package(capsys):
    assert set(LIGHTNING) == set(LightningCLI.subcommands())
    main(["--help"])
    text = capsys.readouterr().out
    assert text == overview()
    for name, about in {**LIGHTNING, **{name: c.about for name, c in COMMANDS.items()}}.items():
        assert f"  {name}" in text
        assert about in text


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_a_description_for_every_option(name, capsys):
    with pytest.raises(SystemExit) as end:
        main([*name.split(), "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: lightning-dcp {name}" in text
    for option in text.split("options:")[1].split("\n  --")[1:]:
        described = " ".join(option.split()).split("(type:")[0]
        assert len(described.split()) > 3, described


def test_lightnings_commands_are_still_there(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lightning-dcp", "predict", "--help"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert "--trainer.strategy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "a command is needed"),
        (["plna"], "no command 'plna'"),
        (["bench"], "a command is needed"),
        (["bench", "x"], "'x'"),
    ],
)
def test_an_unknown_command_ends_with_status_2_and_the_list(words, said, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    text = capsys.readouterr().err
    assert said in text
    assert "bench prediction" in text
    assert ("fit" in text.split()) == (words[:1] != ["bench"])


def test_the_help_of_bench_lists_its_commands_only(capsys):
    main(["bench", "--help"])
    text = capsys.readouterr().out
    assert "bench plan" in text
    assert "calibrate" not in text


def test_plan_runs_from_the_command_line(tmp_path, capsys):
    main([*PLAN, "--json", str(tmp_path / "plan.json"), "--sweep-limits", "2048", "4096"])
    made = StepPlan.from_json(json.loads((tmp_path / "plan.json").read_text()))
    assert (made.ranks, made.max_seqlen_per_dp_cp_rank, len(made.lengths)) == (4, 2048, 32)
    printed = capsys.readouterr().out
    assert "Recommended:" in printed
    assert re.search(r"Dynamic CP would make this step \d\.\d\dx faster than static CP [24]\.", printed)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan"], "neither of --lengths and --data"),
        (["plan", "--lengths", "nowhere.txt"], "nowhere.txt"),
        ([*PLAN, "--cost-model", "abacus"], "abacus"),
        ([*PLAN, "--min-context-parallel-size", "3"], "min_context_parallel_size=3"),
        ([*PLAN, "--max-seqlen-per-dp-cp-rank", "100"], "longer than the 400 tokens"),
    ],
)
def test_a_mistake_ends_with_its_message_and_status_1(words, said):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert isinstance(end.value.code, str)  # printed to stderr, with status 1
    assert end.value.code.startswith("ConfigurationError: ")
    assert said in end.value.code


def test_what_a_class_refuses_when_lightning_builds_it_is_told_without_a_traceback():
    words = ["fit", "--config", str(ROOT / "configs/demo_cpu.yaml"), "--data.init_args.batch_size=0"]
    done = run(*words)
    assert done.returncode == 1
    assert "batch_size=0" in done.stderr
    assert "Traceback" not in done.stderr


def run(*words, **options):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *options.pop("flags", ["-m", "lightning_dcp"]), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False, **options)


PROGRAM = """
import sys
from lightning_dcp.cli import main
main(sys.argv[1:])
print(sorted({name.split(".")[0] for name in sys.modules}), "lightning.pytorch.cli" in sys.modules)
"""


def test_plan_imports_neither_models_nor_lightnings_command_line():
    done = run(*PLAN, flags=["-c", PROGRAM])
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.endswith("False")
    assert "'lightning_dcp'" in last
    assert "'megatron'" not in last
