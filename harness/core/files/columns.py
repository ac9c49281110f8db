"""Which columns local data files have, to refuse a mistyped one at once."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TextIO, cast

from harness.core.files.parquet import parquet_head
from harness.core.settings import Settings, UserError, nearest
from harness.core.tasks import DATA_FILES, task_of

BETWEEN = re.compile(r"[\s,]*")  # JSON values
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "|"}
FIRST = 100  # lines of a csv file that tell its separator
HEAD = 2**20  # bytes of a json file whose first samples tell its columns
MOST_FILES = 100  # of a folder whose columns are checked
# Files of a folder that datasets reads in a way of its own.
OWN_WAYS = ("metadata", "dataset_info", "dataset_infos", "dataset_dict", "state")
# Names of folders and files that datasets takes for those of a split, and of the split train.
OF_SPLIT, OF_TRAIN = (
    re.compile(rf"(^|[-._ 0-9])({words})($|[-._ 0-9])")
    for words in (
        "train|training|validation|valid|dev|val|test|testing|eval|evaluation", "train|training",
    )
)  # fmt: skip


class Head(NamedTuple):
    """What the beginning of a file tells."""

    columns: list[str]
    empty: bool


def check_columns(settings: Settings) -> None:
    """Refuse a local file without samples, and columns that no local file has. Where files may be
    read in another way than here, the run decides.
    """
    path = Path(str(settings.dataset)).expanduser()
    files = _files_of(path) if settings.dataset_config is None else []
    heads = [head for file in files if (head := _head_of(file)) is not None]
    if not files or len(heads) < len(files):
        return
    _check_heads(dict(zip(files, heads, strict=True)), path)
    columns = [*dict.fromkeys(column for head in heads for column in head.columns)]
    by_kind = {"text": ("text_column", settings.text_column),
               "image": ("image_column", settings.image_column)}  # fmt: skip
    flag, chosen = by_kind.get(task_of(settings.script).input, ("", None))
    named = [("label_column", settings.label_column), *((flag, c) for c in _split(chosen))]
    for flag, column in named:
        if column is None or column in columns or any(_may_have(file, column) for file in files):
            continue
        raise UserError(f"--{flag} {column}: {not_one_of(column, columns, path)}")


def _check_heads(heads: dict[Path, Head], path: Path) -> None:
    for file, head in heads.items():
        if twice := [name for name in head.columns if head.columns.count(name) > 1]:
            raise UserError(
                f"--dataset {file} has several columns named {twice[0]}: rename all but one"
            )
    trained = _training_files([*heads], path) or [*heads]
    if all(heads[file].empty for file in trained):
        _refuse_empty(trained[0], heads[trained[0]].columns)


def _training_files(files: Sequence[Path], path: Path) -> list[Path]:
    """Those of the split train, as datasets finds them: by their folders, else by their names."""
    folders = {file: file.relative_to(path).parent.parts for file in files}
    for parts in (folders, {file: (file.name,) for file in files}):
        if any(OF_SPLIT.search(part) for of_file in parts.values() for part in of_file):
            return [file for file in files if any(map(OF_TRAIN.search, parts[file]))]
    return []


def _refuse_empty(file: Path, columns: list[str]) -> NoReturn:
    if not columns:
        raise UserError(f"--dataset {file} cannot be read: it is empty: name a file with samples")
    raise UserError(
        f"--dataset {file} is empty: it has columns ({', '.join(map(shlex.quote, columns))}) and "
        "no rows: name a file with samples"
    )


def _split(columns: str | None) -> list[str]:
    return columns.split(",") if columns is not None else []


def _files_of(path: Path) -> list[Path]:
    """A data file, or those of a folder that holds files of one such format and no others."""
    if path.is_file():
        return [path] if path.suffix in DATA_FILES else []
    files = list[Path]()
    for file in path.rglob("*") if path.is_dir() else ():
        parts = file.relative_to(path).parts
        if any(part.startswith((".", "__")) for part in parts) or file.is_dir():
            continue
        if DATA_FILES.get(file.suffix) is None or file.stem in OWN_WAYS:
            return []
        files.append(file)
        if len(files) > MOST_FILES:
            return []
    return sorted(files) if len({DATA_FILES[file.suffix] for file in files}) == 1 else []


def _head_of(file: Path) -> Head | None:
    """None where the file is broken, or may be read in another way than here."""
    kind = DATA_FILES[file.suffix]
    try:
        return {"csv": _csv_head, "json": _json_head, "parquet": _parquet_head}[kind](file)
    except (OSError, csv.Error):
        return None


def _parquet_head(file: Path) -> Head | None:
    known = parquet_head(file)
    return Head(known[0], not known[1]) if known else None


def _csv_head(file: Path) -> Head | None:
    sep, columns = csv_header(file)
    is_clear = all(columns) and not any(set('"\ufffd\n\r\0') & {*name} for name in columns)
    if len({*columns}) < max(2, len(columns)) or not is_clear:
        return None
    with open_text(file, errors="replace") as opened:
        next(csv.reader(opened, delimiter=sep))
        return Head(columns, not opened.read(HEAD).strip())


def _json_head(file: Path) -> Head | None:
    """The names in the first samples: lines or a list of them."""
    with file.open("rb") as opened:
        text = opened.read(HEAD).decode("utf-8-sig", errors="replace").strip()
    if text in ("", "[]"):
        return Head([], True)
    samples = _samples(text.removeprefix("["))
    if not samples or not all(isinstance(sample, dict) for sample in samples) or "\ufffd" in text:
        return None
    return Head([*dict.fromkeys(name for sample in samples for name in sample)], False)


def _samples(text: str) -> list[Any]:
    """The JSON values one after the other, up to one that the text does not hold whole."""
    samples, at, decoder = [], 0, json.JSONDecoder()
    while blank := BETWEEN.match(text, at):
        try:
            sample, at = decoder.raw_decode(text, blank.end())
        except (ValueError, RecursionError):
            break
        samples.append(sample)
    return samples


def _may_have(file: Path, column: str) -> bool:
    """Whether a later sample of a json file may have the column: its name stands in the file."""
    if DATA_FILES[file.suffix] != "json":
        return False
    names = {json.dumps(column, ensure_ascii=ascii).encode() for ascii in (True, False)}
    longest, tail = max(map(len, names)), b""
    with file.open("rb") as opened:
        while part := opened.read(HEAD):
            if any(name in tail + part for name in names):
                return True
            tail = part[-longest:]
    return False


def kind_of(file: Path) -> str | None:
    """The format of a data file, which may be compressed by gzip; None if it is of none."""
    return DATA_FILES.get(_uncompressed(file).suffix)


def is_tabbed(file: Path) -> bool:
    return _uncompressed(file).suffix == ".tsv"


def _uncompressed(file: Path) -> Path:
    return file.with_suffix("") if file.suffix == ".gz" else file


def open_text(file: Path, errors: str = "strict") -> TextIO:
    """A file of text, which may be compressed by gzip."""
    if file.suffix != ".gz":
        return file.open(encoding="utf-8-sig", errors=errors, newline="")
    return cast(TextIO, gzip.open(file, "rt", encoding="utf-8-sig", errors=errors, newline=""))


def csv_header(file: Path) -> tuple[str, list[str]]:
    """The separator of a csv file and the names in its first line, both empty in an empty file."""
    with open_text(file, errors="replace") as opened:
        text = opened.read(2**16)
    if not text.strip():
        return "", []
    sep = "\t" if is_tabbed(file) else _separator(text)
    return sep, next(csv.reader(io.StringIO(text, newline=""), delimiter=sep), [])


def _separator(text: str) -> str:
    """The character that splits the header into several columns, and most of the first rows into as
    many; of several such characters the one that makes the most columns.
    """

    def fit(sep: str) -> tuple[bool, float, int]:
        lines = io.StringIO(text, newline="")
        widths = [len(row) for row in csv.reader(lines, delimiter=sep) if row]
        columns, rows = (widths or [0])[0], widths[1:FIRST]
        return columns > 1, rows.count(columns) / max(1, len(rows)), columns

    return max(SEPARATORS, key=fit)


def not_one_of(name: str, columns: Sequence[str], file: Path) -> str:
    """The columns there are, quoted as for a shell: a header may have blanks that nobody sees. A
    csv file without a header shows in them.
    """
    hint = nearest(name, [shlex.quote(c) for c in columns if c != name], "")
    known = f"the columns are {', '.join(map(shlex.quote, columns))}"
    is_csv = DATA_FILES.get(file.suffix) == "csv"
    if not hint and is_csv and name not in columns:
        known += f" (the first line of {file.name}, read as the header)"
    return f"{hint} {known}".lstrip()
