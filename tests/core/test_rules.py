"""The tables of rules, walked in order; the effective batch, which has one definition."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from harness.core import rules
from harness.core.command_line import parse
from harness.core.rules import Combination, broken, refuse
from harness.core.settings import UserError
from harness.core.strategies import STRATEGIES, recorded_strategy
from harness.core.topology import (
    World,
    asked_batch,
    batch_of,
    batch_of_device,
    batch_of_trainer,
    batch_of_update,
    effective_batch,
)

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


def test_half_a_batch_does_not_go_with_a_padded_tail() -> None:
    assert parse("bert", ["--auto_batch"], {}).tail == "cut"
    with pytest.raises(UserError, match="--auto_batch does not go with --tail pad: half of the ba"):
        parse("bert", ["--auto_batch", "--tail", "pad"], {})


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_that_cannot_pad_the_last_batch_refuses_it(name: str) -> None:
    settings = replace(parse("bert", ["--tail", "pad"], {}), strategy=name)
    table = rules.PEERS if STRATEGIES[name].processes == "peers" else rules.PROCESSES
    alone = World(launched=STRATEGIES[name].needs_launcher)
    refused = broken(table, Combination(settings, alone)) or ""
    assert ("--tail pad does not go with" in refused) is not STRATEGIES[name].can_pad


def test_a_recorded_strategy_need_not_be_here() -> None:
    """An imported run, or a user's own strategy, whose file lies elsewhere."""
    assert recorded_strategy({"strategy": "hivemind"}) is STRATEGIES["hivemind"]
    for name in (None, "gone.py:Mine", "pipeline"):
        other = recorded_strategy({"strategy": name})
        assert other.can_pad and not other.has_peers
    assert recorded_strategy({}).can_pad


def test_the_effective_batch_is_that_of_all_devices() -> None:
    settings = parse("bert", ["--b", "4", "--grad_acc", "3"], {})
    assert effective_batch(4, 3, 5) == batch_of(settings, devices=5) == 60
    assert batch_of_device(60, 3, 5) == 4
    assert batch_of_device(60, 3, 7) is batch_of_device(4, 1, 5) is None
    of_setup = replace(settings, setup="2_5_far")
    assert asked_batch(of_setup) == batch_of(of_setup, devices=10) == 120
    # nn.DataParallel: the Trainer's batch of a process is that of its two GPUs.
    args = SimpleNamespace(train_batch_size=8, gradient_accumulation_steps=3, world_size=1)
    assert batch_of_trainer(args) == batch_of(settings, devices=2) == 24


def test_peers_fill_one_target_however_many_they_are() -> None:
    settings = replace(parse("bert", ["--b", "4"], {}), target_batch=100)
    assert batch_of(settings, devices=1) == batch_of(settings, devices=7) == 100
    assert batch_of_update(100, 8) == 100 and batch_of_update(None, 8) == 8
    assert batch_of_update(None, None) is None
