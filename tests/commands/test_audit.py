"""`lightning-dcp audit`: findings of real batches, the regression set, and what breaks it."""

import json

import pytest
import yaml

from lightning_dcp.cli import main
from lightning_dcp.commands.audit import audit
from lightning_dcp.commands.audit_set import RegressionSet
from lightning_dcp.errors import BoundaryError, ConfigurationError, DataError
from lightning_dcp.schedule.cost_file import load_cost_model

SETTINGS = {"ranks": 4, "max_seqlen_per_dp_cp_rank": 900, "dense_limit": 400}


def data(tmp_path, **options):
    """The YAML of a data module with segments."""
    described = {"class_path": "tests.commands.modules.SegmentedModule", "init_args": options}
    path = tmp_path / "data.yaml"
    path.write_text(yaml.safe_dump(described))
    return str(path)


def saved(tmp_path, **options):
    path = tmp_path / "set.json"
    audit(data(tmp_path), save=str(path), **SETTINGS | options)
    return str(path)


def test_real_batches_are_audited_and_kept_without_text(tmp_path, capsys):
    out = tmp_path / "findings.json"
    now = audit(data(tmp_path), save=str(tmp_path / "set.json"), json=str(out), **SETTINGS)
    assert [audited.level for audited in now.audits] == ["ok", "ok"]
    printed = capsys.readouterr().out
    assert "2 batches of 8 samples" in printed
    assert "0 warn, 0 refuse: ok" in printed
    assert printed.endswith(f"wrote {tmp_path / 'set.json'} (2 batches, 8 samples)\n")
    kept = RegressionSet.load(str(tmp_path / "set.json"))
    assert kept.batches == now.batches
    assert kept.settings == now.settings
    assert kept.unsafe == frozenset()
    names = [sample.name for batch in kept.batches for sample in batch]
    assert names == [str(100 + n) for n in range(8)]
    assert {segment.kind for batch in kept.batches for s in batch for segment in s.segments} == {"user", "tool"}
    values = json.loads(out.read_text())
    assert values["settings"]["dense_limit"] == 400
    assert len(values["batches"]) == 2


def test_the_same_data_and_settings_pass(tmp_path, capsys):
    path = saved(tmp_path)
    audit(check=path)
    audit(data(tmp_path), check=path)
    printed = capsys.readouterr().out
    assert printed.count("settings that changed since the set was made: none") == 2
    assert printed.count("samples that changed: none") == 2


def test_a_tighter_setting_fails_and_names_sample_and_segment(tmp_path):
    path = saved(tmp_path)
    with pytest.raises(BoundaryError) as error:
        audit(check=path, dense_limit=150)
    told = str(error.value)
    assert "boundaries were safe and are unsafe now" in told
    assert "sample 103, segment 1 (tool, 60..310): oversized" in told
    assert "setting dense_limit: 400 -> 150" in told
    with pytest.raises(BoundaryError, match=r"setting layout: budgeted -> zigzag"):
        audit(check=path, layout="zigzag", context_parallel_size=4)


def test_another_template_fails_and_says_what_changed_in_the_sample(tmp_path, capsys):
    path = saved(tmp_path)
    with pytest.raises(BoundaryError) as error:
        audit(data(tmp_path, longer=400), check=path)
    told = str(error.value)
    assert "sample 103, segment 1 (tool, 60..710): oversized" in told
    assert "the sample's length: 390 -> 790 tokens" in told
    assert "segment 1: tool 60..310 of density 3 -> tool 60..710 of density 3" in told
    assert "setting" not in told
    assert "samples that changed: 1 (103)" in capsys.readouterr().out


def test_what_was_unsafe_before_does_not_fail_again(tmp_path):
    path = saved(tmp_path, dense_limit=200)
    kept = RegressionSet.load(path)
    assert {boundary.sample for boundary in kept.unsafe if boundary.kind == "oversized"} == {"103", "107"}
    audit(check=path)
    with pytest.raises(BoundaryError, match="sample 102, segment 1"):
        audit(check=path, dense_limit=100)


def test_another_density_makes_a_segment_dense(tmp_path):
    path = saved(tmp_path)
    with pytest.raises(BoundaryError, match=r"user, .* of density 1 -> user, .* of density 9|density 1 -> user"):
        audit(data(tmp_path, user_density=9.0), check=path, dense_limit=60)


def test_samples_that_are_gone_are_told_and_other_data_is_refused(tmp_path, capsys):
    path = saved(tmp_path, context_parallel_size=1)
    audit(data(tmp_path, first=102), check=path)
    assert "not in the data any more: 2 (100, 101)" in capsys.readouterr().out
    with pytest.raises(DataError, match="no sample of the set"):
        audit(data(tmp_path, first=500), check=path)


def test_replanning_makes_it_safe(tmp_path, capsys):
    arguments = SETTINGS | {"dense_limit": 180, "context_parallel_size": 1}
    refused = audit(data(tmp_path), **arguments)
    assert "refuse" in {audited.level for audited in refused.audits}
    arguments["context_parallel_size"] = None
    settled = audit(data(tmp_path), replan=True, **arguments)
    assert "refuse" not in {audited.level for audited in settled.audits}
    capsys.readouterr()


def test_batches_of_another_size_are_drawn_again_alike(tmp_path):
    path = tmp_path / "set.json"
    now = audit(data(tmp_path), save=str(path), batch_size=3, batches=2, seed=4, **SETTINGS)
    assert [len(batch) for batch in now.batches] == [3, 3]
    assert audit(data(tmp_path), check=str(path)).batches == now.batches


def run_file(tmp_path, devices=4, strategy=None, **arguments):
    """A run's whole configuration."""
    budget = {"max_tokens": 800, "dense_limit": arguments.pop("dense_limit", 400), "tolerance": 0.2}
    own = {"max_seqlen_per_dp_cp_rank": 900, "layout": "budgeted", "boundary_budget": budget, "on_violation": "replan"}
    own |= {"cost_model": "cpu", "max_context_parallel_size": 2} | arguments
    described = strategy or {"class_path": "lightning_dcp.DCPStrategy", "init_args": own}
    data = {"class_path": "tests.commands.modules.SegmentedModule", "init_args": {}}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"trainer": {"devices": devices, "strategy": described}, "data": data}))
    return str(path)


def test_settings_come_from_a_whole_configuration_and_options_win(tmp_path, capsys):
    settings = audit(run_file(tmp_path)).settings
    assert (settings.ranks, settings.max_seqlen_per_dp_cp_rank, settings.max_tokens) == (4, 900, 800)
    assert (settings.dense_limit, settings.tolerance, settings.layout, settings.replan) == (400, 0.2, "budgeted", True)
    assert (settings.max_context_parallel_size, settings.context_parallel_size) == (2, None)
    assert settings.cost == load_cost_model("cpu")
    printed = capsys.readouterr().out
    assert f"settings from {tmp_path / 'run.yaml'}: ranks 4," in printed
    assert "dense_limit 400" in printed
    settings = audit(run_file(tmp_path), dense_limit=300, replan=False, layout="zigzag", cost_model="h100").settings
    assert (settings.dense_limit, settings.replan, settings.layout, settings.ranks) == (300, False, "zigzag", 4)
    assert settings.cost == load_cost_model("h100")
    assert "dense_limit" not in capsys.readouterr().out


def test_the_plane_and_the_scheduler_are_those_of_the_run(tmp_path, capsys):
    static = {"dynamic_context_parallel": False, "context_parallel_size": 2, "max_context_parallel_size": None}
    settings = audit(run_file(tmp_path, [0, 1, 2, 3], tensor_model_parallel_size=2, **static)).settings
    assert (settings.ranks, settings.context_parallel_size, settings.sizes) == (2, 2, (2,))
    speeds = audit(run_file(tmp_path, "auto", rank_speeds=[1.0, 0.5]), ranks=2)
    assert speeds.settings.ranks == 2
    assert "not taken: rank_speeds, ranks, as devices are 'auto' (--ranks)" in capsys.readouterr().out
    assert audit(run_file(tmp_path, 2, strategy="dcp")).settings.layout == "zigzag"
    assert audit(run_file(tmp_path, 2, strategy="ddp"), **SETTINGS).settings.layout == "budgeted"
    with pytest.raises(ConfigurationError, match="no_such_argument"):
        audit(run_file(tmp_path, no_such_argument=1))


def test_a_check_follows_the_configuration_but_not_against_options_of_the_save(tmp_path):
    path = str(tmp_path / "set.json")
    audit(run_file(tmp_path), save=path)
    audit(run_file(tmp_path), check=path)
    with pytest.raises(BoundaryError, match="setting dense_limit: 400 -> 100"):
        audit(run_file(tmp_path, dense_limit=100), check=path)
    audit(run_file(tmp_path), save=path, dense_limit=350)
    assert RegressionSet.load(path).given == ("dense_limit",)
    assert audit(run_file(tmp_path, dense_limit=100), check=path).settings.dense_limit == 350


def test_a_check_shows_what_is_new_alone_with_its_cause_once(tmp_path, capsys):
    path = saved(tmp_path, dense_limit=200)
    capsys.readouterr()
    audit(check=path)
    printed = capsys.readouterr().out
    assert "New since the set was made" not in printed
    assert "oversized" not in printed
    assert "new: 0 warn, 0 refuse; as in the set: " in printed
    with pytest.raises(BoundaryError) as error:
        audit(check=path, dense_limit=100)
    printed = capsys.readouterr().out
    assert printed.count("dense_limit: 200 -> 100") == str(error.value).count("dense_limit: 200 -> 100") == 1
    lines = str(error.value).splitlines()[2:]
    assert str(error.value).startswith(f"{len(lines)} segment(s) whose boundaries were safe")
    assert len({line.split(" (")[0] for line in lines}) == len(lines)
    table = printed.partition("New since")[2].partition("└")[0]
    assert "sample 102, segment 1" in table
    assert "sample 103, segment 1, tokens 60..310 of density 3 is larger" not in table  # as in the set


def test_how_many_batches_there_are_is_told(tmp_path, capsys):
    audit(data(tmp_path), batches=1, **SETTINGS)
    assert "1 of about 2 batches of 4 samples" in capsys.readouterr().out
    audit(data(tmp_path), batches=1, batch_size=2, **SETTINGS)
    assert "1 of about 4 batches of 2 samples" in capsys.readouterr().out


def test_a_switch_can_be_given_with_and_without_a_value(tmp_path, capsys):
    for words, wanted in ((["--replan"], True), (["--replan", "false"], False), ([], True)):
        out = tmp_path / "out.json"
        main(["audit", "--data", run_file(tmp_path), "--json", str(out), *words])
        assert json.loads(out.read_text())["settings"]["replan"] is wanted
    capsys.readouterr()


def test_the_command_fails_with_status_1(tmp_path, capsys):
    path = saved(tmp_path)
    main(["audit", "--check", path])
    with pytest.raises(SystemExit) as stopped:
        main(["audit", "--check", path, "--dense-limit", "150"])
    assert "BoundaryError" in str(stopped.value.code)
    assert "sample 103, segment 1" in str(stopped.value.code)


def test_all_bad_options_are_told_at_once(tmp_path):
    with pytest.raises(ConfigurationError) as error:
        audit(save=str(tmp_path / "none" / "set.json"), batches=0, seed=-1)
    assert len(error.value.problems) == 4
    with pytest.raises(ConfigurationError, match="--context-parallel-size 3"):
        audit(data(tmp_path), ranks=4, context_parallel_size=3)


@pytest.mark.parametrize(
    "text", ["[]", "not json", '{"what": "else"}', '{"what": "lightning-dcp boundaries", "version": 1}']
)
def test_a_file_that_is_no_set_is_refused(text, tmp_path):
    (tmp_path / "set.json").write_text(text)
    with pytest.raises(DataError, match=r"set\.json"):
        audit(check=str(tmp_path / "set.json"))
