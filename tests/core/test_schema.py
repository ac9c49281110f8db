"""A record that is not as declared is refused in one line that names field, value and type."""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from docs.generate.dictionary import OUTPUTS, flat
from harness.core.schema.checks import RECORDS, check_fields, fields
from harness.core.schema.environment import (
    DataRecord,
    InputsRecord,
    LinkPair,
    LinkRecord,
    ObservedRecord,
)
from harness.core.schema.fields import Field
from harness.core.schema.machine import LaunchRecord, TcpRecord
from harness.core.settings import UserError
from tests.support.declared import SCHEMA, assert_declared, errors_of

README = OUTPUTS / "README.md"

FAILURE = {"rank": 0, "outcome": "oom", "reason": "too much", "unix": 1.5}
RANK = {
    "epoch": 1.0, "rank": 0, "epoch_time_s": 2.0, "step_time_median_s": None,
    "step_time_p95_s": 0.1, "data_wait_s": 0.0, "peak_memory_gib": 1.5, "user_s": 1, "system_s": 0,
    "payload_bytes": None, "network_sent_bytes": 7,
}  # fmt: skip
SPREAD = {"mean": 1.0, "p95": 1.0, "max": 1.0}
NODE = {
    "cpu_percent": SPREAD, "memory_gib": SPREAD, "disk_read_bytes": 1, "disk_written_bytes": 1,
    "network_sent_bytes": 1, "network_received_bytes": 1, "cpu_energy_j": None,
}  # fmt: skip
# Ending of a name -> the unit that it states.
ENDINGS = {
    "_samples_per_s": "1/s", "_tokens_per_s": "1/s", "_tflops_per_s": "10^12 operations/s",
    "_gb_per_s": "10^9 bytes/s",
    "_s": "s", "_s_per_rank": "s", "_ms": "ms", "_gib": "GiB", "_gib_per_rank": "GiB",
    "_mbit": "Mbit/s", "_bytes": "bytes", "_j": "J", "_w": "W", "_share": "share", "_percent":
    "percent", "_hz": "1/s",
}  # fmt: skip


def test_what_is_as_declared_is_valid() -> None:
    assert_declared("failure", FAILURE)
    assert_declared("ranks", RANK)
    assert_declared("ranks", {**RANK, "telemetry": {"gpus": [], "node": NODE, "energy_j": None}})
    # A record may know less; metrics of a script of one's own may be in per cent.
    check_fields("epochs", {"epoch": 1.0, "perplexity": 3.5, "wall_s": None}, "here")
    row = {"accuracy": 87.5, "gpu": {"power_w": None}, "eval_samples": 8.0}
    check_fields("epochs", row, "here", own_metrics=True)
    with pytest.raises(UserError, match=r"accuracy is '87\.5': expected number from 0 to 1"):
        check_fields("epochs", row, "here")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch_time_s": "1"}, r"here: epoch_time_s is '1': expected number >= 0, s$"),
        ({"epoch_time_s": -1.0}, r"here: epoch_time_s is '-1.0': expected number >= 0, s$"),
        ({"epoch_time_s": float("nan")}, r"epoch_time_s is 'nan': expected number"),
        ({"epoch_time_s": float("inf")}, r"epoch_time_s is 'inf': expected number"),
        ({"epoch_time_s": True}, r"epoch_time_s is 'True': expected number"),
        ({"rank": 1.5}, r"rank is '1.5': expected integer >= 0$"),
        ({"eval_accuracy": 87.5}, r"eval_accuracy is '87.5': expected number from 0 to 1, or null"),
        ({"telemetry": []}, r"telemetry is '\[\]': expected object, or null"),
        (
            {"telemetry": {"gpus": [], "node": {**NODE, "disk_read_bytes": "x"}, "energy_j": 1}},
            r"telemetry.node.disk_read_bytes is 'x': expected integer >= 0, bytes, or null",
        ),
    ],
)
def test_an_invalid_field_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_fields("ranks", {**RANK, **change}, "here")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch_time_s": None}, "$.epoch_time_s: None is not of type 'number'"),
        ({"perplexity": 3.5}, "$: Additional properties are not allowed ('perplexity' was unexp"),
        ({"telemetry": {"node": NODE, "energy_j": 1}}, "'gpus' is a required property"),
        (
            {"telemetry": {"gpus": [], "node": NODE, "energy_j": 1, "more": 1}},
            "$.telemetry: Additional properties are not allowed ('more' was unexpected)",
        ),
    ],
)
def test_what_a_reader_lets_pass_is_not_as_declared(change: dict[str, Any], message: str) -> None:
    """A record that was cut off, or is newer, may lack or add something."""
    check_fields("ranks", {**RANK, **change}, "here")
    (error,) = errors_of("ranks", {**RANK, **change})
    assert message in error


def test_other_kinds_of_values() -> None:
    with pytest.raises(UserError, match=r"x: outcome is 'gone': expected `finished` or `oom` or"):
        check_fields("failure", {**FAILURE, "outcome": "gone"}, "x")
    (error,) = errors_of("failure", {k: v for k, v in FAILURE.items() if k != "unix"})
    assert "'unix' is a required property" in error


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("epochs", {"peak_memory_gib_per_rank": [1, "2"]}, r"peak_memory_gib_per_rank\[1\] is '2'"),
        ("environment", {"versions": {"torch": 2}}, "versions.torch is '2': expected text, or nul"),
        ("environment", {"launch": {"sweep": 7}}, "launch.sweep is '7': expected text, or null$"),
        ("settings", {"grad_acc": 1.5}, "grad_acc is '1.5': expected integer >= 1, or null$"),
        ("summary", {"accuracy": "high"}, "accuracy is 'high': expected number from 0 to 1"),
        ("summary", {"attempts": True}, "attempts is 'True': expected integer >= 1$"),
    ],
)
def test_another_type_is_refused_everywhere(kind: str, value: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^x: {message}"):
        check_fields(kind, value, "x")


@pytest.mark.parametrize("at", [0, 1, 2])
def test_no_number_hides_one_that_is_none(at: int) -> None:
    """Wherever it stands, in a list as among the fields of a row."""
    for bad in (math.nan, math.inf, -math.inf):
        numbers = [1.0, 2.0, 3.0]
        numbers[at] = bad
        with pytest.raises(UserError, match=rf"gib_per_rank\[{at}\] is '{bad}': expected number"):
            check_fields("epochs", {"peak_memory_gib_per_rank": numbers}, "x")
        row = dict(zip(("wall_s", "epoch_time_s", "eval_time_s"), numbers, strict=True))
        with pytest.raises(UserError, match=rf"{[*row][at]} is '{bad}': expected number"):
            check_fields("epochs", row, "x")


def all_fields() -> Iterator[tuple[str, Field]]:
    for kind in RECORDS:
        yield from ((f"{kind}.{name}", field) for name, field in flat(fields(kind)).items())


def declared_in(record: type, name: str) -> Iterator[tuple[str, str, type | None]]:
    """Of each key of a TypedDict its dotted name, its meaning and, if it has keys, its type."""
    for key, hint in typing.get_type_hints(record, include_extras=True).items():
        if typing.get_origin(hint) is typing.NotRequired:
            (hint,) = typing.get_args(hint)
        meaning = "".join(text for text in hint.__metadata__ if isinstance(text, str))
        inner = {typing.get_args(hint)[0], *typing.get_args(typing.get_args(hint)[0])}
        (of,) = [*filter(typing.is_typeddict, inner)] or [None]
        yield f"{name}.{key}", meaning, of
        if of is not None:
            yield from declared_in(of, f"{name}.{key}")


@pytest.mark.parametrize(("name", "record"), [
    ("observed", ObservedRecord), ("link", LinkRecord), ("data", DataRecord),
    ("inputs", InputsRecord), ("launch", LaunchRecord), ("tcp", TcpRecord),
])  # fmt: skip
def test_each_key_of_an_environment_is_in_dictionary_and_schema(name: str, record: type) -> None:
    """As its TypedDict says, key by key, and there is none besides."""
    keys = [*declared_in(record, name)]
    rows = [line.split(" | ") for line in README.read_text("utf-8").splitlines() if " | " in line]
    meanings = {
        named.strip("` "): row[-1].removesuffix(" |")
        for row in rows
        for named in row[0].removeprefix("| ").split(" ")
        if named.strip("` ").startswith(f"{name}.")
    }
    expected = {key: meaning for key, meaning, _ in keys}
    for key in LinkPair.__annotations__ if name == "link" else ():  # of a list: in its own row
        assert f"`{key}`" in meanings["link.pairs"]
        del expected[f"link.pairs.{key}"]
    assert meanings == expected
    top = json.loads(SCHEMA.read_text("utf-8"))["$defs"]["environment"]["properties"][name]
    assert top["properties"].keys() == record.__annotations__.keys()
    assert top["additionalProperties"] is False
    for key, meaning, of in keys:
        inside = top
        for part in key.split(".")[1:]:
            inside = inside.get("items", inside)["properties"][part]
        assert inside["description"] == meaning, key
        of_items = inside.get("items", inside)
        assert (of is not None) == ("properties" in of_items), key
        if of is not None:
            assert of_items["properties"].keys() == of.__annotations__.keys(), key
            assert of_items["additionalProperties"] is False, key


def test_every_field_has_a_meaning_and_the_unit_of_its_name() -> None:
    named = 0
    for name, field in all_fields():
        assert field.meaning or field.kind.record is not None, name
        last = max((e for e in ENDINGS if f"_{field.name}".endswith(e)), key=len, default=None)
        if last is not None and field.kind.base in (int, float):
            assert field.kind.value.unit == ENDINGS[last], name
            named += 1
    assert named > 60
