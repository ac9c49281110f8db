"""The command line, generated from Settings: parse, to_argv and --help.

Written by hand rather than with argparse because three kinds of flags meet here: ours, the
Trainer's (passed through) and those of the Trainer that would falsify a comparison (refused), and
because a mistake is to be answered in one line that names the nearest flag.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from harness.architectures import listing
from harness.help import help_text, names_of
from harness.identity import number
from harness.settings import Settings, UserError, flag_fields, resolve
from harness.strategies import place, world_of
from harness.trainer_flags import REFUSED, trainer_flags

TEXT_OF_BOOL = {
    "true": True,
    "1": True,
    "yes": True,
    "false": False,
    "0": False,
    "no": False,
}


def parse(
    script: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Settings from a command line, checked against the world that runs it; UserError if wrong."""
    argv = list(sys.argv[1:] if argv is None else argv)
    environ = os.environ if environ is None else environ
    given = {**_from_file(script, argv), **_from_argv(script, argv)}
    trainer = tuple(sorted((k, v) for k, v in given.items() if k not in flag_fields()))
    ours = {k: v for k, v in given.items() if k in flag_fields()}
    settings = resolve(Settings(script=script, trainer=trainer, **ours))
    return place(settings, world_of(environ))


def command_line(script: str, argv: Sequence[str] | None = None) -> Settings:
    """parse() for a script's first lines: --help and mistakes end the process here."""
    argv = list(sys.argv[1:] if argv is None else argv)
    asked = {a.lstrip("-").replace("-", "_") for a in argv if a.startswith("-")}
    leader = os.environ.get("RANK", "0") == "0"
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


def to_argv(settings: Settings) -> list[str]:
    """The command line that parse turns back into exactly these settings."""
    argv: list[str] = []
    for name in flag_fields():
        value = getattr(settings, name)
        if value is None or value is False:
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


def _field_of(script: str, name: str) -> str | None:
    """The field that a flag means, None for one of the Trainer's; refuses the rest."""
    names = names_of(script)
    if name in names:
        return names[name]
    if name in REFUSED:
        raise UserError(f"--{name} is not taken: {REFUSED[name]}")
    if name in trainer_flags():
        return None
    other = {"bert": "vit", "vit": "bert"}[script]
    if name in names_of(other):
        raise UserError(f"--{name} is a flag of {other}.py, not of {script}.py")
    known = [*names, *trainer_flags(), "help", "print_settings", "list_models"]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f": did you mean --{near[0]}?" if near else f": see python {script}.py --help"
    raise UserError(f"unknown flag --{name}{hint}")


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
        field_name = _field_of(script, name)
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
        field_name = _field_of(script, name)
        values = value if isinstance(value, list) else [_text(value)]
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


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps({k: _scalar(v) if isinstance(v, str) else v for k, v in value.items()})
    return str(value)


def _add(given: dict[str, Any], name: str, field_name: str | None, values: list[str]) -> None:
    key = field_name or name
    value = _value(name, field_name, values)
    if key in given and given[key] != value:
        raise UserError(
            f"--{name} {value} contradicts an earlier {given[key]} for the same setting"
        )
    given[key] = value


def _value(name: str, field_name: str | None, values: list[str]) -> Any:
    """The typed value of a flag; a flag of the Trainer keeps the type its text has."""
    if field_name is None:
        if not values:
            return True
        typed = tuple(_scalar(v) for v in values)
        return typed[0] if len(typed) == 1 else typed
    meta = flag_fields()[field_name].metadata
    if meta["kind"] == "bool":
        text = values[0].lower() if values else "true"
        if text not in TEXT_OF_BOOL:
            raise UserError(f"--{name} {text}: expected true or false")
        return TEXT_OF_BOOL[text]
    if not values or values[0] == "":
        raise UserError(f"--{name} needs a value: {meta['help']}")
    value = KINDS[meta["kind"]](name, values[0])
    if meta["choices"] and value not in meta["choices"]:
        near = difflib.get_close_matches(str(value), meta["choices"], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"--{name} {value}: expected one of {', '.join(meta['choices'])}{hint}")
    return value


def _scalar(text: str) -> Any:
    if text.startswith("{"):
        try:
            return json.dumps(json.loads(text), sort_keys=True)  # one way to write it
        except ValueError:
            return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for convert in (int, float):
        try:
            value = convert(text)
        except ValueError:
            continue
        return int(value) if isinstance(value, float) and value.is_integer() else value
    return text


def _whole(name: str, text: str, least: int, most: int | None = None) -> int:
    try:
        value = int(text)
    except ValueError:
        raise UserError(f"--{name} {text}: expected a whole number") from None
    if value < least:
        raise UserError(f"--{name} {text}: must be at least {least}")
    if most is not None and value > most:
        raise UserError(f"--{name} {text}: must be at most {most}")
    return value


def _real(name: str, text: str, above: float, below: float, meaning: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"--{name} {text}: expected a number") from None
    if not above <= value < below or (meaning == "above 0" and value == 0):
        raise UserError(f"--{name} {text}: must be {meaning}")
    return value


KINDS: dict[str, Any] = {
    "text": lambda name, text: text,
    "count": lambda name, text: _whole(name, text, 1),
    "natural": lambda name, text: _whole(name, text, 0),
    "seed": lambda name, text: _whole(name, text, 0, 2**32 - 1),
    "size": lambda name, text: text if text == "all" else _whole(name, text, 1),
    "positive": lambda name, text: _real(name, text, 0.0, float("inf"), "above 0"),
    "share": lambda name, text: _real(name, text, 0.0, 1.0, "at least 0 and below 1"),
}
