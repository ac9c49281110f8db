"""The folders below a root that hold a record, the archives beside them, and how they are named."""

from __future__ import annotations

import os
from collections.abc import Callable, Container
from pathlib import Path

from harness.core.records.archives import SUFFIX, is_archive

# Part of the name of a folder that holds an earlier record, set aside by --rerun.
ASIDE = ".earlier-"
PUBLISHED = "published"  # the folder of records that came with the checkout

# Whether a folder is one of those looked for, by its path and the names of its files.
IsOne = Callable[[str, Container[str]], bool]


def walk(is_one: IsOne, root: Path) -> tuple[list[Path], list[Path]]:
    """The folders for which is_one() holds, and the archives outside those folders.

    Links to folders are followed after everything else, except links to a folder that contains
    them; each folder is visited once.
    """
    folders, archives, met, links = list[Path](), list[Path](), {_NOWHERE}, [root]
    while links:
        for folder, inner, files in os.walk(links.pop(0)):
            if (inode := _inode(folder)) in met:
                inner.clear()
                continue
            met.add(inode)
            inner[:] = sorted(
                d for d in inner if ASIDE not in d and d != PUBLISHED and not d.startswith(".")
            )
            if is_one(folder, files):
                folders.append(Path(folder))
                inner.clear()
            packed = [Path(folder, file) for file in files if file.endswith(SUFFIX)]
            archives += filter(is_archive, packed)
            leading = [d for d in inner if os.path.islink(os.path.join(folder, d))]
            links += [path for d in leading if _leads_away(path := Path(folder, d))]
    return folders, archives


_NOWHERE = (0, 0)


def _inode(folder: str) -> tuple[int, int]:
    """(device, inode) of a folder; _NOWHERE if it has just been removed."""
    try:
        known = os.stat(folder)
    except OSError:
        return _NOWHERE
    return known.st_dev, known.st_ino


def _leads_away(path: Path) -> bool:
    """Whether the target of this link does not contain it."""
    return not path.parent.resolve().is_relative_to(path.resolve())


def as_typed(path: Path) -> Path:
    """A path of a record as a command takes it here: relative if it is below the current folder."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
