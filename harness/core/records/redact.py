"""What a record that others will read may contain: no secrets, home folders or host names."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import glob
import json
import os
import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

from harness.core.settings import UNRECORDED, Settings, as_mapping
from harness.core.strategies import own_strategy

# Names of what holds a secret; a tokenizer, a keyframe or a monkey holds none.
NAMES_OF_SECRETS = (
    r"token(?!i[sz]er|s_seen)|secret|passw(?:or)?d|passphrase|[_-]pwd|credential|auth(?!or(?!i))|"
    r"(?<!mon)(?<!don)(?<!tur)(?<!hoc)(?<!joc)(?<!whis)key(?!frame|word|board|point|note|stroke)"
)
SECRET = re.compile(NAMES_OF_SECRETS, re.IGNORECASE)
# Flags whose values name machines and their users.
PLACES = re.compile(r"^--(hosts|hosts.file|master.addr|ssh|initial.peers|account)$")
MAIL = re.compile(r"\b(mail-user=)\S+")  # of --sbatch
CREDENTIALS = re.compile(r"(://)[^/\s]+@")
QUERY = re.compile(r"(\bhttps?://[^\s?#'\"<>]+)\?[^\s#'\"<>]+", re.IGNORECASE)  # signs requests
AUTHORIZATION = re.compile(
    r"(\bauthorization['\"]?\s*[:=]\s*['\"]?(?:basic\s+|bearer\s+|token\s+)?)[^\s'\",;]+",
    re.IGNORECASE,
)
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
# In an argument: name=value, "name": "value", name: value and --name value, perhaps in quotes.
# Each name is tried once, from its start, so that the time does not grow faster than the text.
NAMED_VALUES = re.compile(
    r"""(?:(?P<flag>(?<!\S)--?)|(?<![\w.-]))"""
    r"""(?![\w.-]*authorization['"]?\s*[:=])"""  # see AUTHORIZATION
    rf"""(?=[\w.-]*?(?:{NAMES_OF_SECRETS}))(?P<name>[\w.-]++)"""
    r"""(?:['"]?\s*=\s*|['"]\s*:\s*|:\s+|(?(flag)\s+(?!-)|(?!)))"""
    r"""(?P<value>"[^"]*"|'[^']*'|[^\s'"()\[\]{},;&]+)""",
    re.IGNORECASE,
)
# Names of secrets that may be numbers; of max_tokens or key_dim, a number is a count.
OF_NUMBERS = re.compile(
    r"secret|passw|pwd|passphrase|credential|(?:token|key|auth)\d*$", re.IGNORECASE
)
FLAG = re.compile(r"--.*|-[A-Za-z](=.*)?", re.DOTALL)  # a secret may begin with a single -
# A flag, or what may stand before = in a word of a command; a URL is none.
WORD = re.compile(r"(?!\S*://)[^\s=\"'{}\[\]]+")
PLAIN = re.compile(r"(?:true|false|none|null)?", re.IGNORECASE)  # values that are no secrets
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
    text = AUTHORIZATION.sub(r"\1***", QUERY.sub(r"\1?***", text))
    text = NAMED_TOKENS.sub(r"\1***", TOKENS.sub("***", text))
    user = re.escape(_account())
    text = re.sub(rf"(?<=/){user}(?=/)", "USER", text)
    host = socket.gethostname()
    return text if host in ("", "localhost") else _renamed(text, host, "HOST")


def _renamed(text: str, host: str, name: str) -> str:
    return re.sub(rf"(?:(?<=://)|(?<![\w./-])){re.escape(host)}(?![\w-]|\.py)", name, text)


def redacted_argument(value: Any, name: str = "") -> Any:
    """The value of an argument as a record may contain it, with all values inside it.

    Texts hold values, too: JSON, and pairs such as key=value. Of objects the type is recorded.
    """
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return "***" if _is_hidden(name, str(value)) else value
    if isinstance(value, (str, PurePath)):
        return "***" if _is_hidden(name, str(value)) else _redacted_text(str(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, Mapping):
        return {
            redacted(k) if isinstance(k, str) else k: redacted_argument(v, _secret_of(name, k))
            for k, v in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        each = [redacted_argument(one, name) for one in value]
        if isinstance(value, (set, frozenset)):  # their order changes with every process
            each.sort(key=str)
        return tuple(each) if isinstance(value, tuple) else each
    with contextlib.suppress(AttributeError, RuntimeError, TypeError, ValueError):
        return redacted_argument(value.tolist(), name)  # a scalar or an array of numpy
    return getattr(value, "__name__", type(value).__name__)


def _is_hidden(name: str, value: str) -> bool:
    """Whether this argument, flag or key may not be recorded with this value."""
    if PLACES.match(name) or name.lstrip("-") in NAMES:
        return value != ""
    return SECRET.search(name) is not None and not _is_harmless(name, value)


def _is_harmless(name: str, value: str) -> bool:
    """Whether the value of a name of secrets is none: nothing, true or false, or a count."""
    if PLAIN.fullmatch(value):
        return True
    with contextlib.suppress(ValueError):
        float(value)
        return OF_NUMBERS.search(name) is None
    return False


def _secret_of(outer: str, name: Any) -> str:
    """The name that decides about a value: what stands below the name of a secret is one."""
    return outer if SECRET.search(outer) else str(name)


def _redacted_text(text: str) -> str:
    """A text that is an argument: JSON, pairs, or neither."""
    if text.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):
            content = json.loads(text)
            if (shown := redacted_argument(content)) != content:
                return json.dumps(shown)
            return text
    return redacted(NAMED_VALUES.sub(_without_value, text))


def _without_value(pair: re.Match[str]) -> str:
    value = pair["value"]
    quote = value[0] if value[0] in "\"'" else ""
    if not _is_hidden(pair["name"], value.strip("\"'")):
        return pair[0]
    return f"{pair[0].removesuffix(value)}{quote}***{quote}"


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
    flag = ""  # whose values are the next words: one, or of a secret all up to the next flag
    for word in words:
        name, equals, value = MAIL.sub(r"\1***", word).partition("=")
        is_flag = FLAG.fullmatch(word) is not None
        if not is_flag and _is_hidden(flag, word):
            shown.append("***")
        elif equals and WORD.fullmatch(name):
            shown.append(f"{redacted(name)}={redacted_argument(value, name)}")
        else:
            shown.append(redacted_argument(name + equals + value))
        if is_flag:
            flag = word if WORD.fullmatch(word) else ""
        elif not SECRET.search(flag):
            flag = ""
    return shlex.join(shown)


def settings_of(settings: Settings) -> dict[str, Any]:
    """All settings that a record contains, redacted."""
    named = as_mapping(settings)
    for name in UNRECORDED:
        del named[name]
    for name in ("model", "dataset", *(("strategy",) if own_strategy(settings.strategy) else ())):
        named[name] = redacted(str(named[name]))
    named["trainer"] = redacted_argument(named["trainer"])
    named["initial_peers"] = None
    return named
