"""Copies of a record below one folder, such as an archive beside its unpacked folders.

Copies count as one run. A run is identified by when it first started: a run elsewhere with the same
settings is no copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

from harness.core.identity import REPETITIONS
from harness.core.records import FINISHED, RunFolder
from harness.core.records.archives import Files, files_of
from harness.core.settings import UserError
from harness.read.records.groups import by_key
from harness.read.records.recorded import attempts_of, begun_unix, recorded, settings_of
from harness.read.records.runs import identity_settings


def run_key(folder: RunFolder) -> Hashable:
    """Equal only for copies of one run: settings and first start; for imported runs, the source.

    None where a record does not say these: nothing tells whether it is a copy.
    """
    try:
        settings = settings_of(folder)
    except UserError:
        return None
    if imported := settings.get("imported"):
        begun: str | None = imported.get("begins") or imported.get("sha256")
        return begun
    unix = _begun(folder)
    if unix is None:
        return None
    repetition = {name: settings.get(name) for name in REPETITIONS}
    return unix, *(identity_settings(settings) | repetition).items()


def without_copies(
    folders: Sequence[RunFolder],
    counted: Iterable[RunFolder] = (),
    known: Mapping[RunFolder, float | None] | None = None,
) -> tuple[list[RunFolder], list[str]]:
    """The folders, each run once, in their order; and one line about those left out, if any.

    known: the first start of each of `folders`, where attempts have been read already.
    counted: runs that already count elsewhere; every copy of one of these is left out. Of other
    copies, one is kept: a readable one before others, then a finished one, then the one with the
    most attempts, then the first.
    """
    counted = [*counted] if folders else []
    begun = dict(known or {})
    begun |= {f: _begun(f) for f in (*folders, *counted) if f not in begun}
    shared = Counter(begun.values())
    # Most runs differ in their first start already, so no further key is computed for them.
    keys = {f: run_key(f) if shared[unix] > 1 or unix is None else f for f, unix in begun.items()}
    theirs = {keys[folder]: folder for folder in counted}
    alike = by_key(folders, lambda folder: folder if keys[folder] is None else keys[folder])
    left = dict[RunFolder, RunFolder]()
    for key, copies in alike.items():
        run = theirs.get(key)
        if run is None:
            run = copies[0] if len(copies) == 1 else max(copies, key=_holds)
        left |= {copy: run for copy in copies if copy is not run}
    return [folder for folder in folders if folder not in left], [*_about(left)]


def _begun(folder: RunFolder) -> float | None:
    rows, _, torn = attempts_of(folder)
    return begun_unix(folder, rows, torn)


def _holds(folder: RunFolder) -> tuple[bool, bool, int]:
    record = recorded(folder, with_ranks=True)
    finished = record.summary is not None and record.summary.get("outcome") == FINISHED
    return record.problem is None, finished, len(attempts_of(folder)[0])


def _about(left: dict[RunFolder, RunFolder]) -> Iterable[str]:
    if not left:
        return
    copy, run = next(iter(left.items()))
    line = f"{len(left)} cop{'y' if len(left) == 1 else 'ies'} of runs that count already, "
    line += f"for example {copy.path} of {run.path}"
    if unlike := [copy for copy, run in left.items() if texts(copy) != texts(run)]:
        line += f"; {len(unlike)} with other content, for example {unlike[0].path}"
    yield line


def texts(record: RunFolder) -> Files:
    """The files of a record, in the same form whether they are on disk or in an archive."""
    return files_of(record.path) if record.archived is None else record.archived
