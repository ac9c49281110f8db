"""What a record that others will read may contain: no secrets, home folders or host names."""

from __future__ import annotations

import contextlib
import getpass
import glob
import os
import re
import shlex
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.core.settings import UNRECORDED, Settings, as_mapping
from harness.core.strategies import own_strategy

# Names of what holds a secret; that of a tokenizer, or of a count of tokens, holds none.
SECRET = re.compile(r"token(?!i[sz]er|s_seen)|key|secret|password", re.IGNORECASE)
# Flags whose values name machines and their users.
PLACES = re.compile(r"^--(hosts|hosts.file|master.addr|ssh|initial.peers|account)$")
MAIL = re.compile(r"\b(mail-user=)\S+")  # of --sbatch
CREDENTIALS = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@]+@", re.IGNORECASE)
# Tokens are known by the prefix of their service, or by the word before them: 40 digits alone are
# a commit.
TOKENS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{10,}|gh[a-z]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|"
    r"A[KS]IA[A-Z0-9]{16}|AIza[\w-]{30,}|sk-[\w-]{16,}|xox[a-z]-[\w-]{10,}|wandb_v1_\w{16,}|"
    r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})(?![\w-])"
)
NAMED_TOKENS = re.compile(
    r"((?:TOKEN|KEY|SECRET|PASSWORD)=|(?i:token|key|secret|password|bearer)\W{1,3}"
    r"(?=[0-9a-fA-F]{32,}\b))[^\s'\",;]+"
)
LEAST_SECRET = 12  # characters: shorter values of variables are not taken for secrets
HOMES = re.compile(r"(/(?:home|Users)/)[^/\s:;,'\"<>)]+")
# Trainer flags whose values name people, projects and places on the Hub.
NAMES = ("run_name", "project", "hub_model_id", "trackio_space_id", "trackio_bucket_id",
         "trackio_static_space_id")  # fmt: skip


def redacted(text: str) -> str:
    """A text as a record may contain it: without home folder, account, host and secrets."""
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) >= LEAST_SECRET:
            text = text.replace(value, "***")
    text = CREDENTIALS.sub(r"\1***@", HOMES.sub(r"\1USER", without_home(text)))
    text = NAMED_TOKENS.sub(r"\1***", TOKENS.sub("***", text))
    user = re.escape(_account())
    text = re.sub(rf"(?<=/){user}(?=/)", "USER", text)
    host = socket.gethostname()
    return text if host in ("", "localhost") else _renamed(text, host, "HOST")


def _renamed(text: str, host: str, name: str) -> str:
    return re.sub(rf"(?:(?<=://)|(?<![\w./-])){re.escape(host)}(?![\w-]|\.py)", name, text)


def redact_logs(log: Path, settings: Settings, hosts: Sequence[Sequence[str]] = ()) -> None:
    """Redact what the ranks of a run have printed, once it has ended; hosts: names of each node.

    In place, since a process about to end may still print: what it prints meanwhile is kept.
    """
    own = [str(value) for name, value in settings.trainer if name in NAMES]

    def shown(content: bytes) -> bytes:
        text = redacted(content.decode("utf-8", errors="surrogateescape"))
        for number, names in enumerate(hosts):
            for host in names:
                text = _renamed(text, host, f"node {number}")
        for value in own:
            text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", "***", text)
        return text.encode("utf-8", errors="surrogateescape")

    for file in (log, *log.parent.glob(f"{glob.escape(log.stem)}_rank*{log.suffix}")):
        with contextlib.suppress(OSError), file.open("r+b") as printed:
            content = printed.read()
            text = shown(content)
            if text == content:
                continue
            while more := printed.read():
                content += more
                text = shown(content)
            printed.seek(0)
            printed.write(text)
            printed.truncate()


def _account() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an ID without a name, as in some containers
        return str(os.getuid())


def first_line(error: Exception) -> str:
    """The first line of an error, redacted."""
    return redacted((str(error) or type(error).__name__).splitlines()[0])


def without_home(text: str) -> str:
    """The text with the user's home folder written as ~."""
    home = str(Path.home())
    if home == "/":  # the home of an ID without a name, as in some containers
        return text
    return re.sub(rf"{re.escape(home)}(?![\w-])", "~", text)


def redacted_command(words: Sequence[str]) -> str:
    """A command as typed, without hosts and secrets: --token X, --token=X and --set token=X."""
    shown = []
    hide_next = False
    for word in words:
        name, equals, _ = word.partition("=")
        named = SECRET.search(name) is not None and (equals or word.startswith("-"))
        secret = named or PLACES.match(name) or name.lstrip("-") in NAMES
        if hide_next and not word.startswith("-"):
            word = "***"
        elif secret and equals:
            word = f"{name}=***"
        hide_next = bool(secret) and not equals
        shown.append(redacted(MAIL.sub(r"\1***", word)))
    return shlex.join(shown)


def settings_of(settings: Settings) -> dict[str, Any]:
    """All settings that a record contains, redacted."""
    named = as_mapping(settings)
    for name in UNRECORDED:
        del named[name]
    for name in ("model", "dataset", *(("strategy",) if own_strategy(settings.strategy) else ())):
        named[name] = redacted(str(named[name]))
    named["trainer"] = {
        name: "***" if name in NAMES else redacted(value) if isinstance(value, str) else value
        for name, value in named["trainer"].items()
    }
    named["initial_peers"] = None
    return named
