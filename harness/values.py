"""One flag: which setting a name means, and the typed value that its text stands for."""

from __future__ import annotations

import difflib
import json
from typing import Any

from harness.help import names_of
from harness.settings import UserError, flag_fields
from harness.trainer_flags import REFUSED, trainer_flags

TEXT_OF_BOOL = {
    "true": True,
    "1": True,
    "yes": True,
    "false": False,
    "0": False,
    "no": False,
}


def field_of(script: str, name: str) -> str | None:
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


def texts_of(value: Any) -> list[str]:
    """The texts that a value from a settings file would be on a command line."""
    if isinstance(value, dict):
        inner = {k: scalar(v) if isinstance(v, str) else v for k, v in value.items()}
        return [json.dumps(inner)]
    return [str(v) for v in value] if isinstance(value, list) else [str(value)]


def typed(name: str, field_name: str | None, values: list[str]) -> Any:
    """The typed value of a flag; a flag of the Trainer keeps the type its text has."""
    if field_name is None:
        if not values:
            return True
        typed = tuple(scalar(v) for v in values)
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


def scalar(text: str) -> Any:
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
    "rate": lambda name, text: _real(name, text, 0.0, 100.0, "at least 0 and below 100"),
    "share": lambda name, text: _real(name, text, 0.0, 1.0, "at least 0 and below 1"),
}
