"""What produces a run's numbers: this checkout, its packages, the driver, local input files."""

from __future__ import annotations

import ast
import contextlib
import difflib
import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, NamedTuple, cast

from harness.core.files.columns import check_columns
from harness.core.records import CHECKPOINT, RunFolder, read_json, write_json
from harness.core.schema.checks import believable
from harness.core.schema.environment import InputRecord, InputsRecord
from harness.core.settings import Settings, UserError, nearest
from harness.core.strategies import own_strategy
from harness.core.tasks import DATA_FILES, TASKS, parsed, script_file, task_of, task_with_model
from harness.core.tasks import ROOT as ROOT

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "evaluate", "tokenizers", "numpy")


class OptionalPackage(NamedTuple):
    """A package that only some runs need, in the one version that they accept."""

    name: str
    version: str
    needed_for: str

    @property
    def install(self) -> str:
        return f"pip install {self.name}=={self.version}"

    @property
    def is_missing(self) -> bool:
        return find_spec(self.name) is None


HIVEMIND = OptionalPackage("hivemind", "1.1.12", "--strategy hivemind")
PEFT = OptionalPackage("peft", "0.21.2", "--lora")
OPTIONAL = {each.name: each for each in (HIVEMIND, PEFT)}


def versions() -> dict[str, str | None]:
    """The installed version of each package; null where it is missing."""
    return {name: version_of(name) for name in PACKAGES}


def missing_packages() -> dict[str, str]:
    """Required packages that are not installed: name -> requirement as pip reads it."""
    needed = {re.split(r"[^\w.-]", need)[0]: need for need in _needed()}
    return {name: need for name, need in needed.items() if version_of(name) is None}


def _needed() -> list[str]:
    """The requirements in pyproject.toml of a checkout, or in the metadata of an installed copy."""
    from importlib import metadata

    project = ROOT / "pyproject.toml"
    if project.is_file():
        import tomllib

        return list(tomllib.loads(project.read_text("utf-8"))["project"]["dependencies"])
    try:
        known = metadata.requires("hf-distribution-harness") or []
    except metadata.PackageNotFoundError:
        return [*PACKAGES]
    return [need for need in known if "extra ==" not in need]


def installing() -> str:
    """The command that installs missing packages."""
    root = shlex.quote(str(ROOT))
    if not (ROOT / "Makefile").is_file():
        return shlex.join([sys.executable, "-m", "pip", "install", *missing_packages().values()])
    activate, install = f"source {root}/.venv/bin/activate", f"make -C {root} install"
    is_ready = (ROOT / ".venv" / "ready").is_file()
    if Path(sys.prefix) == ROOT / ".venv":  # if its installation was interrupted
        return f"rm {root}/.venv/ready && {install}" if is_ready else install
    return activate if is_ready else f"{install} && {activate}"


def without_package(error: ModuleNotFoundError) -> UserError:
    """How to install a missing package; a failed import of our own code is raised unchanged."""
    package = str(error.name).partition(".")[0]
    if package in ("None", "harness"):
        raise error
    return UserError(f"{sys.executable} has no package {package}: {installing()}, then try again")


def commit() -> dict[str, Any]:
    """Commit of this checkout and whether files differ from it; null outside a checkout."""
    try:
        # An installed copy may lie inside the checkout of another project.
        _git("ls-files", "--error-unmatch", "harness/core/provenance.py")
        head = _git("rev-parse", "HEAD")
        changed = bool(_git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
    return {"commit": head, "dirty": changed}


def source_checksum(folders: Sequence[str] = ("harness",)) -> str:
    """A checksum of the scripts and of the modules in these folders, committed or not."""
    scripts = [ROOT / f"{name}.py" for name in (*TASKS, "logcallback")]
    modules = (file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    files = sorted([*filter(Path.is_file, scripts), *modules])
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


class Driver(NamedTuple):
    """What NVIDIA's driver reports, whether or not torch can use its GPUs."""

    gpus: int
    version: str
    cuda: tuple[int, int]  # the newest version that it supports
    oldest: tuple[int, int]  # lowest compute capability of its GPUs
    problem: str | None = None  # why an installed driver does not answer

    @property
    def advice(self) -> str:
        """Which build of torch to install for this driver and its GPUs."""
        if self.oldest < (7, 5):  # too old for the builds for CUDA 13
            driver = "" if self.cuda >= (12, 0) else " and a driver of version 560 or newer"
            return f"install {build_of_torch('cu126')}{driver}"
        if self.cuda >= (13, 0):
            return f"install {build_of_torch('cu130')}"
        build = f"{build_of_torch('cu126')}, or " if self.cuda >= (12, 0) else ""
        return f"install {build}a driver of version 580 or newer"


def build_of_torch(name: str) -> str:
    """The name of a build, with the command that installs it in a checkout."""
    return f"the {name} build of torch (make install TORCH={name})"


def nvidia_driver() -> Driver | None:
    """The driver; None if there is none. A driver that is installed but fails, as after an update
    without a restart, is not taken for a machine without GPUs.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None
    except pynvml.NVMLError as error:
        return Driver(0, "", (0, 0), (0, 0), str(error))
    name, cuda = "", (0, 0)
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
        name = version if isinstance(version, str) else version.decode()
        newest = pynvml.nvmlSystemGetCudaDriverVersion()
        cuda = (newest // 1000, newest % 1000 // 10)
        count, capabilities, problem = pynvml.nvmlDeviceGetCount(), [], None
        for number in range(count):
            try:
                gpu = pynvml.nvmlDeviceGetHandleByIndex(number)
                capabilities.append(tuple(pynvml.nvmlDeviceGetCudaComputeCapability(gpu)))
            except pynvml.NVMLError as error:  # a GPU that is lost, or not ours: others may do
                problem = str(error)
        if problem and not capabilities:
            return Driver(0, name, cuda, (0, 0), problem)
        return Driver(count, name, cuda, min(capabilities, default=(0, 0)))
    except pynvml.NVMLError as error:
        return Driver(0, name, cuda, (0, 0), str(error))
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def visible_gpus(count: int) -> tuple[str, ...]:
    """Which of `count` GPUs CUDA_VISIBLE_DEVICES leaves visible, named as in it. CUDA reads it
    up to the first entry that names no GPU, and shows none if an entry stands there twice.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(map(str, range(count)))

    def names_one(entry: str) -> bool:
        number = entry.isdecimal() and int(entry) < count
        return number or entry.startswith(("GPU-", "MIG-"))

    entries = tuple(takewhile(names_one, map(str.strip, visible.split(","))))
    return entries if len({*entries}) == len(entries) else ()


# Variables that `harness nodes` sets for the command that it runs.
NODES_LINK = "HARNESS_NODES_LINK"
SHARED_GPUS = "HARNESS_NODES_GPUS"  # the number of GPUs, if nodes share them
# PID of the process that carries emulated nodes' packets, whose load is ours; on one node alone.
RELAY = "HARNESS_RELAY"


def cache_root() -> Path:
    """The folder of our cache, beside the Hub's; it may be deleted at any time."""
    default = Path.home() / ".cache" / "huggingface"
    return Path(os.environ.get("HF_HOME", default)).expanduser() / "harness"


def inputs(settings: Settings) -> InputsRecord:
    """What determines a run's numbers but may change under the same command: local files, code."""
    dataset, model = (Path(str(n)).expanduser() for n in (settings.dataset, settings.model))
    local = not str(settings.dataset).startswith("embedded:") and dataset.exists()
    script = script_file(settings.script)
    ours = [ROOT / f"{name}.py" for name in TASKS]  # part of `code`; a copy beside them is not
    return {
        "dataset": _content(dataset, _data_files(dataset)) if local else None,
        "model": _content(model, _model_files(model)) if model.is_dir() else None,
        "script": _code(script) if script and script.resolve() not in ours else None,
        "strategy": strategy_code(settings),
        "code": source_checksum(("harness/core", "harness/train")),
        "link": os.environ.get(NODES_LINK),
    }


def check_inputs(settings: Settings) -> None:
    """Refuse data or a model that cannot exist, as far as the name and this disk tell.

    Skipped for a user's own script, which may know others.
    """
    if settings.script in TASKS:
        check_dataset(settings)
        check_columns(settings)
        check_model(settings)


def check_dataset(settings: Settings) -> None:
    name, config = str(settings.dataset), settings.dataset_config
    path, embedded = Path(name).expanduser(), name.startswith("embedded:")
    known = [str(task.tiny["dataset"]) for task in TASKS.values()]
    if embedded and name not in known:
        raise UserError(f"--dataset {name}: expected one of {', '.join(known)}")
    if embedded and config is not None:
        raise UserError(f"--dataset_config {config}: {name} has no configurations")
    if path.is_file() and config is not None:
        raise UserError(f"--dataset_config {config}: {path.name} is a file and has none")
    if path.is_file() and path.suffix not in DATA_FILES:
        raise UserError(
            f"--dataset {name}: expected a folder or a file that ends in {', '.join(DATA_FILES)}"
        )
    if (_is_path(name) or path.suffix in DATA_FILES) and not path.exists():
        hint = _nearest_beside(name, lambda p: p.is_dir() or p.suffix in DATA_FILES)
        raise UserError(f"--dataset {name}: there is no such folder or file{hint}")


def _nearest_beside(name: str, fits: Callable[[Path], bool]) -> str:
    """': did you mean X?' for a path of which only the last part is wrong, or nothing."""
    path = Path(name).expanduser()
    try:
        names = [p.name for p in path.parent.iterdir() if not p.name.startswith(".") and fits(p)]
    except OSError:
        return ""
    folder = name.rstrip("/").removesuffix(path.name)
    hint = nearest(path.name, sorted(names), "", mark=folder)
    return f": {hint}" if hint else ""


def _is_path(name: str) -> bool:
    """Whether a name is a path: names on the Hub have at most one "/", inside."""
    return name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1


def check_model(settings: Settings) -> None:
    """Refuse a misspelt architecture or folder before the Hub answers with a confusing error."""
    name, known = str(settings.model), task_of(settings.script).architectures
    if name in known:
        return
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        below = (path.glob(f"{'*/' * depth}{CHECKPOINT}*/config.json") for depth in range(3))
        newest = max(chain.from_iterable(below), key=lambda f: f.stat().st_mtime, default=None)
        hint = f": did you mean {newest.parent}?" if newest else ""
        raise UserError(
            f"--model {name} is a folder without config.json: no model was saved there{hint}"
        )
    if _is_path(name) and not path.exists():
        hint = _nearest_beside(name, Path.is_dir)
        raise UserError(f"--model {name}: there is no such folder{hint}")
    if (other := task_with_model(name)) is not None:
        raise UserError(f"--model {name} is for {other.script}.py, not for {settings.script}.py")
    if "/" in name or Path(name).exists():
        return
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if near:
        raise UserError(f"--model {name} is not one of --list_models: did you mean {near[0]}?")


def strategy_code(settings: Settings) -> InputRecord | None:
    """The fingerprint of a user's own strategy; None for ours."""
    own = own_strategy(settings.strategy)
    return _code(own[0]) if own else None


def _code(file: Path) -> InputRecord:
    """Size and checksum of a code file and its imports from its own folder, ignoring comments."""
    digest, seen = hashlib.sha256(), [file]
    for file in seen:
        tree = parsed(file)
        digest.update(f"{file.name}\0{ast.unparse(tree)}\0".encode())
        for node in ast.walk(tree):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{name}" for name in names)]
            files = (seen[0].parent / f"{name.replace('.', '/')}.py" for name in names)
            seen += [f for f in dict.fromkeys(files) if f.is_file() and f not in seen
                     and not f.resolve().is_relative_to(ROOT / "harness")]  # fmt: skip
    size = sum(file.stat().st_size for file in seen)
    return {"files": len(seen), "bytes": size, "checksum": digest.hexdigest()[:16]}


def recorded_inputs(folder: RunFolder) -> dict[str, Any]:
    """The inputs that an earlier run recorded; empty if it recorded none."""
    environment = cast(dict[str, Any], folder.read_environment() or {})
    return believable("environment", environment).get("inputs") or {}


def changed_inputs(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Which inputs differ from those of an earlier run, in words; empty if none does."""
    changes = []
    files = {"dataset": "the files of --dataset have", "model": "the files of --model have",
             "script": "the script has", "strategy": "the file of --strategy has"}  # fmt: skip
    for name, what in files.items():
        old, new = before.get(name) or {}, now.get(name) or {}
        if {"files", "bytes", "checksum"} <= old.keys() & new.keys() and (
            old["checksum"] != new["checksum"]
        ):
            sizes = dict.fromkeys(
                f"{one['files']} file{'s' if one['files'] != 1 else ''} of {one['bytes']:,} bytes"
                for one in (old, new)
            )
            same = "still " if len(sizes) == 1 else ""
            changes.append(f"{what} changed since ({same}{', now '.join(sizes)})")
    if "link" in before and before["link"] != now["link"]:
        links = (f"over {one['link']}" if one["link"] else "without one" for one in (before, now))
        changes.append(f"the link of `harness nodes` is another ({', now '.join(links)})")
    return " and ".join(changes)


def _data_files(path: Path) -> Iterator[Path]:
    """The files of a data set, without caches that libraries keep in its folder."""
    if path.is_file():
        return iter([path])
    inside = (p for p in path.rglob("*") if p.is_file() and not p.match("cache-*.arrow"))
    return (p for p in inside if not any(part[0] == "." for part in p.relative_to(path).parts))


def _model_files(folder: Path) -> Iterator[Path]:
    """The files that loading a model reads: no checkpoints, no files written for people."""
    return (p for p in folder.iterdir() if p.is_file() and p.name[0] != "." and p.suffix != ".md")


def _content(root: Path, files: Iterable[Path]) -> InputRecord:
    """Number, total size and checksum of files. The checksum is cached until the name, size or time
    of a file changes: reading a large data set for every run would take minutes.
    """
    paths = sorted(files)
    states = [file.stat() for file in paths]
    names = [file.relative_to(root.parent).as_posix() for file in paths]
    marks = [(n, s.st_size, s.st_mtime_ns) for n, s in zip(names, states, strict=True)]
    stamp = hashlib.sha256(repr(marks).encode()).hexdigest()
    root_hash = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:24]
    kept = cache_root() / "checksums" / f"{root_hash}.json"
    known = read_json(kept) or {}
    if known.get("stamp") != stamp or not isinstance(known.get("checksum"), str):
        known = {"stamp": stamp, "checksum": _checksum(root, paths)}
        with contextlib.suppress(OSError):  # an unwritable cache only costs time
            write_json(kept, known)
    size = sum(state.st_size for state in states)
    return {"files": len(paths), "bytes": size, "checksum": known["checksum"]}


def _checksum(root: Path, files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        try:
            with file.open("rb") as content:
                of_file = hashlib.file_digest(content, "sha256").hexdigest()
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}") from None
        # Names are relative to the root: the same files elsewhere are the same input.
        digest.update(f"{file.relative_to(root).as_posix()}\0{of_file}\0".encode())
    return digest.hexdigest()[:16]


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()


def version_of(package: str) -> str | None:
    from importlib import metadata  # its import would take a tenth of a command's start-up time

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
