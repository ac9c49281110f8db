"""What a run is made of: this checkout, its packages, the driver, and the local files it reads."""

from __future__ import annotations

import ast
import contextlib
import getpass
import glob
import hashlib
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, cast

from harness.core.records import RunFolder, read_json, write_json
from harness.core.schema.dictionary import believable
from harness.core.settings import UNRECORDED, Settings, as_mapping
from harness.core.strategies import own_strategy
from harness.core.tasks import ROOT as ROOT
from harness.core.tasks import TASKS, parsed, script_file

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "evaluate", "tokenizers", "numpy")


def versions() -> dict[str, str | None]:
    """By package; null where it is not installed."""
    return {name: _version(name) for name in PACKAGES}


def commit() -> dict[str, Any]:
    """Commit of this checkout and whether files differ from it; null where it is no checkout."""
    try:
        # An installed copy may lie in the checkout of another project.
        _git("ls-files", "--error-unmatch", "harness/core/provenance.py")
        head = _git("rev-parse", "HEAD")
        changed = bool(_git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
    return {"commit": head, "dirty": changed}


def source_checksum(folders: Sequence[str] = ("harness",)) -> str:
    """A checksum of the code that measures, committed or not."""
    scripts = [ROOT / f"{name}.py" for name in (*TASKS, "logcallback")]
    modules = (file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    files = sorted([*filter(Path.is_file, scripts), *modules])
    whole = hashlib.sha256()
    for file in files:
        whole.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes() + b"\0")
    return whole.hexdigest()[:12]


class Driver(NamedTuple):
    """What NVIDIA's driver says, whether or not torch can use its GPUs."""

    gpus: int
    version: str
    cuda: tuple[int, int]  # the newest that it runs
    oldest: tuple[int, int]  # compute capability of its GPUs

    @property
    def advice(self) -> str:
        """The build of torch for this driver and its GPUs, by the name that torch gives it."""
        if self.oldest < (7, 5):  # of the generations that builds for CUDA 13 have left behind
            return "install the cu126 build of torch" + ("" if self.cuda >= (12, 0) else NEWER[1])
        if self.cuda >= (13, 0):
            return "install the cu130 build of torch"
        return (
            f"install the cu126 build of torch, or {NEWER[0]}"
            if self.cuda >= (12, 0)
            else (f"install {NEWER[0]}")
        )


NEWER = ("a driver of version 580 or newer", " and a driver of version 560 or newer")


def nvidia_driver() -> Driver | None:
    """None without one."""
    import pynvml

    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        newest = pynvml.nvmlSystemGetCudaDriverVersion()
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
        capabilities = [tuple(pynvml.nvmlDeviceGetCudaComputeCapability(gpu)) for gpu in gpus]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    name = version if isinstance(version, str) else version.decode()
    cuda = (newest // 1000, newest % 1000 // 10)
    return Driver(len(gpus), name, cuda, min(capabilities, default=(0, 0)))


def visible_gpus(count: int) -> tuple[str, ...]:
    """Those of so many that CUDA_VISIBLE_DEVICES leaves visible, by the names that it has."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = range(count) if visible is None else map(str.strip, visible.split(","))
    return tuple(str(name) for name in names if name not in ("", "-1"))


# Of `harness nodes`, in the environment of the command that it runs.
NODES_LINK = "HARNESS_NODES_LINK"


def cache_root() -> Path:
    """Beside the Hub's cache; it may be deleted at any time."""
    default = Path.home() / ".cache" / "huggingface"
    return Path(os.environ.get("HF_HOME", default)).expanduser() / "harness"


def inputs(settings: Settings) -> dict[str, Any]:
    """What the numbers of a run come from that may change under its command: local files, code."""
    dataset, model = (Path(str(n)).expanduser() for n in (settings.dataset, settings.model))
    local = not str(settings.dataset).startswith("embedded:") and dataset.exists()
    script = script_file(settings.script)
    own = script is not None and script.resolve() != ROOT / f"{settings.script}.py"
    strategy = own_strategy(settings.strategy)
    return {
        "dataset": _content(dataset, _data_files(dataset)) if local else None,
        "model": _content(model, _model_files(model)) if model.is_dir() else None,
        "script": _code(script) if own and script is not None else None,
        "strategy": _code(strategy[0]) if strategy else None,
        "code": source_checksum(("harness/core", "harness/train")),
        "link": os.environ.get(NODES_LINK),
    }


def _code(file: Path) -> dict[str, Any]:
    """A file of code and what it imports from its own folder, without comments and spaces."""
    whole, seen = hashlib.sha256(), [file]
    for file in seen:
        tree = parsed(file)
        whole.update(f"{file.name}\0{ast.unparse(tree)}\0".encode())
        for node in ast.walk(tree):
            names = [alias.name for alias in getattr(node, "names", ())]
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{name}" for name in names)]
            elif not isinstance(node, ast.Import):
                continue
            found = (seen[0].parent / f"{name.replace('.', '/')}.py" for name in names)
            seen += [f for f in dict.fromkeys(found) if f.is_file() and f not in seen
                     and not f.resolve().is_relative_to(ROOT / "harness")]  # fmt: skip
    size = sum(file.stat().st_size for file in seen)
    return {"files": len(seen), "bytes": size, "checksum": whole.hexdigest()[:16]}


def recorded_inputs(folder: RunFolder) -> dict[str, Any]:
    """Those of an earlier run; empty for records that do not have them."""
    environment = cast(dict[str, Any], folder.read_environment() or {})
    return believable("environment", environment).get("inputs") or {}


def changed_inputs(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Which local files differ from those of an earlier run, in words; empty if none does."""
    changes = []
    files = {"dataset": "the files of --dataset have", "model": "the files of --model have",
             "script": "the script has", "strategy": "the file of --strategy has"}  # fmt: skip
    for name, what in files.items():
        old, new = before.get(name) or {}, now.get(name) or {}
        if {"files", "bytes", "checksum"} <= old.keys() & new.keys() and (
            old["checksum"] != new["checksum"]
        ):
            sizes = (f"{one['files']} with {one['bytes']:,} bytes" for one in (old, new))
            changes.append(f"{what} changed since ({', now '.join(sizes)})")
    if "link" in before and before["link"] != now["link"]:
        links = (f"over {one['link']}" if one["link"] else "without one" for one in (before, now))
        changes.append(f"the link of `harness nodes` is another ({', now '.join(links)})")
    return " and ".join(changes)


def _data_files(path: Path) -> Iterator[Path]:
    """Without what libraries keep beside the data."""
    if path.is_file():
        return iter([path])
    inside = (p for p in path.rglob("*") if p.is_file() and not p.match("cache-*.arrow"))
    return (p for p in inside if not any(part[0] == "." for part in p.relative_to(path).parts))


def _model_files(folder: Path) -> Iterator[Path]:
    """What loading a model reads: not its checkpoints, nor what is written for people."""
    return (p for p in folder.iterdir() if p.is_file() and p.name[0] != "." and p.suffix != ".md")


def _content(root: Path, files: Iterable[Path]) -> dict[str, Any]:
    """Number, size and checksum. The checksum is kept for as long as no file has another name, size
    or time: reading a large data set again for each run would take minutes.
    """
    paths = sorted(files)
    states = [file.stat() for file in paths]
    names = [file.relative_to(root.parent).as_posix() for file in paths]
    marks = [(n, s.st_size, s.st_mtime_ns) for n, s in zip(names, states, strict=True)]
    stamp = hashlib.sha256(repr(marks).encode()).hexdigest()
    place = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:24]
    kept = cache_root() / "checksums" / f"{place}.json"
    known = read_json(kept) or {}
    if known.get("stamp") != stamp or not isinstance(known.get("checksum"), str):
        known = {"stamp": stamp, "checksum": _checksum(root, paths)}
        with contextlib.suppress(OSError):  # it is only slower without
            write_json(kept, known)
    size = sum(state.st_size for state in states)
    return {"files": len(paths), "bytes": size, "checksum": known["checksum"]}


def _checksum(root: Path, files: Sequence[Path]) -> str:
    whole = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        # Names below the root: the same files elsewhere are the same input.
        whole.update(f"{file.relative_to(root).as_posix()}\0{digest}\0".encode())
    return whole.hexdigest()[:16]


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# What may stand in a record that others will read: no secrets, no home folder, no place.
SECRET = re.compile(r"token|key|secret|password", re.IGNORECASE)
# Flags that name machines and people on them.
PLACES = re.compile(r"^--(hosts|hosts.file|master.addr|ssh|initial.peers)$")


CREDENTIALS = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@]+@", re.IGNORECASE)
# Known by what their services put in front; or by what stands before them, as 40 digits alone are
# a commit.
TOKENS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{10,}|gh[a-z]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|"
    r"A[KS]IA[A-Z0-9]{16}|AIza[\w-]{30,}|sk-[\w-]{16,}|xox[a-z]-[\w-]{10,}|wandb_v1_\w{16,}|"
    r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})(?![\w-])"
)
NAMED_TOKENS = re.compile(
    r"((?:TOKEN|KEY|SECRET|PASSWORD)=|(?i:token|key|secret|password|bearer)\W{1,3}"
    r"(?=[0-9a-fA-F]{32,}\b))[^\s'\",;]+"
)
LEAST_SECRET = 12  # characters of a value in the environment
HOMES = re.compile(r"(/(?:home|Users)/)[^/\s:;,'\"<>)]+")
# Flags of the Trainer that name people, projects and their places.
NAMES = ("run_name", "project", "hub_model_id", "trackio_space_id", "trackio_bucket_id",
         "trackio_static_space_id")  # fmt: skip


def redacted(text: str) -> str:
    """A text as it may stand in a record: without home folder, account, host and secrets."""
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) >= LEAST_SECRET:
            text = text.replace(value, "***")
    text = CREDENTIALS.sub(r"\1***@", HOMES.sub(r"\1USER", without_home(text)))
    text = NAMED_TOKENS.sub(r"\1***", TOKENS.sub("***", text))
    user = re.escape(_account())
    text = re.sub(rf"(?<=/){user}(?=/)", "USER", text)
    host = socket.gethostname()
    return text if host in ("", "localhost") else _renamed(text, host, "HOST")


def _renamed(text: str, host: str, name: str) -> str:
    return re.sub(rf"(?:(?<=://)|(?<![\w./-])){re.escape(host)}(?![\w-]|\.py)", name, text)


def redact_logs(log: Path, settings: Settings, hosts: Sequence[str] = ()) -> None:
    """What the ranks of a run have printed, once it has ended; hosts: of its nodes."""
    own = [str(value) for name, value in settings.trainer if name in NAMES]
    for file in (log, *log.parent.glob(f"{glob.escape(log.stem)}_rank*{log.suffix}")):
        with contextlib.suppress(OSError), file.open("r+b") as content:
            whole = content.read()
            text = redacted(whole.decode("utf-8", errors="surrogateescape"))
            for number, host in enumerate(hosts):
                text = _renamed(text, host, f"node {number}")
            for value in own:
                text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", "***", text)
            shown = text.encode("utf-8", errors="surrogateescape")
            if shown != whole:  # in place: a process that is about to end may still print
                content.seek(0)
                content.write(shown)
                content.truncate()


def _account() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in some containers
        return str(os.getuid())


def without_home(text: str) -> str:
    """Paths of a person's own, as anyone would write them."""
    return text.replace(str(Path.home()), "~")


def redacted_command(words: Sequence[str]) -> str:
    """A command as typed, but for hosts and secrets: --token X, --token=X and --set token=X."""
    shown = []
    hide_next = False
    for word in words:
        name, equals, _ = word.partition("=")
        named = SECRET.search(name) is not None and (equals or word.startswith("-"))
        secret = named or PLACES.match(name) or name.lstrip("-") in NAMES
        if hide_next and not word.startswith("-"):
            word = "***"
        elif secret and equals:
            word = f"{name}=***"
        hide_next = bool(secret) and not equals
        shown.append(redacted(word))
    return shlex.join(shown)


def settings_of(settings: Settings) -> dict[str, Any]:
    """All settings that a record keeps."""
    named = as_mapping(settings)
    for name in UNRECORDED:
        del named[name]
    for name in ("model", "dataset", *(("strategy",) if own_strategy(settings.strategy) else ())):
        named[name] = redacted(str(named[name]))
    named["trainer"] = {
        name: "***" if name in NAMES else redacted(value) if isinstance(value, str) else value
        for name, value in named["trainer"].items()
    }
    named["initial_peers"] = None
    return named
