"""Cost models as YAML files: written and read, and what is wrong with them told at once."""

import pytest
import yaml
from hypothesis import given, settings

from lightning_dcp.errors import ConfigurationError
from lightning_dcp.schedule import HARDWARE, CostModel, load_cost_model, preset, save_cost_model
from tests.schedule.plans import cost_models

GOOD = "linear: 6.0e-5\nattention: 1.0e-9\n"


@pytest.fixture
def problems_of(tmp_path):
    """What is wrong with a file of this text."""

    def load(text):
        path = tmp_path / "cost.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ConfigurationError) as caught:
            load_cost_model(path)
        assert str(path) in str(caught.value)
        return [f"{p.asked}: {p.found} -> {p.remedy}" for p in caught.value.problems]

    return load


# ------------------------------------------------------------------ round trips


@pytest.mark.parametrize("name", HARDWARE)
@pytest.mark.parametrize("ranks_per_node", [None, 8])
def test_presets_come_back_from_a_file_bit_by_bit(name, ranks_per_node, tmp_path):
    cost = preset(name, ranks_per_node=ranks_per_node)
    save_cost_model(cost, tmp_path / "cost.yaml", comment="Measured today\n on one node: 8 ranks")
    assert load_cost_model(tmp_path / "cost.yaml") == cost
    assert load_cost_model(str(tmp_path / "cost.yaml")) == cost
    text = (tmp_path / "cost.yaml").read_text()
    assert text.startswith("# Measured today\n#  on one node: 8 ranks\nlinear: ")


@given(cost_models())
@settings(max_examples=40, deadline=None)
def test_any_model_comes_back_from_a_file_bit_by_bit(tmp_path_factory, cost):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    save_cost_model(cost, path)
    assert load_cost_model(path) == cost


def test_a_file_written_by_hand_may_leave_out_what_is_not_counted(tmp_path):
    path = tmp_path / "cost.yaml"
    path.write_text(GOOD + "efficiency:\n  - [256, 0.4]\n  - [8192, 1]\nranks_per_node: null\n")
    assert load_cost_model(path) == CostModel(6e-5, 1e-9, ((256, 0.4), (8192, 1.0)))


@pytest.mark.parametrize("number", ["6.0e-5", "0.00006", "6e-5", "6E-05"])
def test_numbers_may_be_written_as_in_json(number, tmp_path):
    """YAML 1.1 takes 6e-5, which has no point, for text."""
    path = tmp_path / "cost.yaml"
    path.write_text(f"linear: {number}\nattention: 0\n")
    assert load_cost_model(path) == CostModel(6e-5, 0.0)


# ------------------------------------------------------------------ sources


def test_a_model_is_itself_and_presets_go_by_name():
    cost = CostModel(1.0, 2.0)
    assert load_cost_model(cost) is cost
    assert load_cost_model("h100") == load_cost_model("H100") == preset("h100")


@pytest.mark.parametrize("source", ["h1000", "missing/cost.yaml", "."])
def test_what_is_neither_a_preset_nor_a_file_is_told_with_both(source):
    with pytest.raises(ConfigurationError, match="cannot be read") as caught:
        load_cost_model(source)
    assert repr(source) in str(caught.value)
    assert all(name in str(caught.value) for name in HARDWARE)


def test_a_binary_file_is_refused(problems_of):
    assert "cannot be read" in problems_of(b"\xff\xfe\x00\x01")[0]


# ------------------------------------------------------------------ contents


@pytest.mark.parametrize(
    "text",
    [
        "linear: [1, 2",
        "linear: 1\n attention: : 2",
        "\tlinear: 1",
        "!!python/object:os.system {}\n",
        "a: 1\n---\nb: 2\n",
    ],
)
def test_what_is_not_yaml_is_refused(text, problems_of):
    (problem,) = problems_of(text)
    assert "not YAML" in problem


@pytest.mark.parametrize(
    ("text", "kind"), [("- 1.0\n- 2.0\n", "list"), ("", "NoneType"), ("h100\n", "str"), ("5\n", "int")]
)
def test_what_is_no_mapping_is_refused(text, kind, problems_of):
    (problem,) = problems_of(text)
    assert f"{kind}, not a mapping of names to numbers" in problem


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("pack_overhead: .nan", "pack_overhead=nan"),
        ("pack_overhead: .inf", "pack_overhead=inf"),
        ("pack_overhead: -0.5", "pack_overhead=-0.5"),
        ("pack_overhead: fast", "pack_overhead='fast'"),
        ("pack_overhead: yes", "pack_overhead=True"),
        ("pack_overhead:", "pack_overhead=None"),
        ("pack_overhead: {a: 1}", "pack_overhead={'a': 1}"),
        ("bandwidth: 0", "bandwidth=0"),
        ("overlap: 80", "not a share from 0 to 1"),
        ("ranks_per_node: 2.5", "ranks_per_node=2.5"),
        ("efficiency: 0.5", "not a table of pairs"),
        ("efficiency: [[512, 0.5], [256, 1.0]]", "tokens ascending"),
        ("efficiency: [[512, 0.5], [1024, .nan]]", "not a table of pairs"),
        ("atention: 5", "'atention'"),
        ("7: 5", "7 in"),
    ],
)
def test_one_wrong_line_is_one_problem(line, words, problems_of):
    (problem,) = problems_of(GOOD + line + "\n")
    assert words in problem


@pytest.mark.parametrize("name", ["linear", "attention"])
def test_the_two_coefficients_must_be_there(name, problems_of):
    values = {"linear": 1.0, "attention": 1.0}
    del values[name]
    (problem,) = problems_of(yaml.safe_dump(values))
    assert f"no {name!r}" in problem


def test_all_problems_of_a_file_are_told_at_once(problems_of):
    problems = problems_of("linear: -1\nspeed: 3\noverlap: .nan\nefficiency: []\nbandwidth: none\n")
    assert len(problems) == 6
    for word in ("attention", "linear=-1", "'speed'", "overlap=nan", "efficiency=()", "bandwidth='none'"):
        assert sum(word in problem for problem in problems) >= 1, word
