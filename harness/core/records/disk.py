"""Writes that always leave whole files behind, and errors that name the disk."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import gettempdir, mkdtemp

from harness.core.settings import UserError


class DiskError(OSError):
    """A disk that cannot be written to; its text names the folder and the reason."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(number, what)

    def __str__(self) -> str:
        return str(self.strerror)


REFUSALS = {
    errno.ENOSPC: "no space on",
    errno.EDQUOT: "the quota is used up on",
    errno.EROFS: "nothing can be written to the read-only",
    errno.EACCES: "no permission to write to",
    errno.EPERM: "no permission to write to",
    errno.ENOENT: "there is no folder",
    errno.EIO: "I/O error on the disk of",
    errno.EFBIG: "files of this length are forbidden (ulimit -f) in",
    errno.ENOTDIR: "a file is where a folder should be in",
    errno.EISDIR: "a folder is where a file should be in",
    errno.ELOOP: "symbolic links form a loop in",
    errno.ENAMETOOLONG: "names are too long in",
}
# Reasons for which a write to an already open file may be refused.
OF_OPEN_FILES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)
OS_ERROR = re.compile(r"\(os error (\d+)\)")  # the notation of libraries written in Rust
NO_ROOM = 2**16  # bytes; a library that hit a full disk leaves less free


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turn a refusal by the disk of this folder, met by any library, into a one-line DiskError."""
    try:
        yield
    except Exception as error:  # each library wraps OSError in its own error; other errors pass
        if (refused := of_disk(error, folder)) in (None, error):
            raise
        raise refused from error


def of_disk(error: Exception, folder: Path) -> DiskError | None:
    """The DiskError if a disk refused a write to this folder; None for other errors."""
    if isinstance(error, DiskError):
        return error
    if (refusal := _refusal(error, folder)) is None:
        return None
    number, refused = refusal
    return DiskError(number, f"{REFUSALS[number]} {refused}")


def _refusal(error: Exception, folder: Path) -> tuple[int, Path] | None:
    """The error number and the folder if a disk refused a write to this folder; else None."""
    if isinstance(error, OSError) and error.errno in REFUSALS:
        if not isinstance(error.filename, (str, os.PathLike)):
            if error.errno not in OF_OPEN_FILES:
                return None  # not about a file
            return error.errno, next(filter(_is_full, (folder, Path(gettempdir()))), folder)
        file, folder = Path(error.filename).absolute(), folder.absolute()
        inside = file.is_relative_to(folder) or folder.is_relative_to(file)
        return (error.errno, folder) if inside else None  # otherwise it was a file to be read
    # Some libraries raise errors of their own type.
    if (match := OS_ERROR.search(str(error))) and int(match[1]) in OF_OPEN_FILES:
        return int(match[1]), folder
    if _is_read_only(folder):
        return errno.EROFS, folder
    return (errno.ENOSPC, folder) if _is_full(folder) else None


def one_line(error: Exception) -> str:
    """The message of an error as one line; an OSError other than a refusal by a disk is raised."""
    if not isinstance(error, OSError) or isinstance(error, DiskError):
        return " ".join(str(error).split())
    if error.errno not in (*OF_OPEN_FILES, errno.EACCES):
        raise error
    where = Path(error.filename).parent if error.filename else "disk that is written to"
    return f"{REFUSALS[error.errno]} {where}"


def _is_read_only(folder: Path) -> bool:
    try:
        return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def _is_full(folder: Path) -> bool:
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False
    no_names = disk.f_files > 0 and disk.f_favail == 0  # some file systems do not count names
    return disk.f_bavail * disk.f_frsize < NO_ROOM or no_names


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder: they survive a power cut once this returns."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system does not support fsync
            raise
    finally:
        os.close(file)


def make_folder(folder: Path) -> None:
    """Create a folder so that its name survives a power cut, as files written into it do."""
    if not folder.is_dir():
        make_folder(folder.parent)
        try:
            folder.mkdir(exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder) from None
        sync(folder.parent)


def check_writable(root: Path) -> None:
    """UserError if the folder cannot be written, before anything is loaded."""
    existing, error = try_writing(root)
    if error is None:
        return
    if error.errno == errno.ENAMETOOLONG:
        raise UserError(f"--output_dir {root}: the name is too long")
    if existing.is_symlink() and not existing.exists():
        raise UserError(
            f"--output_dir {root}: {existing} is a link to {existing.readlink()}, which is not "
            "there: make that folder"
        )
    raise UserError(
        f"--output_dir {root}: {existing} is not a folder that can be written to: give a folder of "
        "yours"
    )


def _is_there(path: Path) -> bool:
    """Whether a path exists, even as a broken link; OSError if that cannot be determined."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def try_writing(folder: Path) -> tuple[Path, OSError | None]:
    """The folder or its nearest existing parent, and why nothing can be written there, or None."""
    existing = folder
    try:
        existing = next(p for p in (folder, *folder.absolute().parents) if _is_there(p))
        # Try rather than ask: root may write, but not in /proc or on a read-only disk.
        Path(mkdtemp(prefix=".harness-", dir=existing)).rmdir()
    except OSError as error:
        return existing, error
    return existing, None


def unused(folder: Path, before: str, after: str = "") -> Path:
    """A path in the folder that does not exist yet, with the first free number from 1."""
    names = (folder / f"{before}{number}{after}" for number in count(1))
    return next(path for path in names if not path.exists())


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """The draft written inside the block gets the name `path` at the end: a file, which replaces an
    existing file, or a folder.

    Atomic: a reader never sees half of it.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        draft.replace(path)
    except BaseException:
        if draft.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
        else:
            draft.unlink(missing_ok=True)
        raise


@contextmanager
def draft_or_refusal(path: Path) -> Iterator[Path]:
    """draft_of() for a path that a user named: UserError if it cannot be written."""
    try:
        with draft_of(path) as draft:
            yield draft
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def write_whole(file: Path, text: str) -> None:
    """Write a text and create the folders above the file; UserError if it cannot be written."""
    with draft_or_refusal(file) as draft:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, "utf-8")
