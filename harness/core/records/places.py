"""Records for others: the paths that a run's settings and command name are cut to their last part.

Absolute paths, those below the home folder, and relative ones of data, model and own code.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.core.records.archives import Files, parsed, unpacked
from harness.core.records.checksums import OWN, is_changed, vouched
from harness.core.records.redact import redacted
from harness.core.schema.checks import RECORDS
from harness.core.tasks import DATA_FILES

# Settings that may name a file or a folder; on the Hub, a name has one slash at most.
OF_PLACES = ("model", "dataset", "strategy")
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
OF_FILES = (*DATA_FILES, ".gz", ".py")  # ends of names that none on the Hub has


def without_places(folders: Mapping[str, Files], named: Iterable[object] = ()) -> dict[str, Files]:
    """The records in these folders without the places of this machine; named: further paths."""
    texts = {text for files in folders.values() for text in _named_in(files)} | {*map(str, named)}
    texts |= {redacted(text) for text in texts}
    paths = {Path(text) for text in texts if text.startswith(("/", "~/"))}
    cuts = {form: "" for path in paths if path.name for form in _forms(path.parent)}
    for files in folders.values():
        settings = _content(files, "settings")
        given = (str(settings[name]) for name in OF_PLACES if settings.get(name))
        for path in map(Path, filter(_is_local, given)):
            if path.name != str(path):
                # Only before this name: a folder of runs may have the same name.
                before = f"(?={re.escape(path.name)})"
                cuts |= {form: before for form in _forms(path.parent) if form not in cuts}
    if not cuts:
        return dict(folders)
    longest_first = sorted(cuts, key=len, reverse=True)
    places = re.compile(
        "|".join(rf"(?<![\w.~-]){re.escape(form)}/+{cuts[form]}" for form in longest_first)
    )
    return {
        folder: {name: _cut(name, text, places) for name, text in files.items()}
        for folder, files in folders.items()
    }


def _forms(folder: Path) -> set[str]:
    """A folder as texts and JSON in texts name it; none for the root."""
    return {str(folder), json.dumps(str(folder))[1:-1]} - {"/"}


def _named_in(files: Files) -> Iterator[str]:
    """The texts of settings and plan, and the words of the command."""
    for kind in ("settings", "sweep"):
        yield from _texts(_content(files, kind))
    for kind in ("environment", "sweep"):
        yield from _words(_content(files, kind))


def _is_local(name: str) -> bool:
    """Whether a relative name is that of a file or a folder, and none on the Hub."""
    if "://" in name or name.startswith("embedded:"):
        return False
    return bool(
        HUB_NAME.fullmatch(name) is None
        or name.startswith(("./", "../"))
        or name.partition(":")[0].lower().endswith(OF_FILES)
        or Path(name).expanduser().exists()
    )


def _content(files: Files, kind: str) -> Mapping[str, Any]:
    try:
        content = parsed(unpacked(files[Path(RECORDS[kind].file).name]).decode())
    except (KeyError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _texts(value: Any) -> Iterator[str]:
    """All texts inside a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _words(content: Mapping[str, Any]) -> Iterator[str]:
    """The words of the command, and the values in them."""
    try:
        words = shlex.split(str(content.get("command") or ""))
    except ValueError:  # a command that somebody changed
        return
    for word in words:
        yield word
        yield word.partition("=")[2]


def _cut(name: str, text: str, places: re.Pattern[str]) -> str:
    """A file's content, as JSON, without these places."""
    content = json.loads(text)
    if not isinstance(content, str):
        return json.dumps(_without(places, content))
    # The file is packed as a text, as one with a torn row: its other rows have checksums, too.
    parts = [content] if name.endswith(".json") else content.split("\n")
    return json.dumps("\n".join(_cut_text(part, places) for part in parts))


def _cut_text(text: str, places: re.Pattern[str]) -> str:
    try:
        content = parsed(text)
    except ValueError:
        return places.sub("", text)
    cut = _without(places, content)
    return text if cut == content else json.dumps(cut)


def _without(places: re.Pattern[str], value: Any) -> Any:
    """The value with its texts cut; an object that had a right checksum has a right one again."""
    if isinstance(value, str):
        return places.sub("", value)
    if isinstance(value, list):
        return [_without(places, each) for each in value]
    if not isinstance(value, dict):
        return value
    cut = {places.sub("", name): _without(places, each) for name, each in value.items()}
    return vouched(cut) if OWN in value and cut != value and not is_changed(value) else cut
