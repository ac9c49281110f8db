"""What the tests of command lines share: the variables of a launcher, and how parse() refuses."""

from __future__ import annotations

from typing import Any

import pytest

from harness.core.command_line import parse
from harness.core.records import SCHEMA
from harness.core.settings import UserError, as_mapping

ALONE: dict[str, str] = {}


def launched(nodes: int, per_node: int) -> dict[str, str]:
    """What torchrun tells each of its processes."""
    size = {"WORLD_SIZE": str(nodes * per_node), "LOCAL_WORLD_SIZE": str(per_node)}
    return {"RANK": "0", "LOCAL_RANK": "0", **size}


def whole_settings(script: str = "bert", **changes: Any) -> dict[str, Any]:
    """What settings.json holds of a run at laptop size, with these changes."""
    return {"schema": SCHEMA, **as_mapping(parse(script, ["--tiny"], ALONE)), **changes}


def refusal(argv: list[str], environ: dict[str, str] = ALONE, script: str = "bert") -> str:
    """The one line of the mistake in this command line."""
    with pytest.raises(UserError) as refused:
        parse(script, argv, environ)
    assert "\n" not in str(refused.value)
    return str(refused.value)
