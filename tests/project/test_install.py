"""Installed as a package, the project works from any folder, without its checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from harness.core.provenance import OPTIONAL
from harness.core.strategies import STRATEGIES
from harness.train.patches import CHECKED

CHECK = """
import json
import harness
from harness.core import provenance
print(json.dumps({
    "harness": harness.__file__, "runs": len(harness.load(RECORDS)),
    "source": provenance.source_checksum(), **provenance.commit(),
}))
"""
CALLBACK = """
from logcallback import LogCallback
print(LogCallback.__module__)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds, as in site-packages."""
    root = Path(__file__).resolve().parents[2]
    work, target = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("site")
    # A copy, since building leaves folders in the tree; only what git knows goes into it.
    kinds = ("*.py", "*.toml", "*.md", "LICENSE", "harness")
    files = subprocess.run(
        ["git", "ls-files", "-z", "--", *kinds], cwd=root, capture_output=True, check=True
    ).stdout
    for name in filter(None, files.decode().split("\0")):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_bytes((root / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target), "."],
        cwd=work, check=True, timeout=120,
    )  # fmt: skip
    return target


def python(installed: Path, cwd: Path, *words: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, *words]
    done = subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.process
def test_the_package_works_from_any_folder(installed: Path, tmp_path: Path, root: Path) -> None:
    records = root / "outputs" / "published" / "sweeps" / "demo-tiny"
    code = f"RECORDS = {str(root / 'outputs/published/vit/1_1')!r}" + CHECK
    first = python(installed, tmp_path, "-c", code)
    facts = json.loads(first)
    assert Path(facts["harness"]).is_relative_to(installed)
    assert facts["runs"] > 0
    assert python(installed, tmp_path, "-c", CALLBACK) == "logcallback\n"
    # It lies in no checkout of its own, even where the folder belongs to another project.
    assert facts["commit"] is None and facts["dirty"] is None
    subprocess.run(["git", "init", "-q", str(installed)], check=True)
    # What else is installed beside it is not what measures.
    (installed / "another.py").write_text("")
    assert python(installed, tmp_path, "-c", code) == first
    script = (installed / "bin" / "harness").read_text()
    assert "from harness.__main__ import main" in script
    shown = python(installed, tmp_path, str(installed / "bin" / "harness"), "table", str(records))
    assert "vit" in shown
    settings = python(installed, tmp_path, "-m", "vit", "--tiny", "--print_settings")
    assert "embedded:digits" in settings
    command = ["git", "ls-files", "-z", "--", "harness"]
    names = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    missing = [n for n in filter(None, names.split("\0")) if not (installed / n).is_file()]
    assert not missing  # also what is no module: texts, the style of a report


def test_what_the_package_does_not_have() -> None:
    import harness

    assert harness.load is harness.read.load
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = harness.lode


def test_what_is_tested_lies_in_the_ranges_of_the_package(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (root / "constraints.txt").read_text(), re.M))
    extras = project["optional-dependencies"]
    ranges = dict(re.match(r"([\w-]+)(.*)", each).groups() for each in  # type: ignore[union-attr]
                  [*project["dependencies"], *(each for extra in extras.values() for each in extra
                   if project["name"] not in each)])  # fmt: skip
    assert ranges.keys() == pins.keys()
    from packaging.specifiers import SpecifierSet

    for name, pin in pins.items():
        assert pin in SpecifierSet(ranges[name]), name
    for optional in OPTIONAL.values():  # exact, in every place
        assert pins[optional.name] == optional.version
        assert ranges[optional.name] == f"=={optional.version}"
    assert {each.package for each in STRATEGIES.values()} - {None} <= OPTIONAL.keys()
    for name, (version, same) in CHECKED.items():  # any other is refused when a run begins
        assert f"{pins[name]}.".startswith(f"{version}."), name
        *before, last = version.split(".")[:same]
        later = ".".join([*before, str(int(last) + 1), "0"])
        assert later not in SpecifierSet(ranges[name]), name


@pytest.mark.process
@pytest.mark.parametrize("torch", ["", "cpu", "cu126", "cu130"])
def test_make_takes_the_build_of_torch_that_fits(root: Path, tmp_path: Path, torch: str) -> None:
    """Without an NVIDIA driver the CPU's; the demo ends with the page to open."""
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(root / name, tmp_path)

    def plan(*chosen: str) -> str:
        (tmp_path / "bin").mkdir(exist_ok=True)  # no nvidia-smi here
        for tool in ("sed", "sh", "python3"):
            if not (tmp_path / "bin" / tool).exists():
                (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
        command = [str(shutil.which("make")), "-n", "demo", *chosen]
        done = subprocess.run(command, cwd=tmp_path, env={"PATH": str(tmp_path / "bin")},
                              capture_output=True, text=True, check=True)  # fmt: skip
        return done.stdout

    said = plan(*([f"TORCH={torch}"] if torch else []))
    pin = re.findall(r"^torch==\S+", (root / "constraints.txt").read_text(), re.M)[0]
    build = torch or "cpu"
    first, second = re.findall(rf"{re.escape(pin)}\+{build} (.*?)2>", said)
    assert (first, second) == ("", f"--index-url https://download.pytorch.org/whl/{build} ")
    assert said.index(pin) < said.index("-c constraints.txt -e '.[trackers]'")
    assert said.splitlines()[-1].startswith('echo "open outputs/demo/report/report.html')
    # A later call keeps what is there, unless another is named.
    (tmp_path / ".venv").mkdir()
    for stamp in (f".venv/torch-{torch or 'cpu'}", ".venv/ready"):
        (tmp_path / stamp).touch()
    assert "pip install" not in plan()
    other = plan("TORCH=cu118", "TORCH_INDEX=https://here/whl")
    assert f"{pin}+cu118 --index-url https://here/whl/cu118 " in other


@pytest.mark.process
@pytest.mark.parametrize("has_it", ["pip", "PyTorch", "none"])
def test_where_no_index_has_the_build_of_torch_one_line_says_so(
    root: Path, tmp_path: Path, has_it: str
) -> None:
    for name in ("Makefile", "constraints.txt"):
        shutil.copy(root / name, tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    codes = {"pip": (0, 1), "PyTorch": (1, 0), "none": (1, 1)}[has_it]
    text = 'case "$*" in *--index-url*) exit {1};; *"-m pip"*) exit {0};; esac\n'.format(*codes)
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n{text}')
    python.chmod(0o755)
    done = subprocess.run(
        ["make", ".venv/torch-cpu", "TORCH=cpu"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said = (
        "no cpu build of torch was found: pip takes the one that it finds; on Linux" in done.stdout
    )
    assert said == (has_it == "none")
    assert len((tmp_path / "asked").read_text().splitlines()) == 1 + (has_it != "pip")


@pytest.mark.process
def test_a_build_of_torch_is_tried_again_after_a_failed_set_up(root: Path, tmp_path: Path) -> None:
    """A second `make` believed the stamp, and pip took another build."""
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(root / name, tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\ncase "$*" in *constraints.txt*) exit 1;; esac\n')
    python.chmod(0o755)
    command = ["make", ".venv/ready", "TORCH=cpu", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and not [*(tmp_path / ".venv").glob("torch-*")], done.stderr


@pytest.mark.process
def test_one_call_of_pip_installs_what_tests_and_users_need(root: Path, tmp_path: Path) -> None:
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(root / name, tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    python.chmod(0o755)

    def make(*words: str) -> str:
        command = ["make", *words, "TORCH=cpu"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout

    make(".venv/ready-dev")
    asked = (tmp_path / "asked").read_text()
    assert re.findall(r"constraints.txt -e (\S+)", asked) == [".[dev]"]
    assert "pip install" not in make("-n", ".venv/ready", ".venv/ready-dev")
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert any("trackers" in each for each in project["optional-dependencies"]["dev"])
    # What was installed for the notebook stays current.
    make(".venv/ready-notebook")
    (tmp_path / ".venv" / "ready-dev").unlink()
    assert "pip install" in make("-n", ".venv/ready-dev")
    make(".venv/ready-dev")
    assert "pip install" not in make("-n", ".venv/ready-notebook")


@pytest.mark.process
def test_every_locked_package_has_a_licence(root: Path) -> None:
    command = [sys.executable, ".ci/licences.py"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    found = {line[:28].strip(): line[28:].split(None, 1)[-1] for line in done.stdout.splitlines()}
    assert {"torch", "transformers", "datasets", "pyarrow"} <= found.keys()  # also what those need
    assert "unknown" not in found.values()
