"""Before a machine is taken away a run saves inside its epoch, and loses nothing."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.core.records import RunFolder, read_json, read_rows
from harness.train.run import failures
from harness.train.run.checkpoints import complete_checkpoints
from harness.train.strategy.base import Exchange
from tests.support.broken_runs import ARGV, SHORT, Whole, assert_same_training, only_run
from tests.support.ranks import ran, run_script, script

pytestmark = pytest.mark.process
HIVEMIND = pytest.mark.skipif(find_spec("hivemind") is None, reason="hivemind is not installed")


@pytest.mark.parametrize(
    ("count", "more"),
    [
        (1, []),
        (2, []),
        pytest.param(2, ["--strategy", "fsdp"], marks=pytest.mark.slow),
    ],
    ids=["one process", "ddp", "fsdp"],
)
def test_a_preemption_notice_saves_a_checkpoint(
    count: int, more: list[str], tmp_path: Path, whole: Whole
) -> None:
    call, out = tmp_path / "last call", tmp_path / "out"
    call.touch()
    flags = [*(SHORT if count == 1 else ARGV), *more]
    argv = [*flags, "--o", str(out)]
    done = script("vit", *argv, count=count, env={"HARNESS_PREEMPTION": str(call)})
    assert done.code == 138, done.err
    folder = only_run(out)
    summary = read_json(folder.summary) or {}
    assert (summary["outcome"], summary["epochs_done"]) == ("interrupted", 0)
    assert summary["reason"].startswith("the time limit is near: saved")
    # All ranks agree on an update a little ahead; one process need not.
    (checkpoint,) = complete_checkpoints(folder.path)
    saved = int(checkpoint.name.split("-")[1])
    assert saved == 1 if count == 1 else 4 <= saved <= 6

    call.unlink()
    done = script("vit", *argv, count=count, env={"HARNESS_PREEMPTION": str(call)})
    assert done.code == 0, done.err
    assert f"resumes from update {saved}" in done.out
    starts = [row for row in read_rows(folder.attempts)[0] if row["event"] == "start"]
    assert starts[1]["redone_updates"] == 0
    assert_same_training(folder, whole("vit", count, flags))


def called_ahead(argv: list[str], call: str) -> int:
    """vit.py with a slow rank 0; the other is ahead when it makes the last call."""
    module = __import__("vit")
    failures.LOOK_EVERY_S = 0.0  # each update

    class Caller(module.Console):  # type: ignore[name-defined,misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if args.process_index == 0:
                while state.global_step == 5 and not Path(call).exists():
                    time.sleep(0.02)
                time.sleep(0.1)
            elif state.global_step == 10:
                Path(call).touch()

    module.Console = Caller
    return run_script("vit", argv, ".")


@pytest.mark.parametrize(
    "strategy",
    [
        "local_sgd",
        pytest.param("diloco --fragments 2 --overlap 6", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_train_apart_save_at_one_update(strategy: str, tmp_path: Path) -> None:
    """The fast one waited in an exchange while the other waited for it to save, or both saved
    where they were.
    """
    call, out = tmp_path / "call", tmp_path / "out"
    argv = [
        "--tiny", "--train_size", "1280", "--test_size", "32", "--epochs", "2", "--b", "16",
        "--sync_scope", "rank", "--sync_every", "20", "--hang_after", "20",
        "--strategy", *strategy.split(), "--o", str(out),
    ]  # fmt: skip
    done = ran(2, called_ahead, argv, str(call), env={"HARNESS_PREEMPTION": str(call)})
    assert done.code == 138, done.err
    folder = only_run(out)
    (checkpoint,) = folder.checkpoints()
    assert complete_checkpoints(folder.path) == [checkpoint]
    assert len([*checkpoint.glob("apart_?.pt")]) == 2
    saved = int(checkpoint.name.split("-")[1])
    assert 19 <= saved <= 36, "far ahead of rank 0, or not inside the first epoch"

    done = script("vit", *argv, count=2)
    assert done.code == 0, done.err
    assert f"resumes from update {saved}" in done.out


def test_a_rank_that_may_be_anywhere_is_not_called(tmp_path: Path) -> None:
    """A strategy of one's own that trains apart and does not say how far."""
    context: Any = SimpleNamespace(settings=SimpleNamespace(strategy="ddp"))
    mine = Exchange(context)
    assert mine.updates_apart() == 1
    mine.apart = True
    call = tmp_path / "call"
    call.touch()
    args = SimpleNamespace(process_index=0, world_size=2, device=torch.device("cpu"))
    state, control = SimpleNamespace(global_step=5, epoch=0.5), SimpleNamespace(should_save=False)
    preemption = failures.Preemption(call, mine)
    preemption.on_step_end(args, state, control)
    assert preemption.announced and not control.should_save


def test_runs_that_save_at_the_end_of_epochs_alone_are_not_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: Any = SimpleNamespace(strategy="ddp", save="last")
    exchange = Exchange(SimpleNamespace(settings=settings))  # type: ignore[arg-type]
    assert failures.preemption(settings, exchange) is None  # nobody calls
    monkeypatch.setenv("HARNESS_PREEMPTION", str(tmp_path / "call"))
    assert failures.preemption(settings, exchange) is not None
    exchange.saves_inside_epoch = False
    assert failures.preemption(settings, exchange) is None
    exchange.saves_inside_epoch, settings.save = True, "none"
    assert failures.preemption(settings, exchange) is None


def test_a_host_waits_for_its_device_before_it_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No exchange holds a host that runs ahead of its GPU."""
    call, done = tmp_path / "call", []
    call.touch()
    store = SimpleNamespace(
        add=lambda key, count: done.append("ready") or 1, check=lambda keys: False
    )
    monkeypatch.setattr(failures, "_get_default_store", lambda: store)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("waited"))
    context: Any = SimpleNamespace(settings=SimpleNamespace(strategy="ddp"))
    args = SimpleNamespace(process_index=1, world_size=2, device=torch.device("cuda", 1))
    state, control = SimpleNamespace(global_step=5, epoch=0.5), SimpleNamespace(should_save=False)
    failures.Preemption(call, Exchange(context)).on_step_end(args, state, control)
    assert done == ["waited", "ready"]


@pytest.mark.parametrize(
    "more",
    [
        ["--save", "none"],
        pytest.param(["--strategy", "hivemind"], marks=HIVEMIND),  # nor inside an epoch
    ],
    ids=["no checkpoints", "hivemind"],
)
def test_nobody_is_called_where_nothing_is_saved(more: list[str], tmp_path: Path) -> None:
    call = tmp_path / "call"
    call.touch()
    argv = ["--tiny", "--train_size", "64", "--test_size", "32", "--epochs", "1", *more]
    done = script("vit", *argv, "--o", str(tmp_path), env={"HARNESS_PREEMPTION": str(call)})
    assert done.code == 0, done.err
    (folder,) = map(RunFolder, (tmp_path / "vit").glob("*/*"))
    assert folder.outcome() == "finished"
