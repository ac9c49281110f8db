"""What is wrong with JSON files that libraries cannot read, or that would end the process."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.core.settings import UserError
from harness.core.tasks import DATA_FILES

NULL_FIRST = re.compile(rb"(\xef\xbb\xbf)?\s*\[?\s*null\b")


def refuse_null_first(path: Path) -> None:
    """Refuse JSON files whose first sample is null: pyarrow ends the process at it."""
    for file in [path] if path.is_file() else path.rglob("*.json*"):
        hidden = any(part.startswith((".", "__")) for part in file.relative_to(path).parts)
        if hidden or DATA_FILES.get(file.suffix) != "json" or not file.is_file():
            continue
        with file.open("rb") as opened:
            if NULL_FIRST.match(opened.read(1 << 16)):
                reason = "its first sample is null: remove it"
                raise UserError(f"--dataset {file} cannot be read: {reason}")


@contextmanager
def naming_broken_lines(path: Path) -> Iterator[None]:
    """Name the broken line of JSON; datasets names the place of an error in the whole file, and
    pyarrow finds only when a text is used that it is not UTF-8.
    """
    try:
        yield
    except UserError:
        raise
    except UnicodeDecodeError as error:
        _refuse_broken_line(path)
        raise UserError(f"--dataset {path} cannot be read: {error}: save it as UTF-8") from None
    except Exception:  # datasets, pyarrow and pandas each raise errors of their own
        _refuse_broken_line(path)
        raise


def _refuse_broken_line(path: Path) -> None:
    files = [path] if path.is_file() else path.rglob("*.jsonl")
    for file in sorted(file for file in files if file.suffix == ".jsonl"):
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if reason := _wrong_with(line.removeprefix(b"\xef\xbb\xbf")):
                    raise UserError(f"--dataset {file} cannot be read: line {number} {reason}")


def _wrong_with(line: bytes) -> str:
    """Why libraries cannot read a line; empty if they can."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        return "is not UTF-8: save it as UTF-8"
    try:
        sample = json.loads(text if text.strip() else "null", object_pairs_hook=_Unique)
        json.dumps(sample, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end]
        return f"holds half a character ({ascii(half)[1:-1]}): write the whole one, or remove it"
    except _TwiceError as error:
        return f"has the name {error} twice: remove one of them"
    except ValueError as error:
        return f"is not JSON: {error}"
    return ""


class _TwiceError(ValueError):
    pass


class _Unique(dict[str, Any]):
    """A JSON object, each name of which occurs once."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        if len(self) < len(pairs):
            names = [name for name, _ in pairs]
            raise _TwiceError(next(name for name in names if names.count(name) > 1))
