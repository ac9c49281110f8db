"""What may stand in a record that others will read: no secrets, no home folder, no place."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.flags import as_mapping
from harness.settings import Settings

SECRET = re.compile(r"token|key|secret|password", re.IGNORECASE)
# Flags that name machines and people on them.
PLACES = re.compile(r"^--(hosts|hosts.file|master.addr|ssh|initial.peers)$")


def without_home(text: str) -> str:
    """Paths of a person's own, as anyone would write them."""
    return text.replace(str(Path.home()), "~")


def command_line(words: Sequence[str]) -> str:
    """A command as typed, but for hosts and secrets: --token X, --token=X and --set token=X."""
    shown = []
    hide_next = False
    for word in words:
        name, equals, _ = word.partition("=")
        named = SECRET.search(name) is not None and (equals or word.startswith("-"))
        secret = named or PLACES.match(name)
        if hide_next and not word.startswith("-"):
            word = "***"
        elif secret and equals:
            word = f"{name}=***"
        hide_next = bool(secret) and not equals
        shown.append(without_home(word))
    return shlex.join(shown)


def settings_of(settings: Settings) -> dict[str, Any]:
    """All settings but those that say where and whether to write."""
    named = as_mapping(settings)
    for name in ("output_dir", "rerun"):
        del named[name]
    for name in ("model", "dataset"):
        named[name] = without_home(str(named[name]))
    named["initial_peers"] = None
    return named
