"""Which part of the package may import which, and what importing it must not do."""

import ast
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import lightning_dcp

PACKAGE = Path(lightning_dcp.__file__).parent
NAME = "lightning_dcp"

LEVELS = [
    {"errors"},
    {"segments"},
    {"batch"},
    {"schedule"},
    {"parallel"},
    {"boundaries", "stability"},
    {"attention"},
    {"loss"},
    {"models"},
    {"step"},
    {"data"},
    {"metrics"},
    {"strategy", "checks", "module_checks", "launcher", "callbacks", "lm", "megatron_gpt"},
    {"report"},
    {"calibration"},
    {"commands"},
    {"cli"},
    {"__init__", "__main__"},
]
"""Parts of the package, lowest first: a part imports from its own level and the ones below."""
LEVEL = {part: number for number, level in enumerate(LEVELS) for part in level}

WITHOUT_LIGHTNING = ("models", "attention", "parallel", "batch", "schedule", "loss", "boundaries", "stability")
LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
LARGE = ("megatron", "transformers", "flash_attn", "transformer_engine", "liger_kernel", "cut_cross_entropy")
"""Dependencies that only one file may import as soon as it is imported; all others do it inside a function, if at all."""
FOLDERS = {"transformers": "models/huggingface/"}
"""Where it is the files of a folder instead, which is itself imported inside a function only."""

COSTS = ("lightning_dcp.schedule.cost",)
"""What attention is estimated by; of plans it knows nothing."""


@dataclass(frozen=True)
class Import:
    """One import: who, what, and whether it happens as soon as the file is imported."""

    file: str
    line: int
    module: str
    at_once: bool

    @property
    def part(self):
        return part_of(self.file.removesuffix(".py").replace("/", "."))

    @property
    def root(self):
        return self.module.split(".")[0]

    def __str__(self):
        return f"{self.file}:{self.line} imports {self.module}"


def part_of(module):
    """The part of the package that a module inside it belongs to."""
    return module.split(".")[0] or "__init__"


def imports_of(path, package=PACKAGE):
    """All imports of a file; relative ones are made absolute."""
    found = []
    file = path.relative_to(package)

    def visit(node, at_once):
        if isinstance(node, ast.Import):
            found.extend(Import(str(file), node.lineno, alias.name, at_once) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [NAME, *file.parent.parts][: 1 + len(file.parent.parts) - (node.level - 1)] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                child = package.joinpath(*module.split(".")[1:], alias.name)
                is_module = module.split(".")[0] == NAME and (child.is_dir() or child.with_suffix(".py").exists())
                found.append(Import(str(file), node.lineno, f"{module}.{alias.name}" if is_module else module, at_once))
        inner = at_once and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                visit(child, False)
            for child in node.orelse:
                visit(child, inner)
            return
        for child in ast.iter_child_nodes(node):
            visit(child, inner)

    visit(ast.parse(path.read_text()), True)
    return found


IMPORTS = [found for path in sorted(PACKAGE.rglob("*.py")) for found in imports_of(path)]


def own(imports):
    """Imports from inside the package, with the part that is imported."""
    for found in imports:
        if found.root == NAME:
            yield found, part_of(found.module.removeprefix(NAME).removeprefix("."))


def test_every_part_has_its_place():
    parts = {part_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts)) for path in PACKAGE.rglob("*.py")}
    assert parts <= LEVEL.keys(), "add new parts of the package to LEVELS"


def test_imports_run_one_way():
    wrong = [str(f) for f, part in own(IMPORTS) if f.at_once and LEVEL[part] > LEVEL[f.part]]
    assert wrong == []


@pytest.mark.parametrize(
    ("importer", "allowed"),
    [("data", {"errors", "batch", "data"}), ("attention", {"errors", "batch", "parallel", "attention"})],
)
def test_parts_that_stand_apart(importer, allowed):
    wrong = [
        str(f)
        for f, part in own(IMPORTS)
        if f.part == importer and f.at_once and part not in allowed and f.module not in COSTS
    ]
    assert wrong == []


def test_planning_sees_no_tensor():
    wrong = [str(f) for f in IMPORTS if f.part == "schedule" and f.root == "torch"]
    assert wrong == []


def test_lightning_stays_above():
    """Not even inside functions or for type checks."""
    wrong = [str(f) for f in IMPORTS if f.part in WITHOUT_LIGHTNING and f.root in LIGHTNING]
    assert wrong == []


@pytest.mark.parametrize("dependency", LARGE)
def test_a_large_dependency_is_imported_in_one_file_at_most(dependency):
    files = {f.file for f in IMPORTS if f.root == dependency and f.at_once}
    folder = FOLDERS.get(dependency)
    assert len(files) <= 1 or (folder and all(file.startswith(folder) for file in files)), files


def test_the_package_is_really_read():
    """The tests above would pass if nothing were found."""
    pairs = {(f.part, part) for f, part in own(IMPORTS) if f.at_once}
    assert {
        ("strategy", "step"),
        ("step", "loss"),
        ("loss", "batch"),
        ("models", "attention"),
        ("attention", "parallel"),
    } <= pairs
    assert any(f.root == "megatron" and not f.at_once for f in IMPORTS)
    assert any(f.root == "torch" and f.part == "parallel" and f.at_once for f in IMPORTS)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import a.b", [("a.b", True)]),
        ("from a import b", [("a", True)]),
        ("def f():\n import a", [("a", False)]),
        ("class C:\n import a\n def f(self):\n  import b", [("a", True), ("b", False)]),
        ("try:\n import a\nexcept ImportError:\n import b", [("a", True), ("b", True)]),
        (
            "if TYPE_CHECKING:\n import a\nelse:\n import b",
            [("a", False), ("b", True)],
        ),
        (
            "from . import near\nfrom .near import x\nfrom .. import batch",
            [(f"{NAME}.loss", True), (f"{NAME}.loss.near", True), (f"{NAME}.batch", True)],
        ),
        (f"from {NAME} import batch", [(f"{NAME}.batch", True)]),
        (f"from {NAME}.batch import PackedBatch", [(f"{NAME}.batch", True)]),
    ],
)
def test_imports_are_found(text, found, tmp_path):
    (tmp_path / "loss").mkdir()
    (tmp_path / "batch").mkdir()
    (tmp_path / "loss" / "some.py").write_text(text)
    assert [(f.module, f.at_once) for f in imports_of(tmp_path / "loss" / "some.py", tmp_path)] == found


PROGRAM = """
import json, sys
import lightning_dcp
strategy = lightning_dcp.DCPStrategy()
import torch
print(json.dumps({
    "cuda": torch.cuda.is_initialized(),
    "groups": torch.distributed.is_initialized(),
    "modules": sorted({name.split(".")[0] for name in sys.modules}),
}))
"""


def test_importing_the_package_and_building_the_strategy_starts_nothing():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["cuda"]
    assert not found["groups"]
    assert {"lightning_dcp", "torch"} <= set(found["modules"])
    assert not {"megatron", "flash_attn", "transformer_engine"} & set(found["modules"])
