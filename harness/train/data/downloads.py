"""The Hub: whether it can be reached, and whether downloaded files match its checksums."""

from __future__ import annotations

import functools
import hashlib
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import datasets
from huggingface_hub import constants, errors, get_session
from huggingface_hub.file_download import repo_folder_name

from harness.core.provenance import cache_root
from harness.core.records import read_json, write_json
from harness.core.settings import UserError

# The exceptions of whichever HTTP library the installed Hub client uses.
HTTP_ERROR: type[Exception] = errors.HfHubHTTPError.__bases__[0]
ANSWER_S = 10.0
PAUSES_S = (0.0, 1.0)  # before each try


@functools.cache
def no_network() -> bool:
    """Whether the Hub does not answer; this process then works offline, with what is in the cache.

    The libraries would ask again and again, for a minute a file, before they look into the cache.
    """
    if constants.HF_HUB_OFFLINE:
        return False  # chosen
    for pause_s in PAUSES_S:
        time.sleep(pause_s)
        try:
            get_session().head(constants.ENDPOINT, timeout=ANSWER_S)
            return False
        except HTTP_ERROR:
            continue
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    return True


def check_downloads(kind: str, name: str) -> None:
    """Compare what was downloaded with the checksum under which the Hub has it, once for each file.

    The Hub's client compares the lengths alone.
    """
    wrong, removed = [], True
    folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind))
    for file, blob in _large_files(folder):
        state = blob.stat()
        mark = cache_root() / "checksums" / f"{blob.name}.json"
        stamp = {"bytes": state.st_size, "mtime_ns": state.st_mtime_ns}
        if read_json(mark) == stamp:
            continue
        with blob.open("rb") as content:
            checksum = hashlib.file_digest(content, "sha256").hexdigest()
        with suppress(OSError):
            if checksum == blob.name:
                write_json(mark, stamp)  # without it, the next check is only slower
            else:
                wrong.append(file)
                blob.unlink()
        removed &= checksum == blob.name or not blob.exists()
    if wrong:
        if kind == "dataset":  # what was prepared from the files
            prepared = Path(datasets.config.HF_DATASETS_CACHE, name.replace("/", "___"))
            shutil.rmtree(prepared, ignore_errors=True)
        what = "removed from the cache: the same command downloads it again"
        if not removed:
            what = f"it could not be removed: remove {folder}, and run the same command again"
        raise UserError(
            f"--{kind} {name}: {', '.join(wrong)}: not what the Hub has (another checksum), and "
            f"{what}"
        )


def _large_files(repository: Path) -> Iterator[tuple[str, Path]]:
    """Cached files that are named by their SHA-256, with the names that the Hub has for them."""
    for link in repository.glob("snapshots/*/**/*"):
        blob = link.resolve()
        if link.is_symlink() and re.fullmatch("[0-9a-f]{64}", blob.name) and blob.is_file():
            yield link.name, blob
