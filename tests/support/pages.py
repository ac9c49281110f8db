"""The pages that people read, and the commands in them."""

from __future__ import annotations

import re
from pathlib import Path

OURS = re.compile(r"^(python|torchrun|accelerate launch) .*(\.py|-m harness|-m docs\.generate)")
SHELL = re.compile(r"^([A-Z]+=\S+|cp \S+ \S+)$")  # what commands after it need


def texts(root: Path) -> list[Path]:
    return sorted(file for kind in ("*.md", "*/README.md", "docs/*.md") for file in root.glob(kind))


def pages(root: Path) -> list[Path]:
    """README and docs/ in the order in which README leads through them."""
    order = re.findall(r"^\| \[.*\]\((docs/\w[\w-]*\.md)\)", (root / "README.md").read_text(), re.M)
    return [root / "README.md", *(root / name for name in order)]


def commands_of(page: Path, with_variables: bool = False) -> list[str]:
    """What starts one of our scripts or verbs, in the order of the page, in one line each; with
    what stands before python to set variables, or without.
    """
    found: list[str] = []
    text = re.sub(r"\\\n\s*", "", page.read_text())
    for line in text.splitlines():
        typed = line.split(" #")[0].strip()  # a comment needs a space before it
        bare = re.sub(r"^([A-Z_]+=\S+ )+", "", typed)
        quoted = re.findall(r"`([^`\n]+)`", line)
        found += [each for each in quoted if OURS.match(each)]
        found += [typed if with_variables else bare] if OURS.match(bare) else []
        found += [bare] if SHELL.match(bare) else []
    return found


def commands(root: Path) -> list[str]:
    """All of all pages, each once."""
    return sorted({each for page in texts(root) for each in commands_of(page) if OURS.match(each)})
