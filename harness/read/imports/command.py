"""python -m harness import FILES: other people's records become ours, marked as imported."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.core.command_line import print_json
from harness.core.identity import number
from harness.core.settings import UserError, parse_setup
from harness.read.imports.formats import read_state, read_text
from harness.read.imports.records import Foreign, folder_of, imported_in, write_record

# Without these a record has no place, or could not be told from others.
NEEDED = {
    "callback-text": {
        "script": "--script bert or vit",
        "setup": "--setup N_M",
        "lr": "--lr",
        "per_gpu_batch": "--batch",
    },
    "trainer-state": {"script": "--script bert or vit", "setup": "--setup N_M"},
}


NAMES = (
    "script", "setup", "lr", "per_gpu_batch", "grad_acc", "epochs", "seed", "model", "dataset",
    "train_size", "test_size", "precision", "strategy",
)  # fmt: skip


def run(options: argparse.Namespace) -> int:
    given = {name: value for name in NAMES if (value := getattr(options, name)) is not None}
    if "setup" in given:
        parse_setup(given["setup"])
    lines = import_files(options.files, given, options.source, options.out)
    print_json({"results": lines}) if options.json else print(*lines, sep="\n")
    return 0


def import_files(
    files: list[Path], given: dict[str, Any], source: str | None, output_dir: Path
) -> list[str]:
    """A line for each file; all of them or, if one is wrong, none."""
    read, wrong = [], []
    for file in files:
        try:
            read.append(_complete(_read(file), given))
        except UserError as error:
            wrong.append(str(error))
    if wrong:
        for line in wrong:
            print(f"harness import: error: {line}", file=sys.stderr)
        raise UserError("nothing was imported")
    known = imported_in(output_dir)
    return [_place(foreign, source, output_dir, known) for foreign in read]


def _read(file: Path) -> Foreign:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    return read_state(file, content) if file.suffix == ".json" else read_text(file, content)


def _complete(foreign: Foreign, given: dict[str, Any]) -> Foreign:
    """With what the flags say, which must not contradict what the file says."""
    found = foreign.settings
    for name, value in given.items():
        if found.get(name) not in (None, value):
            flag = "batch" if name == "per_gpu_batch" else name
            raise UserError(
                f"{foreign.file}: --{flag} {number(value)} contradicts the file, "
                f"which says {number(found[name])}: import it without"
            )
    settings = {**found, **given}
    missing = [flag for name, flag in NEEDED[foreign.format].items() if settings.get(name) is None]
    if missing:
        raise UserError(
            f"{foreign.file}: name and content do not say all: give {', '.join(missing)}"
        )
    return replace(foreign, settings=settings)


def _place(
    foreign: Foreign, source: str | None, output_dir: Path, known: dict[Path, dict[str, Any]]
) -> str:
    """One file written, unless it or another state of the same run is there."""
    for path, imported in known.items():
        if imported.get("sha256") == foreign.sha256:
            return f"already imported: {foreign.file} is {path}"
        if foreign.begins is not None and imported.get("begins") == foreign.begins:
            return (
                f"not imported: {foreign.file} is another state of the run that {path} holds; "
                "to take it instead, remove that folder"
            )
    folder = folder_of(foreign, output_dir)
    write_record(foreign, source or foreign.format, folder)
    known[folder.path] = {"sha256": foreign.sha256, "begins": foreign.begins}
    return f"imported: {foreign.file} is {folder.path}"
