"""How CSV files are read; those that would be read as something else are refused."""

from __future__ import annotations

import csv
import gzip
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
from datasets.packaged_modules.csv.csv import CsvConfig

from harness.core.files.columns import SEPARATORS, csv_header, is_tabbed, kind_of, open_text
from harness.core.settings import UserError

ANY = "commas, semicolons, tabs or |"
DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error)  # of a compressed file
FEW_VALUES = 100  # of a column that may name classes


def is_csv(dataset: str) -> bool:
    """Whether a data set is a CSV file, or a folder with one."""
    path = Path(dataset).expanduser()
    files = [path] if path.is_file() else path.rglob("*") if path.is_dir() else []
    return any(kind_of(file) == "csv" for file in files)


def csv_options(files: list[Path]) -> dict[str, Any]:
    """Options to read files: each value is its text in the file, so that 01 is not 1 and NA is
    no gap; only empty values are missing.
    """
    heads = {}
    for file in sorted(files):
        try:
            sep, header = csv_header(file)
        except DAMAGED as error:
            raise UserError(f"--dataset {file} cannot be read: gzip: {error}") from None
        if not sep:
            raise UserError(f"--dataset {file} cannot be read: it is empty")
        heads[file] = sep, header
        _check_rows(file, sep, "tabs" if is_tabbed(file) else ANY)
    first = heads[min(files)]
    if any(head != first for head in heads.values()) or not all(first[1]):
        return {"sep": first[0]}  # columns that differ or have no name: as datasets reads them
    features = datasets.Features(dict.fromkeys(first[1], datasets.Value("string")))
    if len(features) < len(first[1]):
        return {"sep": first[0]}
    gaps = {"keep_default_na": False, "na_values": [""]}
    return {"sep": first[0], "features": features, **gaps}


def options_of_folder(path: Path, config: str | None) -> dict[str, Any]:
    """The same for the CSV files that datasets takes from a folder, which may hold others.

    The files of a configuration are read as the folder's README.md says, and checked.
    """
    read = datasets.load_dataset_builder(str(path), config).config
    if not isinstance(read, CsvConfig):
        return {}
    named = (Path(name) for names in (read.data_files or {}).values() for name in names)
    files = [file for file in named if kind_of(file) == "csv" and file.is_file()]
    if config is None and files:
        return csv_options(files)
    has_header = read.header == "infer" and not (read.names or read.skiprows)
    if has_header and read.index_col is None and len(read.sep or "") == 1:
        for file in files:
            _check_rows(file, str(read.sep), _name_of(str(read.sep)))
    return {}


def _name_of(sep: str) -> str:
    return SEPARATORS.get(sep, sep)


def _check_rows(file: Path, sep: str, known: str) -> None:
    """Refuse rows with more values than the header. Where the first row has more, pandas would take
    its first values for an index, and shift the others.
    """
    csv.field_size_limit(sys.maxsize)
    try:
        with open_text(file) as opened:
            lines = _Lines(opened)
            reader = csv.reader(lines, delimiter=sep)
            header = next(reader, [])
            columns = len(header)
            if columns == 1:
                raise UserError(
                    f"--dataset {file} has only one column, {header[0][:40]!r}: separate columns "
                    f"by {known}"
                )
            if twice := [name for name in header if name and header.count(name) > 1]:
                raise UserError(
                    f"--dataset {file} has several columns named {twice[0]}: rename all but one"
                )
            spans = _Spans(sep, columns)
            lines.take()
            for row in reader:
                first = reader.line_num - len(lines.read) + 1
                if len(row) > columns:
                    raise UserError(_too_many(file, sep, first, row, columns))
                spans.add(first, row, lines.take())
    except (UnicodeDecodeError, csv.Error, *DAMAGED):
        return  # loading them says what is wrong
    if swallowed := spans.swallowed():
        first, count = swallowed
        raise UserError(
            f"--dataset {file} cannot be read: a value in quotes that begins in line {first} goes "
            f"on over {count} lines that all look like rows: double the quotes within texts, or "
            "remove them"
        )


class _Lines:
    """Iterates over the lines of a file; take() gives those read since it was last called."""

    def __init__(self, opened: Iterable[str]) -> None:
        self.lines, self.read = iter(opened), list[str]()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.read.append(next(self.lines))
        return self.read[-1]

    def take(self) -> list[str]:
        taken, self.read = self.read, []
        return taken


class _Spans:
    """Rows over several lines.

    A stray quote swallows the rows up to the next quote. Then each line of such a row has all
    columns, and in a column with few values, such as the class, a value that other rows have.
    """

    def __init__(self, sep: str, columns: int) -> None:
        self.sep, self.columns = sep, columns
        self.values: dict[int, set[str]] = {column: set() for column in range(columns)}
        self.rows: list[tuple[int, list[str]]] = []

    def add(self, first: int, row: list[str], lines: list[str]) -> None:
        if len(lines) > 1:
            self.rows.append((first, lines))
            return
        for column in [*self.values]:
            if column < len(row):
                self.values[column].add(row[column])
            if len(self.values[column]) > FEW_VALUES:
                del self.values[column]

    def swallowed(self) -> tuple[int, int] | None:
        """The first line of a row that has swallowed others, and how many lines it has."""
        for first, lines in self.rows:
            if all(map(self._is_row, lines)):
                return first, len(lines)
        return None

    def _is_row(self, line: str) -> bool:
        values = [value.strip('"') for value in line.rstrip("\r\n").split(self.sep)]
        like = (values[column] in seen for column, seen in self.values.items())
        return len(values) == self.columns and any(like)


def _too_many(file: Path, sep: str, line: int, row: list[str], columns: int) -> str:
    fix = f"quote texts that contain {_name_of(sep)}, and give each column a name"
    if not any(row[columns:]):
        fix = f"remove the {_name_of(sep)} at the ends of lines"
    mismatch = f"line {line} has {len(row)} values and the header {columns}"
    return f"--dataset {file} cannot be read: {mismatch}: {fix}"
