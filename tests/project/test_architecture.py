"""The parts of the package share only the base, and the scripts differ only in their data."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.core.schema.checks import RECORDS
from harness.core.strategies import STRATEGIES
from harness.core.tasks import TASKS

ROOT = Path(__file__).resolve().parents[2]
HARNESS = ROOT / "harness"
FILES = sorted(HARNESS.rglob("*.py"))
SCRIPTS = ("bert", "vit", "logcallback")
HEAVY = ("torch", "transformers", "datasets", "accelerate")
# The packages beyond the standard library that the base may import, inside a function: yaml is
# needed only for a settings file, pynvml only to ask for GPUs.
ALLOWED = {("harness/core/command_line.py", "yaml"), ("harness/core/provenance.py", "pynvml")}


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in FILES}
BASE = [n for n in MODULES if n.startswith("harness.core.")]
# Each room and the rooms below it that it may import; every room may import the base.
TRAIN = ("train", "train.data", "train.measure", "train.strategy", "train.strategy.hivemind")
ROOMS: dict[str, tuple[str, ...]] = {
    "core": ("core.schema", "core.records", "core.files"),
    "core.files": ("core",),
    "core.records": ("core.schema", "core"),
    "core.schema": ("core",),
    "train": (),
    "train.data": TRAIN[:1],
    "train.measure": TRAIN[:2],
    "train.strategy": (*TRAIN[:3], "train.strategy.hivemind"),
    "train.strategy.hivemind": TRAIN[:4],
    "train.run": TRAIN,
    "train.loop": (*TRAIN, "train.run"),
    "launch": (),
    "launch.netns": ("launch",),
    "launch.ssh": ("launch",),
    "launch.slurm": ("launch",),
    "read": ("read.records",),  # load() and its like
    "read.records": ("read",),
    "read.compare": ("read", "read.records"),
    "read.tables": ("read", "read.records", "read.compare"),
    "read.explain": ("read", "read.records"),
    "read.predict": ("read", "read.records", "read.predict.lossy"),
    "read.predict.lossy": (),
    "read.imports": ("read", "read.records"),
    "read.figures": (
        *("read", "read.records", "read.tables"),
        *("read.compare", "read.explain", "read.predict"),
    ),
    "read.report": (
        *("read", "read.records", "read.tables", "read.figures"),
        *("read.compare", "read.explain", "read.predict"),
    ),
}
BASE_ROOMS = ("core", "core.files", "core.records", "core.schema")
# Modules of `launch` that stand above the rooms inside its folder; no other module imports them.
ABOVE = [f"harness.launch.{name}" for name in ("flags", "sweep", "doctor")]
# Modules that may spell the name of a strategy, and what for.
SPELLED = {
    "harness.core.strategies": "the table",
    "harness.core.provenance": "a package of that name",
    "harness.core.refused": "a flag of the Trainer of that name",
    "harness.read.figures.panels": "the colour of each",
    "harness.read.predict.model": "the closed form of each",
}
MOST_FILES = 14  # in a room
MOST_LINES = 500  # in a file
# Arrows up that are still there; a change may take them out of this list and adds none.
UPWARD: set[tuple[str, str]] = set()


def modules_of(part: str) -> list[str]:
    """The modules of a part of the package."""
    return [m for m in MODULES if m == f"harness.{part}" or m.startswith(f"harness.{part}.")]


@functools.cache
def imports(file: Path) -> list[tuple[str, bool]]:
    """(full name of what is imported, whether at the top level), inside functions too."""
    return [*read_imports(file)]


def read_imports(file: Path) -> Iterator[tuple[str, bool]]:
    tree = ast.parse(file.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: write imports in full, so that this test reads them"
            module = str(node.module)
            inner = [f"{module}.{alias.name}" for alias in node.names]
            # "from package import module" names a module, any other import names its file.
            names = [name if name in MODULES else module for name in inner]
        else:
            continue
        for name in names:
            yield name, node in tree.body


def texts_of(file: Path) -> Iterator[str]:
    """The strings in a file, also parts of f-strings, but no docstrings."""
    nodes = [*ast.walk(ast.parse(file.read_text("utf-8")))]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            yield node.value if isinstance(node.value, str) else ""


def ours(file: Path) -> set[str]:
    return {name for name, _ in imports(file) if name.split(".")[0] == "harness"}


def test_imports_are_found() -> None:
    # Otherwise the tests below would pass without checking anything.
    assert {"harness.core.settings", "harness.core.command_line", "harness.core.records"} <= set(
        BASE
    )
    assert "harness.train.context" in modules_of("train")
    assert "harness.core.settings" in ours(HARNESS / "core" / "command_line.py")
    assert ("torch", True) in set(imports(HARNESS / "train" / "loop" / "trainer.py"))
    assert ("yaml", False) in set(imports(HARNESS / "core" / "command_line.py"))
    assert "harness.train.data.models" in ours(ROOT / "bert.py")


@pytest.mark.parametrize("module", BASE)
def test_the_base_imports_only_the_standard_library(module: str) -> None:
    file = MODULES[module]
    for name, top in imports(file):
        where = (str(file.relative_to(ROOT)), name)
        outside = name.split(".")[0] not in (*sys.stdlib_module_names, "harness")
        if outside:
            assert where in ALLOWED and not top, where
        if name.startswith("harness"):
            assert name in BASE, where


@pytest.mark.parametrize("part", ["train", "read", "launch"])
def test_parts_import_only_themselves_and_the_base(part: str) -> None:
    for module in modules_of(part):
        for imported in ours(MODULES[module]):
            assert imported in BASE or imported in modules_of(part), (module, imported)
    folders = {p.name for p in HARNESS.iterdir() if p.is_dir() and p.name[0] not in "._"}
    assert folders <= {"core", "train", "read", "launch"}, "a new part: what may it import?"


def test_nothing_imports_a_script_and_no_imports_are_circular() -> None:
    graph = {}
    for module, file in [*MODULES.items(), *((s, ROOT / f"{s}.py") for s in SCRIPTS)]:
        names = {name for name, _ in imports(file)}
        if module not in ("bert", "vit"):  # only these two use another script: the callback
            assert not names & set(SCRIPTS), module
        graph[module] = names & {*MODULES, *SCRIPTS}
    # Imports inside functions count: they would hide a cycle, not remove it.
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert set(order) == set(graph) and order.index("harness.core.settings") < order.index("bert")


@pytest.mark.parametrize("module", [*BASE, *modules_of("read"), *modules_of("launch")])
def test_modules_of_launch_and_read_do_not_import_torch(module: str) -> None:
    assert not {name.split(".")[0] for name, _ in imports(MODULES[module])} & set(HEAVY)


def loaded_by(code: str) -> set[str]:
    """The packages that a fresh process has loaded after this code."""
    show = "import sys; print(*{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{show}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.process
def test_importing_launch_and_read_does_not_load_torch() -> None:
    # With what their imports import in turn, which the text of the files does not show.
    modules = [*BASE, *modules_of("read"), *modules_of("launch"), "harness.__main__", "harness.cli"]
    show = "assert harness.cli.main(['table', 'outputs/published/demo-tiny.jsonl.gz']) == 0"
    loaded = loaded_by(f"import {', '.join(modules)}\n{show}")
    assert "harness" in loaded and not loaded & set(HEAVY)


@pytest.mark.process
def test_a_command_line_is_read_before_anything_is_loaded() -> None:
    loaded = loaded_by(
        "from harness.core.command_line import parse, help_text, to_argv\n"
        "from harness.core.identity import run_id\n"
        "settings = parse('bert', ['--tiny', '--warmup_steps', '5'], {})\n"
        "parse('bert', to_argv(settings), {}); run_id(settings); help_text('vit')"
    )
    assert "harness" in loaded
    assert not loaded & {*HEAVY, "yaml", "numpy", "pandas"}


@pytest.mark.process
def test_the_sampler_of_a_run_loads_little() -> None:
    only = (
        "not {m for m in sys.modules if m.startswith(('harness.core.records', 'harness.train.s'))}"
    )
    loaded = loaded_by(f"import sys, harness.train.measure.sampler\nassert {only}")
    assert "psutil" in loaded and not loaded & {*HEAVY, "numpy"}


@pytest.mark.process
def test_link_is_measured_without_a_trainer() -> None:
    loaded = loaded_by("import harness.train.measure.link")
    assert "torch" in loaded and not loaded & {*HEAVY, "peft", "datasets"} - {"torch"}


def test_only_its_own_strategy_loads_hivemind() -> None:
    # An optional package: at the top of any other module it would be needed for every run.
    room = "harness.train.strategy.hivemind"
    for module, file in MODULES.items():
        for name, top in imports(file):
            if name == "hivemind" or name.startswith(("hivemind.", room)):
                assert module.startswith(room) or not top, (module, name)


def test_strategies_are_spelled_in_one_table() -> None:
    # Elsewhere a rule asks a property of Strategy, so that a new one is added by one entry.
    spelled = {
        module
        for module, file in MODULES.items()
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Constant) and node.value in STRATEGIES
    }
    assert spelled == set(SPELLED)


def test_the_strategy_of_peers_is_named_in_its_room_and_in_descriptions() -> None:
    (name,) = (name for name, strategy in STRATEGIES.items() if strategy.has_peers)
    room = f"harness.train.strategy.{name}"
    named = {m for m, file in MODULES.items() if any(name in text for text in texts_of(file))}
    described = {"harness.core.settings", "harness.core.schema.rows"}
    spelled = {module for module in named if not module.startswith(room)}
    table_and_colours = {"harness.core.strategies", "harness.read.figures.panels"}
    assert spelled == described | table_and_colours | {"harness.core.provenance"}


def test_the_files_of_a_record_are_named_in_one_table() -> None:
    names = {record.file for record in RECORDS.values() if "/" not in record.file}
    named = {
        module
        for module, file in MODULES.items()
        if any(name in text for text in texts_of(file) for name in names)
    }
    described = {m for m in named if m.startswith("harness.core.schema.")}
    assert named - described == set() and "harness.core.schema.checks" in described


def test_markdown_tables_are_written_by_one_function() -> None:
    files = [f for part in ("harness", "benchmarks", "docs") for f in (ROOT / part).rglob("*.py")]
    by_hand = {f.stem for f in files if any("---|" in t or t == " | " for t in texts_of(f))}
    # Training imports nothing of reading: its model card has a table of its own.
    assert by_hand == {"table", "publish"}


def test_figures_draw_with_the_kit_alone() -> None:
    own = r"\.(plot|step|scatter|fill_between|errorbar|vlines|hlines|ax[hv](line|span))\("
    figures = [HARNESS / "read" / "drawing.py", *(HARNESS / "read" / "figures").glob("*.py")]
    assert [f.name for f in figures if re.search(own, f.read_text("utf-8"))] == ["drawing.py"]


def test_flags_are_read_by_one_parser() -> None:
    files = [f for part in ("harness", "benchmarks") for f in (ROOT / part).rglob("*.py")]
    own = re.compile(r"argparse\.ArgumentParser\)?[:(]")
    parsers = {f.relative_to(ROOT).as_posix() for f in files if own.search(f.read_text("utf-8"))}
    # A file of flags for SLURM, and the one flag that is looked for among torchrun's.
    others = {"harness/launch/slurm/__init__.py", "harness/train/stopped.py"}
    assert parsers == {"harness/cli.py", *others}


def test_no_name_is_what_was_told_or_said() -> None:
    # It says nothing of what the thing is.
    for file in [*FILES, *(ROOT / "benchmarks").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names = (str(getattr(node, field, "")) for field in ("id", "attr", "arg", "name"))
            assert not {"told", "said"} & {word for name in names for word in name.split("_")}, file


def test_tasks_are_listed_by_one_function() -> None:
    one, other = TASKS
    both = re.compile(rf"\b{one}\b.{{1,8}}\b{other}\b")
    assert [m for m, file in MODULES.items() if any(map(both.search, texts_of(file)))] == []


def test_test_files_import_nothing_from_test_files() -> None:
    imported = {
        name
        for file in (ROOT / "tests").rglob("*.py")
        for name, _ in imports(file)
        if name.rpartition(".")[2].startswith("test_") or ".test_" in name
    }
    assert imported == set(), "helpers of several test files belong in tests/support"


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = {}
    for module, file in MODULES.items():
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    assert len(places) > 100
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


@pytest.mark.parametrize("module", MODULES)
def test_errors_and_warnings_are_printed_by_one_function_each(module: str) -> None:
    for node in ast.walk(ast.parse(MODULES[module].read_text("utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and node.keywords:
            prefix = re.search(r"(error|warning): ", "".join(map(ast.unparse, node.args)))
            assert not prefix or module == "harness.core.process", f"{module}:{node.lineno}"


def room_of(module: str) -> str:
    """The folder that a module lies in, without the name of the package."""
    package = MODULES[module].parent.relative_to(HARNESS)
    return ".".join(package.parts)


def test_imports_between_rooms_go_downwards() -> None:
    rooms = {room_of(module) for module in MODULES} - {""}
    assert rooms == set(ROOMS), "a room is missing here, or is gone"
    upward = set()
    for module, file in MODULES.items():
        room = room_of(module)
        below = {room, *ROOMS.get(room, ())} | {*(() if room in BASE_ROOMS else BASE_ROOMS)}
        if module in ABOVE:
            below |= {"launch.netns", "launch.ssh", "launch.slurm"}
        for imported in ours(file) & set(MODULES):
            other = room_of(imported)
            above = imported in ABOVE and module not in ABOVE
            if room and (above or other not in below):
                upward.add((module.removeprefix("harness."), imported.removeprefix("harness.")))
    assert upward == UPWARD


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_few_files_and_a_docstring(room: str) -> None:
    files = list((HARNESS / room.replace(".", "/")).glob("*.py"))
    assert len(files) <= MOST_FILES
    assert (HARNESS / room.replace(".", "/") / "__init__.py").read_text("utf-8").startswith('"""')


def test_the_page_on_architecture_names_what_is_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    picture = page.split("```")[1]
    assert [room for room in ROOMS if room.rpartition(".")[2] not in picture] == []
    files = re.findall(r"`((?:core|train|launch|read)/[\w/.]*)`", page)
    assert len(files) > 5 and [file for file in files if not (HARNESS / file).exists()] == []


def test_each_change_has_files_and_a_test_that_are_there() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    rows = [line.strip("|").split("|") for line in page.splitlines() if line[:2] == "| "][1:]
    kinds = ("model family", "dataset kind", "metric", "strategy", "launcher", "figure", "flag")
    assert all(any(kind in row[0] for row in rows) for kind in kinds)
    for change, files, test in rows:
        named = re.findall(r"`([\w.]+(?:/[\w.]*)+)`", files + test)
        assert [file for file in named if not (ROOT / file).exists()] == [], change
        assert any(file.startswith("tests/") for file in named), change
        assert len(named) > 1 or "nothing" in files, change
        modules = re.findall(r"python -m ([\w.]+)", files)
        assert all((ROOT / f"{name.replace('.', '/')}.py").is_file() for name in modules), change


def test_the_sizes_that_the_page_states_are_true_to_a_tenth() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    stated = {
        name: int(now.replace(",", ""))
        for name, now in re.findall(r"^\| ([\w ,`/]+) \| [\d,]+ \| ([\d,]*\d)", page, re.MULTILINE)
    }
    tests = [*(ROOT / "tests").rglob("*.py")]
    counted = {
        "modules of `harness/`": len(FILES),
        "lines of `harness/`": sum(len(f.read_text("utf-8").splitlines()) for f in FILES),
        "largest folder, in files": max(Counter(file.parent for file in FILES).values()),
        "lines of `tests/`": sum(len(f.read_text("utf-8").splitlines()) for f in tests),
    }
    assert stated.keys() == counted.keys()
    assert {n: (s, counted[n]) for n, s in stated.items() if abs(s / counted[n] - 1) > 0.1} == {}


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_files_are_short(file: Path) -> None:
    assert len(file.read_text("utf-8").splitlines()) <= MOST_LINES


def test_files_of_tests_are_short() -> None:
    lines = {f: len(f.read_text("utf-8").splitlines()) for f in (ROOT / "tests").rglob("*.py")}
    assert {file for file, count in lines.items() if count > MOST_LINES} == set()


# Words that differ between the scripts for text and for images.
WORDS = [(r"\b(texts?|images?)\b", "data"), (r"\b(bert|vit)\b", "script")]


def without_modality(node: ast.AST) -> str:
    """The code of a function, with the same words for text and for images."""
    text = ast.unparse(node).replace("load_texts", "load_data").replace("load_images", "load_data")
    for pattern, word in WORDS:
        text = re.sub(pattern, word, text)
    return text


def test_the_scripts_differ_only_in_their_data() -> None:
    functions = {}
    for name in ("bert", "vit"):
        text = (ROOT / f"{name}.py").read_text("utf-8")
        assert len(text.splitlines()) < 150
        body = ast.parse(text).body
        functions[name] = {n.name: n for n in body if isinstance(n, ast.FunctionDef)}
        # The call that a reader of Trainer scripts looks for stands in main, in plain sight.
        assert "Trainer(" in ast.unparse(functions[name]["main"])
    bert, vit = functions["bert"], functions["vit"]
    assert list(bert) == list(vit) == ["load_data", "build_model", "main"]
    for name in bert:
        # Docstrings of the functions other than main may differ: they describe the kind of model.
        first = 0 if name == "main" else 1
        pairs = zip(bert[name].body[first:], vit[name].body[first:], strict=True)
        assert all(without_modality(one) == without_modality(other) for one, other in pairs), name
        assert without_modality(bert[name].args) == without_modality(vit[name].args)
