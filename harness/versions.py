"""What a machine runs: the commit of this checkout, its source, and the packages that measure."""

from __future__ import annotations

import hashlib
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "evaluate",
    "tokenizers",
    "numpy",
)
ROOT = Path(__file__).resolve().parents[1]


def versions() -> dict[str, str | None]:
    """By package; null where it is not installed."""
    return {name: _version(name) for name in PACKAGES}


def commit() -> dict[str, Any]:
    """Commit of this checkout and whether files differ from it; null where it is no checkout."""
    try:
        head = _git("rev-parse", "HEAD")
        changed = bool(_git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
    return {"commit": head, "dirty": changed}


def source() -> str:
    """A checksum of the code that measures, committed or not."""
    files = sorted([*ROOT.glob("*.py"), *(ROOT / "harness").rglob("*.py")])
    whole = hashlib.sha256()
    for file in files:
        whole.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes() + b"\0")
    return whole.hexdigest()[:12]


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
