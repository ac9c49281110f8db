"""python -m harness pack FOLDER, and unpack FILE: records as one file, and as folders again."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path

from harness.core.command_line import print_json
from harness.core.process import warn
from harness.core.records import (
    ATTEMPTS,
    ENVIRONMENT,
    EPOCHS,
    SETTINGS,
    SWEEP,
    RunFolder,
    find_folders,
    find_runs,
)
from harness.core.records.archives import (
    SUFFIX,
    Files,
    is_archive,
    parsed,
    read_archive,
    unpacked,
    write_archive,
)
from harness.core.records.disk import draft_of, writing_to
from harness.core.records.places import without_places
from harness.core.settings import UserError
from harness.read.labels import counted, listed
from harness.read.records.copies import texts
from harness.read.records.recorded import existing
from harness.read.records.sweeps import NO_RECORDS, read_sweep, sweep_file

MOST_NAMED = 6  # runs, in the warning


def run(options: argparse.Namespace) -> int:
    if hasattr(options, "file"):
        return _unpack(options.file, options.out, options.json)
    return _pack(options.folder, options.out, options.json)


def _pack(folder: Path, out: Path | None, as_json: bool) -> int:
    root, name, folders = _collected(folder)
    file = out or root / f"{name}{SUFFIX}"
    if not file.name.endswith(SUFFIX):
        raise UserError(f"--out {file}: expected a name that ends in {SUFFIX}")
    with writing_to(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_archive(file, folders)
    runs, lacking = runs_in(folders.values()), _warn_of_lost_files(folders)
    if as_json:
        size = file.stat().st_size
        print_json({"written": file, "runs": runs, "bytes": size, "lacking": lacking})
    else:
        size_mb = file.stat().st_size / 1e6
        print(f"{counted(runs, 'run')} in {file}, {size_mb:.2f} MB; their folders are kept")
    return 0


def pack_into(folder: Path, file: Path) -> int:
    """Write the archive; return the number of runs in it."""
    _, _, folders = _collected(folder)
    write_archive(file, folders)
    _warn_of_lost_files(folders)
    return runs_in(folders.values())


def cut_places(file: Path) -> None:
    """Write an archive again, without the places of this machine."""
    folders = {p.relative_to(file.parent).as_posix(): f for p, f in read_archive(file).items()}
    write_archive(file, without_places(folders))


def runs_in(folders: Iterable[Files]) -> int:
    return sum(SETTINGS in files for files in folders)


def _warn_of_lost_files(folders: Mapping[str, Files]) -> dict[str, str]:
    """Folder -> the file that it lacks, of the packed runs that no reader will show."""
    lacking = {name: lost for name, files in folders.items() if (lost := _lost(files))}
    if lacking:
        named = (f"{name} ({file})" for name, file in lacking.items())
        have = f"{counted(len(lacking), 'packed run')} {'has' if len(lacking) == 1 else 'have'}"
        warn(f"{have} lost a file: {listed(named, ', ', MOST_NAMED)}")
    return lacking


def _lost(files: Files) -> str | None:
    if SETTINGS not in files:
        return SETTINGS if EPOCHS in files or ENVIRONMENT in files else None
    # What was imported has no attempts, and neither has a run that never began.
    has_attempts = ATTEMPTS in files or EPOCHS not in files or _is_imported(files[SETTINGS])
    return None if has_attempts else ATTEMPTS


def _is_imported(settings: str) -> bool:
    try:
        content = parsed(settings)
    except ValueError:  # of an archive that somebody changed
        return False
    return isinstance(content, dict) and bool(content.get("imported"))


def _collected(folder: Path) -> tuple[Path, str, dict[str, Files]]:
    """(root, name, folders): every run and sweep below a folder, or the plan and the runs of one
    sweep, by their paths below root.
    """
    if sweep_file(existing(folder)) is not None:
        sweep = read_sweep(folder)
        root, name = sweep.output_dir, sweep.folder.name
        records = [run.folder for run in sweep.runs if run.folder]
        records.append(RunFolder.at(sweep.folder.absolute()))
    else:
        root, name = folder, folder.absolute().name
        records = [*find_runs(folder), *find_folders(SWEEP, folder)]
    if problems := [record.problem for record in records if record.problem]:
        raise UserError(problems[0])
    folders = {r.path.relative_to(root).as_posix(): files for r in records if (files := texts(r))}
    if not runs_in(folders.values()):
        raise UserError(NO_RECORDS.format(folder))
    if "." in folders:
        raise UserError(f"{folder} is a single run: name a folder above it")
    return root, name, folders


def write_folder(path: Path, files: Files) -> None:
    with draft_of(path) as draft:
        for name, text in files.items():
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            (draft / name).write_bytes(unpacked(text))


def _unpack(file: Path, out: Path | None, as_json: bool) -> int:
    """Write each folder whole or not at all; folders that exist stay as they are."""
    if not is_archive(file):
        raise UserError(f"{file} is not an archive of records: harness pack makes one")
    root, written, left = out or file.parent, 0, 0
    for folder, files in read_archive(file).items():
        path = root / folder.relative_to(file.parent)
        if path.exists():
            left += 1
            continue
        with writing_to(root):
            write_folder(path, files)
        written += 1
    if as_json:
        print_json({"folders": root, "written": written, "left": left})
    else:
        print(f"{written} folders written below {root}, {left} were there already")
    return 0
