"""The tables of rules: walked in order, and every message can be filled in."""

from __future__ import annotations

import pytest

from harness.core import rules
from harness.core.command_line import parse
from harness.core.rules import Combination, broken, refuse
from harness.core.settings import UserError

TABLES = {n: t for n, t in vars(rules).items() if isinstance(t, tuple) and t and len(t[0]) == 2}


def test_the_first_rule_that_holds_speaks() -> None:
    case = Combination(parse("bert", ["--b", "4"], {}))
    table = ((lambda s, c: False, "no"), (lambda s, c: s.epochs, "{s.epochs}: {c.own_batch}"),
             (lambda s, c: True, "later"))  # fmt: skip
    assert broken(table, case) == "3: 4" and broken(table[:1], case) is None
    refuse(table[:1], case)
    with pytest.raises(UserError, match="3: 4"):
        refuse(table, case)


def test_every_message_is_one_line_that_can_be_filled_in() -> None:
    assert len(TABLES) >= 8 and sum(map(len, TABLES.values())) >= 35
    passed = ["--optim", "x", "--lr_scheduler_type", "greedy"]
    case = Combination(parse("bert", ["--tiny", *passed], {}))
    for table in TABLES.values():
        for _, message in table:
            text = message.format(s=case.settings, c=case)
            assert "\n" not in text and text.startswith(("--", "torchrun"))
