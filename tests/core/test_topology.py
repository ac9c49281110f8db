"""The effective batch has one definition, and every way to ask for it agrees."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from harness.core.command_line import parse
from harness.core.topology import asked_batch, batch_of, batch_of_trainer, effective_batch


def test_the_effective_batch_is_that_of_all_devices() -> None:
    settings = parse("bert", ["--b", "4", "--grad_acc", "3"], {})
    assert effective_batch(4, 3, 5) == batch_of(settings, devices=5) == 60
    of_setup = replace(settings, setup="2_5_far")
    assert asked_batch(of_setup) == batch_of(of_setup, devices=10) == 120
    # nn.DataParallel: the Trainer's batch of a process is that of its two GPUs.
    args = SimpleNamespace(train_batch_size=8, gradient_accumulation_steps=3, world_size=1)
    assert batch_of_trainer(args) == batch_of(settings, devices=2) == 24


def test_peers_fill_one_target_however_many_they_are() -> None:
    settings = replace(parse("bert", ["--b", "4"], {}), target_batch=100)
    assert batch_of(settings, devices=1) == batch_of(settings, devices=7) == 100
