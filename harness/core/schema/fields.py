"""What a recorded value can be: its Python type, unit and range (checks.py checks records).

A record is declared as a TypedDict whose fields are `Annotated[type, meaning]`. The types below
carry unit and range, so that each is stated once and a type checker sees a plain float.
"""

from __future__ import annotations

import types
import typing
from dataclasses import dataclass, replace
from functools import cache
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    TypeGuard,
    Union,
    get_args,
    get_origin,
)  # fmt: skip

# Larger than anything measured: sums and squares of smaller numbers are still finite.
LARGEST = 1e100


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number; anything else, such as null, means unknown."""
    number = isinstance(value, (int, float)) and type(value) is not bool
    return number and -LARGEST <= value <= LARGEST


@dataclass(frozen=True)
class Value:
    """Unit and range of a number, or the choices of a text."""

    unit: str = ""
    minimum: float = -LARGEST
    maximum: float = LARGEST
    choices: tuple[str, ...] = ()


Seconds = Annotated[float, Value("s", 0)]
Unix = Annotated[float, Value("s since 1970", 0)]
Milliseconds = Annotated[float, Value("ms", 0)]
PerSecond = Annotated[float, Value("1/s", 0)]
Mbit = Annotated[float, Value("Mbit/s", 0)]
Gib = Annotated[float, Value("GiB", 0)]
Bytes = Annotated[int, Value("bytes", 0)]
Joules = Annotated[float, Value("J", 0)]
Watts = Annotated[float, Value("W", 0)]
Celsius = Annotated[float, Value("°C")]
Megahertz = Annotated[float, Value("MHz", 0)]
Tflop = Annotated[float, Value("10^12 operations", 0)]
TflopPerSecond = Annotated[float, Value("10^12 operations/s", 0)]
GigabytePerSecond = Annotated[float, Value("10^9 bytes/s", 0)]
Operations = Annotated[float, Value("operations", 0)]
Share = Annotated[float, Value("share", 0, 1)]
Gain = Annotated[float, Value("share", maximum=1)]  # may be below 0 by noise
Percent = Annotated[float, Value("percent", 0)]
Ratio = Annotated[float, Value("", 0)]
Count = Annotated[int, Value("", 0)]
Positive = Annotated[int, Value("", 1)]
Amount = Annotated[float, Value("", 0)]


@dataclass(frozen=True)
class Kind:
    """A type of value, as far as JSON distinguishes types."""

    base: type  # bool, int, float, str, list, dict, or object for anything
    value: Value = Value()
    nullable: bool = False
    item: Kind | None = None  # of a list, or of a dict with arbitrary names
    record: type | None = None  # of a dict whose fields are declared

    def __str__(self) -> str:
        if self.record is not None:
            text = "object"
        elif self.value.choices:
            text = " or ".join(f"`{choice}`" for choice in self.value.choices)
        else:
            text = {bool: "true or false", int: "integer", float: "number", str: "text",
                     list: "list", dict: "object", object: "anything"}[self.base]  # fmt: skip
        if self.item is not None and self.item.base is not object:
            text += f" of {self.item}"
        low, high, unit = self.value.minimum, self.value.maximum, self.value.unit
        if low > -LARGEST and high < LARGEST:
            text += f" from {low:g} to {high:g}" if low < high else f" {low:g}"
        elif low > -LARGEST:
            text += f" >= {low:g}"
        elif high < LARGEST:
            text += f" <= {high:g}"
        text += f", {unit}" if unit not in ("", "share") else ""
        return text + (", or null" if self.nullable else "")


@dataclass(frozen=True)
class Field:
    name: str
    kind: Kind
    meaning: str
    required: bool


@cache
def fields_of(record: type) -> dict[str, Field]:
    """The declared fields of a record, in order."""
    hints = typing.get_type_hints(record, include_extras=True)
    total: bool = getattr(record, "__total__", True)  # of a TypedDict
    return {name: _field(name, hint, total) for name, hint in hints.items()}


def _field(name: str, hint: Any, required: bool) -> Field:
    if get_origin(hint) is NotRequired:
        hint, required = get_args(hint)[0], False
    meanings = [m for m in getattr(hint, "__metadata__", ()) if isinstance(m, str)]
    return Field(name, kind_of(hint), "".join(meanings), required)


def kind_of(hint: Any) -> Kind:
    """The Kind of a type in a record's declaration."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        values = [m for m in hint.__metadata__ if isinstance(m, Value)]
        kind = kind_of(inner[0])
        return replace(kind, value=values[-1]) if values else kind
    if origin in (Union, types.UnionType):
        (of,) = (of for of in inner if of is not type(None))
        return replace(kind_of(of), nullable=True)
    if origin is Literal:
        choices = tuple(i for i in inner if isinstance(i, str))
        numbers = [float(i) for i in inner if isinstance(i, int)] or [-LARGEST, LARGEST]
        return Kind(type(inner[0]), Value("", numbers[0], numbers[-1], choices))
    if origin in (list, dict):
        return Kind(origin, item=kind_of(inner[-1]))
    if typing.is_typeddict(hint):
        return Kind(dict, record=hint)
    return Kind(object if hint is Any else hint, nullable=hint is Any)
