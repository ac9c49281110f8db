"""A YAML file as texts, and the line of every part, so that a mistake can be shown where it is."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.settings import UserError

HEADER = re.compile(r"^#\s*(Question|Command|Needs|Time|Runs):\s*(.*)$")


@dataclass(frozen=True)
class Source:
    """A file's content as texts, and the line on which each part stands."""

    path: Path
    content: dict[str, Any]
    lines: dict[tuple[Any, ...], int]

    def wrong(self, where: tuple[Any, ...], message: object) -> UserError:
        at = where
        while at and at not in self.lines:
            at = at[:-1]
        line = f" line {self.lines[at]}" if at in self.lines else ""
        return UserError(f"{self.path}{line}: {message}")


def read(path: Path) -> Source:
    """The texts of a YAML file: YAML itself would read the set-up 1_1 as the number 11."""
    try:
        text = path.read_text("utf-8")
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}{_nearest_file(path)}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not readable as YAML: no UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: not readable as YAML") from None
    lines: dict[tuple[Any, ...], int] = {}
    source = Source(path, {}, lines)
    content = _plain(root, (), lines, source) if root is not None else None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected keys such as script and grid, found none")
    return Source(path, content, lines)


def header_of(path: Path) -> dict[str, str]:
    """The comment at the top: question, command, needs, time, runs; lines may go on."""
    found: dict[str, str] = {}
    last = ""
    for line in path.read_text("utf-8").strip().splitlines():
        if not line.startswith("#"):
            break
        if match := HEADER.match(line):
            last = match[1].lower()
            found[last] = match[2].strip()
        elif last and line.startswith("#  "):
            found[last] += " " + line.lstrip("# ").strip()
        else:
            last = ""
    return found


def _plain(node: Any, path: tuple[Any, ...], lines: dict[Any, int], source: Source) -> Any:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        found: dict[str, Any] = {}
        for key, value in node.value:
            where = (*path, key.value)
            lines[where] = key.start_mark.line + 1
            if key.value in found:
                raise source.wrong(where, f"{key.value} stands here twice")
            found[key.value] = _plain(value, where, lines, source)
        return found
    if isinstance(node, yaml.SequenceNode):
        return [_plain(v, (*path, i), lines, source) for i, v in enumerate(node.value)]
    return node.value


def _nearest_file(path: Path) -> str:
    names = [p.name for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""
