"""A strategy that ships is added by one entry: it is then asked for, checked, run and read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.core.command_line import help_text, parse
from harness.core.settings import UserError
from harness.core.strategies import STRATEGIES, Strategy
from harness.launch.plan import plan
from harness.launch.sweepfile import load
from harness.read.labels import strategy_text
from harness.read.records.selection import read_group
from harness.train.strategy.base import Exchange
from tests.support.ranks import ROOT, ran, run_script, script
from tests.support.sweeps import sweep_file

SMALL = ["--tiny", "--epochs", "1", "--train_size", "128", "--test_size", "32"]
TWO = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


class Gathered(Exchange):
    """Each rank gathers the gradients of all and averages them itself."""

    def attach(self, model: nn.Module, optimizer: Any) -> None:
        getattr(model, "_orig_mod", model).register_comm_hook(self, Gathered.average)
        self.observed["exchanges"] = 0

    def average(self, bucket):  # type: ignore[no-untyped-def] # torch reads it
        own = bucket.buffer()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        self.observed["exchanges"] += 1
        sent = dist.all_gather(parts, own, async_op=True).get_future()
        return sent.then(lambda _: torch.stack(parts).mean(0))


ENTRY = Strategy(
    "gathered", "each rank averages what it gathers", "gradients, every step", "many",
    exchange=f"{__name__}:Gathered", own={"outer_lr": 0.5}, why_no_lora="whose ranks are many",
)  # fmt: skip


def train(argv: list[str]) -> int:
    STRATEGIES[ENTRY.name] = ENTRY
    return run_script("vit", argv, str(ROOT))


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES, ENTRY.name, ENTRY)


@pytest.mark.usefixtures("entered")
def test_the_command_line_and_sweeps_know_it(tmp_path: Path) -> None:
    asked = [*SMALL, "--strategy", "gathered"]
    settings = parse("vit", asked, TWO)
    assert (settings.strategy, settings.setup, settings.outer_lr) == ("gathered", "1_2", 0.5)
    assert "|hivemind|gathered]" in help_text("vit").replace("\n" + " " * 28, "")
    assert "gathered: each rank averages" in help_text("vit")
    text = "script: vit\nsettings: {setup: 1_2}\ngrid: {strategy: [ddp, gathered]}\n"
    _, job = plan(load(sweep_file(tmp_path, text, "s"), tiny=True))
    assert ("--strategy", "gathered") in zip(job.argv, job.argv[1:], strict=False)


@pytest.mark.usefixtures("entered")
@pytest.mark.parametrize(
    ("flags", "environ", "said"),
    [
        ("", {}, "--strategy gathered needs processes that torchrun starts"),
        ("--lora 4", TWO, "does not go with --strategy gathered, whose ranks are many: use ddp"),
        ("--compress bf16", TWO, "does not go with --strategy gathered, but with ddp"),
        (
            "--balance 1,2",
            TWO,
            "does not go with --strategy gathered, but with ddp and fsdp",
        ),
        ("--fsdp_offload", TWO, "--fsdp_offload needs --strategy fsdp"),
    ],
)
def test_rules_ask_its_properties(flags: str, environ: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse("vit", [*SMALL, "--strategy", "gathered", *flags.split()], environ)


@pytest.mark.process
@pytest.mark.usefixtures("entered")
def test_it_trains_and_is_read(tmp_path: Path) -> None:
    """The mean of gathered gradients is that of DDP to the last bit: halves of two are exact."""
    argv = [*SMALL, "--o", str(tmp_path), "--strategy"]
    for done in (ran(2, train, [*argv, "gathered"]), script("vit", *argv, "ddp", count=2)):
        assert done.code == 0, done.err
    groups = [read_group(name, f"{tmp_path}:strategy={name}", None) for name in ("gathered", "ddp")]
    (own,), (reference,) = (group.finished for group in groups)
    names = ("train_loss", "eval_loss")
    assert [own.epochs[0][n] for n in names] == [reference.epochs[0][n] for n in names]
    assert own.observed["strategy"] == "gathered" and own.observed["exchanges"] > 0
    assert strategy_text(groups[0].identity).startswith("gathered")
