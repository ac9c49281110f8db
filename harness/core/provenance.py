"""What a machine runs: the commit of this checkout, its source, and the packages that measure."""

from __future__ import annotations

import hashlib
import re
import shlex
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.core.settings import Settings, as_mapping
from harness.core.tasks import TASKS

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "evaluate", "tokenizers", "numpy")
ROOT = Path(__file__).resolve().parents[2]


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


def source_checksum() -> str:
    """A checksum of the code that measures, committed or not."""
    scripts = [ROOT / f"{name}.py" for name in (*TASKS, "logcallback")]
    files = sorted([*filter(Path.is_file, scripts), *(ROOT / "harness").rglob("*.py")])
    whole = hashlib.sha256()
    for file in files:
        whole.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes() + b"\0")
    return whole.hexdigest()[:12]


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
        secret = named or PLACES.match(name)
        if hide_next and not word.startswith("-"):
            word = "***"
        elif secret and equals:
            word = f"{name}=***"
        hide_next = bool(secret) and not equals
        shown.append(without_home(word))
    return shlex.join(shown)


def settings_of(settings: Settings) -> dict[str, Any]:
    """All settings but those that say where and whether to write."""
    named = as_mapping(settings)
    for name in ("output_dir", "rerun"):
        del named[name]
    for name in ("model", "dataset"):
        named[name] = without_home(str(named[name]))
    named["initial_peers"] = None
    return named
