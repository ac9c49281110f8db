"""The command line, generated from Settings: parse, to_argv and --help.

Written by hand rather than with argparse because three kinds of flags meet here: ours, the
Trainer's (passed through) and those of the Trainer that would falsify a comparison (refused), and
because a mistake is to be answered in one line that names the nearest flag.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from harness.architectures import listing
from harness.checks import resolve
from harness.help import help_text
from harness.identity import number
from harness.parent import end_with_parent
from harness.settings import Settings, UserError, flag_fields
from harness.values import field_of, texts_of, typed
from harness.world import place, world_of


def parse(
    script: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Settings from a command line, checked against the world that runs it; UserError if wrong."""
    argv = list(sys.argv[1:] if argv is None else argv)
    environ = os.environ if environ is None else environ
    given = {**_from_file(script, argv), **_from_argv(script, argv)}
    return place(resolve(bare(script, given)), world_of(environ))


def bare(script: str, given: Mapping[str, Any]) -> Settings:
    """Settings with nothing but what was given: defaults are not filled in yet."""
    trainer = tuple(sorted((k, v) for k, v in given.items() if k not in flag_fields()))
    ours = {k: v for k, v in given.items() if k in flag_fields()}
    return Settings(script=script, trainer=trainer, **ours)


def command_line(script: str, argv: Sequence[str] | None = None) -> Settings:
    """parse() for a script's first lines: --help and mistakes end the process here."""
    argv = list(sys.argv[1:] if argv is None else argv)
    asked = {a.lstrip("-").replace("-", "_") for a in argv if a.startswith("-")}
    leader = os.environ.get("RANK", "0") == "0"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()  # a rank does not outlive its launcher
    try:
        if asked & {"h", "help"}:
            raise SystemExit(show(help_text(script), leader))
        if "list_models" in asked:
            raise SystemExit(show(listing(script), leader))
        print_only = "print_settings" in asked
        settings = parse(script, [a for a in argv if a.replace("-", "_") != "__print_settings"])
    except UserError as error:
        refuse(script, error, leader)
    if print_only:
        raise SystemExit(show(json.dumps(as_mapping(settings), indent=2), leader))
    return settings


def show(text: str, leader: bool) -> int:
    if leader:
        print(text)
    return 0


def refuse(script: str, error: Exception, leader: bool = True) -> NoReturn:
    """One clear line and exit code 2; only the first rank speaks."""
    if leader:
        print(f"{script}.py: error: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(1)  # the launcher stops all ranks when one leaves: let the first speak
    raise SystemExit(2) from None


def as_mapping(settings: Settings) -> dict[str, Any]:
    """Settings as they stand in settings.json and as a settings file can give them back."""
    values = {name: getattr(settings, name) for name in flag_fields()}
    return {"script": settings.script, **values, "trainer": dict(settings.trainer)}


def to_argv(settings: Settings, short: bool = False) -> list[str]:
    """The command line that parse turns back into exactly these settings.

    Short: without what is a field's default anyway.
    """
    argv: list[str] = []
    for name, f in flag_fields().items():
        value = getattr(settings, name)
        if value is None or value is False or (short and value == f.default):
            continue
        argv += [f"--{name}"] if value is True else [f"--{name}", number(value)]
    return argv + trainer_argv(settings)


def trainer_argv(settings: Settings) -> list[str]:
    """The passed-through part, as TrainingArguments' own parser reads it."""
    argv: list[str] = []
    for name, value in settings.trainer:
        values = value if isinstance(value, (list, tuple)) else [value]
        argv += [
            f"--{name}",
            *(json.dumps(v) if isinstance(v, (bool, dict)) else number(v) for v in values),
        ]
    return argv


def _from_argv(script: str, argv: list[str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if not word.startswith("--"):
            if position == 1 and word.endswith((".yaml", ".yml", ".json")):
                continue
            raise UserError(f"unexpected {word!r}: flags are written --name value")
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        values = [text] if equals else []
        field_name = field_of(script, name)
        if not equals:
            several = field_name is None
            while position < len(argv) and not argv[position].startswith("--"):
                values.append(argv[position])
                position += 1
                if not several:
                    break
        _add(given, name, field_name, values)
    return given


def _from_file(script: str, argv: list[str]) -> dict[str, Any]:
    """A settings file named first: the same names as the flags, in YAML or JSON."""
    if not argv or not argv[0].endswith((".yaml", ".yml", ".json")):
        return {}
    content = _read_file(Path(argv[0]))
    written_by = content.pop("script", script)
    if written_by != script:
        raise UserError(f"settings file {argv[0]} is for {written_by}.py, not {script}.py")
    passed = content.pop("trainer", {})
    if not isinstance(passed, dict):
        raise UserError(f"settings file {argv[0]}: trainer holds {passed!r}, not names and values")
    given: dict[str, Any] = {}
    for name, value in [*content.items(), *passed.items()]:
        if value in ("", "null", "~"):
            continue  # not set: the default, whichever script the field belongs to
        name = str(name).replace("-", "_")
        field_name = field_of(script, name)
        values = texts_of(value)
        if field_name is not None and len(values) != 1:
            raise UserError(f"settings file {argv[0]}: {name} takes one value, not {values}")
        _add(given, name, field_name, values)
    return given


def _read_file(path: Path) -> dict[str, Any]:
    import yaml  # the one package beyond the standard library here, and only for such files

    if not path.is_file():
        raise UserError(f"settings file {path} does not exist")
    try:
        # Texts only, as on a command line: YAML would read the set-up 1_1 as the number 11.
        content = yaml.BaseLoader(path.read_text("utf-8")).get_single_data()
    except UnicodeDecodeError:
        raise UserError(f"settings file {path}: not readable as YAML: no UTF-8") from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" line {where.line + 1}" if where else ""
        raise UserError(f"settings file {path}{line}: not readable as YAML") from None
    if not isinstance(content, dict):
        raise UserError(f"settings file {path}: expected lines such as 'lr: 3e-5'")
    return content


def _add(given: dict[str, Any], name: str, field_name: str | None, values: list[str]) -> None:
    key = field_name or name
    value = typed(name, field_name, values)
    if key in given and given[key] != value:
        raise UserError(
            f"--{name} {value} contradicts an earlier {given[key]} for the same setting"
        )
    given[key] = value
