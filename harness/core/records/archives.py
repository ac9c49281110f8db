"""Archives: the records of many runs in one file, NAME.jsonl.gz, beside the folders it replaces.

After a header line, each line holds one file: its path relative to the archive's folder, and its
content (of a .jsonl file as a list). If a run is both on disk and archived, the one on disk
counts.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, cast

from harness.core.records.disk import draft_of
from harness.core.schema.checks import RECORDS
from harness.core.settings import UserError

SUFFIX = ".jsonl.gz"
HEADER = '{"archive": "harness", "schema": 1}'
LARGEST = 2**30  # bytes, unpacked: a small file may unpack to any size
CHUNK = 2**20  # bytes that are unpacked at once
DEEPEST_RUN = 3  # levels of folders between an archive and a run: script, set-up, run
# A file from elsewhere must not point outside the folder, nor hold anything but records.
RANKS, TELEMETRY = "ranks", "telemetry"  # the folders inside a run's folder
SWEEPS = "sweeps/<name>/"  # where the plan of a sweep is
RECORD_FILE = re.compile(rf"(({RANKS}|{TELEMETRY})/)?\w[\w.-]*\.jsonl?")
# Of the files on disk, those of the schema: configurations and data may lie beside a record.
OWN_FILE = re.compile(
    "|".join(
        re.sub("<[rn]>", r"\\d+", re.escape(record.file.removeprefix(SWEEPS)))
        for record in RECORDS.values()
    )
)
LINE = re.compile(
    rf'\{{"file": "(?P<folder>[^"\\]+?)/(?P<name>{RECORD_FILE.pattern})", '
    r'"content": (?P<json>.*)\}'
)
# The same, where the path has escapes, as one with other letters than those of ASCII.
ESCAPED = re.compile(r'\{"file": (?P<path>"(?:[^"\\]|\\.)*"), "content": (?P<json>.*)\}')
PATH = re.compile(rf"(?P<folder>.+?)/(?P<name>{RECORD_FILE.pattern})")

Files = Mapping[str, str]  # name below the folder -> content as JSON text, parsed on demand


DEEPEST = 20  # levels of nested objects and lists; records have six


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)  # rejects NaN and Infinity


def parsed(text: str) -> Any:
    """Parse JSON that can be handled and written again; ValueError for anything else."""
    try:
        content = _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if text.count("{") + text.count("[") > DEEPEST and _is_deeper(content, DEEPEST):
        raise ValueError("nested too deeply")
    if "\\u" in text and ("\\ud" in text or "\\uD" in text):
        json.dumps(content, ensure_ascii=False).encode()  # raises for half a surrogate pair
    return content


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(each, levels - 1) for each in inner)


def packed(name: str, content: bytes) -> str:
    """The content as JSON if that restores the same bytes; else as a text, such as torn rows."""
    try:
        value = parsed(content.decode() if name.endswith(".json") else _listed(content.decode()))
        if unpacked(text := json.dumps(value)) == content:
            return text
    except ValueError:
        pass
    return json.dumps(content.decode("utf-8", "surrogateescape"))


def _listed(rows: str) -> str:
    return f"[{','.join(rows.splitlines())}]"


def unpacked(text: str) -> bytes:
    """The content of a file as it was before packed()."""
    value = json.loads(text)
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if isinstance(value, list):
        return "".join(f"{json.dumps(row)}\n" for row in value).encode()
    return f"{json.dumps(value, indent=2)}\n".encode()


def write_archive(file: Path, folders: Mapping[str, Files]) -> None:
    """Write an archive; the same records always give the same bytes.

    It is read again first: UserError, and no archive, if readers would refuse it.
    """
    if odd := next((folder for folder in folders if not folder.isprintable()), None):
        raise UserError(f"{odd!r} cannot be packed: rename this folder to printable characters")
    lines = [
        f'{{"file": {json.dumps(f"{folder}/{name}")}, "content": {text}}}'
        for folder in sorted(folders)
        for name, text in folders[folder].items()
    ]
    with draft_of(file) as draft:
        draft.write_bytes(gzip.compress("\n".join([HEADER, *lines, ""]).encode(), mtime=0))
        try:
            _content(draft)
        except ValueError as error:
            raise UserError(
                f"{file}: not written, as no reader would take it ({error}): pack parts of it"
            ) from None


def files_of(path: Path) -> Files:
    """The files of a record on disk, without checkpoints and unrelated files."""
    below = (file for part in ("", RANKS, TELEMETRY) for file in (path / part).glob("*"))
    named = {file.relative_to(path).as_posix(): file for file in sorted(below)}
    return {
        name: packed(name, file.read_bytes())
        for name, file in named.items()
        if OWN_FILE.fullmatch(name) and file.is_file()
    }


def is_archive(file: Path) -> bool:
    """Whether a file is an archive, by name and first line; other files are ignored."""
    if not file.name.endswith(SUFFIX):
        return False
    try:
        with gzip.open(file) as content:
            return content.read(len(HEADER)) == HEADER.encode()
    except (EOFError, zlib.error):
        return True  # perhaps a damaged archive, which is to be reported
    except OSError:
        return False


def read_archive(file: Path) -> Mapping[Path, Files]:
    """The files of every folder in an archive, by the folder's path; UserError if it is damaged."""
    known = file.stat()
    return _read(file, known.st_mtime_ns, known.st_size)


@lru_cache(maxsize=64)
def _read(file: Path, _time: int, _size: int) -> Mapping[Path, Files]:
    try:
        return _content(file)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{file}: damaged archive ({reason}): fetch or pack it again") from None


def _content(file: Path) -> dict[Path, Files]:
    folders: dict[str, dict[str, str]] = {}
    for line in islice(_lines(file), 1, None):
        folder, name, content = _parts(line)
        folders.setdefault(folder, {})[name] = content
    return {_placed(file.parent, folder): files for folder, files in folders.items()}


def _lines(file: Path) -> Iterator[str]:
    """The lines, one at a time; ValueError if they are more than LARGEST bytes together."""
    left = LARGEST
    with gzip.open(file) as unpacking:
        stream = io.BufferedReader(cast(io.RawIOBase, unpacking), CHUNK)
        while line := stream.readline(left + 1):
            if (left := left - len(line)) < 0:
                raise ValueError(f"more than {LARGEST / 2**30:g} GiB")
            yield line.decode("ascii").rstrip("\r\n")


def _parts(line: str) -> tuple[str, str, str]:
    """(folder, name of the file, its content) of a line."""
    if (match := LINE.fullmatch(line)) is not None:
        return match["folder"], match["name"], match["json"]
    escaped = ESCAPED.fullmatch(line)
    path = None if escaped is None else PATH.fullmatch(json.loads(escaped["path"]))
    if escaped is None or path is None:
        raise ValueError(f"it has the line {line[:60]}")
    return path["folder"], path["name"], escaped["json"]


def _placed(root: Path, folder: str) -> Path:
    pure = PurePosixPath(folder)
    if ".." in pure.parts or pure.is_absolute() or not folder.isprintable():
        raise ValueError(f"it has the folder {json.dumps(folder)[1:61]}")
    return root / pure


def archives_in(folder: Path) -> tuple[Path, ...]:
    """The archives in a folder; searched again only if a name in the folder has changed."""
    try:
        return _archives_in(folder, folder.stat().st_mtime_ns)
    except OSError:
        return ()


@lru_cache(maxsize=256)
def _archives_in(folder: Path, _time: int) -> tuple[Path, ...]:
    return tuple(sorted(file for file in folder.glob(f"*{SUFFIX}") if is_archive(file)))


def archives_above(folder: Path) -> Iterator[Path]:
    """The archives that may contain a folder, or folders below it."""
    for parent in [*folder.parents][:DEEPEST_RUN]:
        yield from archives_in(parent)


def is_archived(root: Path) -> bool:
    """Whether an archive contains a folder, or one below it."""
    return any(
        folder.is_relative_to(root)
        for archive in archives_above(root)
        for folder in readable(archive)
    )


def readable(archive: Path) -> Mapping[Path, Files]:
    """read_archive(), but a damaged archive is empty."""
    try:
        return read_archive(archive)
    except (UserError, OSError):
        return {}


def archived(folder: Path) -> Files | None:
    """The files of a folder that exists only in an archive; None if no archive has it."""
    archives = () if folder.exists() else archives_above(folder)
    earlier: Files | None = None
    for archive in archives:
        if (files := readable(archive).get(folder)) is not None:
            earlier = same_files(folder, archive, files, earlier)
    return earlier


def same_files(folder: Path, archive: Path, files: Files, earlier: Files | None) -> Files:
    """The files in an archive; UserError if another archive has another record of the folder."""
    if earlier is not None and earlier != files:
        raise UserError(
            f"{folder}: {archive} holds another record of it than an archive in the same folder: "
            "move one of the two archives to a folder of its own"
        )
    return files
