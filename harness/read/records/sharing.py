"""python -m harness push FOLDER USER/NAME, and pull USER/NAME FOLDER: records through the Hub.

A dataset holds archives of harness pack: these contain JSON alone, and are read as such.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, errors
from huggingface_hub.utils.tqdm import disable_progress_bars

from harness.core.command_line import print_json
from harness.core.records.archives import SUFFIX, is_archive, read_archive
from harness.core.records.disk import writing_to
from harness.core.records.redact import first_line
from harness.core.records.walking import as_typed
from harness.core.settings import UserError
from harness.read.labels import counted
from harness.read.records.packing import cut_places, pack_into, runs_in

NAME = re.compile(rf"\w[\w.-]*{re.escape(SUFFIX)}")
# The base error of the HTTP library that the installed client uses.
HTTP_ERROR: type[Exception] = errors.HfHubHTTPError.__bases__[0]
CARD = """---
tags: [training-records]
---
Records of training runs: settings, rows of all epochs, environment and outcome, as JSON.
`python -m harness pull {repo} FOLDER` fetches and checks them, `python -m harness table FOLDER`
shows them.
"""


def run(options: argparse.Namespace) -> int:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", options.repo):
        raise UserError(f"{options.repo}: expected USER/NAME, a dataset on the Hub")
    disable_progress_bars()
    verb = _push if options.pushes else _pull
    with _hub_errors(options.repo):
        facts, text = verb(options)
    print_json(facts) if options.json else print(text)
    return 0


def _push(options: argparse.Namespace) -> tuple[dict[str, object], str]:
    api, repo = HfApi(token=_token()), options.repo
    with tempfile.TemporaryDirectory() as folder:
        name = f"{options.folder.absolute().name}{SUFFIX}"
        if not NAME.fullmatch(name):
            raise UserError(f"{name}: a folder whose name has letters, digits, _, - and . alone")
        # What cannot be packed makes no repository.
        runs = pack_into(options.folder, file := Path(folder, name))
        api.create_repo(repo, repo_type="dataset", private=not options.public, exist_ok=True)
        is_private = bool(api.dataset_info(repo).private)  # a repository that was there may be open
        if not is_private:
            cut_places(file)
        files: dict[str, Path | bytes] = {name: file}
        if not api.file_exists(repo, "README.md", repo_type="dataset"):
            files["README.md"] = CARD.format(repo=repo).encode()
        done = api.create_commit(
            repo, [CommitOperationAdd(path, content) for path, content in files.items()],
            commit_message=f"{counted(runs, 'run')} of {name}", repo_type="dataset",
        )  # fmt: skip
    facts = {"repository": repo, "file": name, "runs": runs, "commit": done.oid,
             "private": is_private}  # fmt: skip
    visible = "everybody sees it, and paths in it are shortened to file names"
    if is_private:
        visible = "only you, or the members of its organisation, see it"
    return facts, f"{counted(runs, 'run')} in {name} of the dataset {repo}; {visible}"


def _pull(options: argparse.Namespace) -> tuple[dict[str, object], str]:
    api, repo, into = HfApi(token=os.environ.get("HF_TOKEN") or False), options.repo, options.folder
    commit = str(api.dataset_info(repo).sha)
    files = [f for f in api.list_repo_files(repo, repo_type="dataset", revision=commit)
             if NAME.fullmatch(f)]  # fmt: skip
    if not files:
        raise UserError(f"{repo} has no archive of records (NAME{SUFFIX})")
    runs, facts = 0, api.get_paths_info(repo, files, repo_type="dataset", revision=commit)
    with writing_to(into):
        into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into, prefix=".pull-") as folder:
        fetched = [
            Path(
                api.hf_hub_download(repo, f, repo_type="dataset", revision=commit, local_dir=folder)
            )
            for f in files
        ]
        checksums = {fact.path: fact for fact in facts}
        for file in fetched:  # all of them, before one is kept
            content, fact = file.read_bytes(), checksums[file.name]
            lfs = getattr(fact, "lfs", None)
            plain = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # noqa: S324 # git
            checksum = hashlib.sha256(content).hexdigest() if lfs else plain
            if checksum != (lfs.sha256 if lfs else getattr(fact, "blob_id", None)):
                raise UserError(
                    f"{file.name} is not what the Hub has (another checksum): pull again"
                )
            if not is_archive(file):
                raise UserError(f"{file.name} is not an archive of records")
            runs += runs_in(read_archive(file).values())
            if (there := into / file.name).exists() and there.read_bytes() != content:
                raise UserError(f"{there} has other content: move it away, or pull elsewhere")
        for file in fetched:
            file.replace(into / file.name)
    text = f"{counted(runs, 'run')} of {repo} in {', '.join(str(into / f) for f in files)}"
    written = {"repository": repo, "commit": commit, "files": files, "runs": runs}
    return written, f"{text}\nnext: python -m harness table {shlex.quote(str(as_typed(into)))}"


def _token() -> str:
    if token := os.environ.get("HF_TOKEN"):
        return token
    raise UserError(
        "set HF_TOKEN to a token that may write: https://huggingface.co/settings/tokens"
    )


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Turn an error of the Hub or the network into a UserError of one line."""
    try:
        yield
    except (HTTP_ERROR, errors.LocalEntryNotFoundError, ConnectionError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        status = getattr(getattr(error, "response", None), "status_code", None)
        what = f"the Hub answers {status}" if status else first_line(error)
        hint = "check the name and HF_TOKEN" if status in (401, 403, 404) else "try again later"
        if isinstance(error, errors.OfflineModeIsEnabled):
            what, hint = "HF_HUB_OFFLINE is set", "unset it to reach the Hub"
        elif not status and not isinstance(error, ValueError):
            hint = "check the network"
        raise UserError(f"{repo}: {what}: {hint}") from None
