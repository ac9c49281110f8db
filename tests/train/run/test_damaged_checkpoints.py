"""A checkpoint that is not as it was written is named, and the one before it is used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import TrainerCallback, TrainerState

from harness.core.records import RunFolder, append_row
from harness.core.records.checksums import vouched
from harness.core.settings import UserError
from harness.core.topology import World
from harness.read.records.recorded import recorded
from harness.train.context import Context
from harness.train.manifest import write_manifest
from harness.train.run.checkpoints import (
    complete,
    complete_checkpoints,
    remove_broken,
    require_sound,
    sound_checkpoints,
    usable_checkpoint,
)
from tests.support.broken_runs import SHORT, Whole, assert_same_training, broken_off, only_run
from tests.support.damage import KINDS, plant
from tests.support.manifests import facts_of
from tests.support.ranks import ranks, script
from tests.support.toys import CPU, Net, Points, ours

ARGV = [*SHORT, "--save_steps", "3"]


def checkpoints(folder: Path, bests: dict[int, str | None]) -> list[Path]:
    """Made by hand, each with the name of the best one at its time."""
    made = []
    for update, best in bests.items():
        checkpoint = folder / f"checkpoint-{update}"
        checkpoint.mkdir()
        (checkpoint / "model.safetensors").write_bytes(b"weights" * 100)
        (checkpoint / "trainer_state.json").write_text(f'{{"step": {update}}}')
        write_manifest(checkpoint / "complete.json", facts_of(update, best=best))
        made.append(checkpoint)
    return made


@pytest.mark.parametrize("name", ["model.safetensors", "trainer_state.json", "complete.json"])
@pytest.mark.parametrize("kind", KINDS)
def test_damage_of_any_file_is_found(
    kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, last = checkpoints(tmp_path, {10: None, 20: None})
    assert sound_checkpoints(tmp_path) == [before, last]
    require_sound(last, World())
    assert capsys.readouterr().err == ""
    plant(kind, last / name)
    with pytest.raises(RuntimeError, match=f"checkpoint-20 is damaged .{name}.*start the run"):
        require_sound(last, World())
    assert sound_checkpoints(tmp_path) == [before]
    if (kind, name) != ("missing", "complete.json"):  # which looks as if it was never written
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and f"checkpoint-20 is damaged and not used ({name}" in told
        assert not last.exists()


def test_a_checkpoint_of_another_version_is_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its manifest has a checksum that is right, and lacks what a run goes on with."""
    before, last = checkpoints(tmp_path, {10: None, 20: None})
    facts: dict[str, Any] = {**facts_of(20)}
    del facts["position"]
    write_manifest(last / "complete.json", facts)
    assert sound_checkpoints(tmp_path) == [before]
    assert capsys.readouterr().err == (
        "warning: checkpoint-20 is damaged and not used (complete.json of another version: "
        "position is missing)\n"
    )


def test_a_checkpoint_needs_the_best_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, best, _ = checkpoints(tmp_path, {8: None, 16: "checkpoint-8", 24: "checkpoint-16"})
    plant("one bit", best / "model.safetensors")
    assert sound_checkpoints(tmp_path) == [first]
    told = capsys.readouterr().err
    assert (
        "checkpoint-24 is not used: its best epoch is checkpoint-16, which is not used either"
        in told
    )
    shutil.rmtree(first)
    checkpoints(tmp_path, {16: "checkpoint-8"})
    assert sound_checkpoints(tmp_path) == []
    assert "no checkpoint is left: training starts from the beginning" in capsys.readouterr().err


def test_the_best_one_of_each_kept_checkpoint_is_kept(tmp_path: Path) -> None:
    context: Any = SimpleNamespace(
        args=SimpleNamespace(world_size=1, should_save=True), world=World(), fingerprint={}
    )
    for update, best in ((8, 8), (16, 8), (24, 24)):
        checkpoint = tmp_path / f"checkpoint-{update}"
        checkpoint.mkdir()
        (checkpoint / "model.safetensors").write_bytes(b"weights" * 100)
        state = TrainerState(
            global_step=update, best_model_checkpoint=str(tmp_path / f"checkpoint-{best}")
        )
        complete(checkpoint, context, state, {})
    first, second, last = complete_checkpoints(tmp_path)
    plant("one bit", last / "model.safetensors")
    assert sound_checkpoints(tmp_path) == [first, second]


def test_a_checkpoint_is_not_used_without_the_rows_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that went on from it would end as finished without them."""
    folder = RunFolder(tmp_path)
    context: Any = SimpleNamespace(
        args=SimpleNamespace(world_size=1, should_save=True), world=World(), fingerprint={}
    )
    for epoch in (1, 2, 3):
        append_row(folder.epochs, vouched({"epoch": float(epoch)}))
        (tmp_path / f"checkpoint-{epoch}").mkdir()
        complete(tmp_path / f"checkpoint-{epoch}", context, TrainerState(global_step=epoch), {})
    shutil.copytree(tmp_path / "checkpoint-3", tmp_path / "checkpoint-mine")  # by a person
    whole = [tmp_path / f"checkpoint-{epoch}" for epoch in (2, 3)]
    assert sound_checkpoints(tmp_path) == whole
    rows = folder.epochs.read_text().splitlines(keepends=True)
    folder.epochs.write_text("".join(rows[:2]))
    assert sound_checkpoints(tmp_path) == whole[:1]
    # It is intact: it does not fit the rows.
    told = capsys.readouterr().err
    assert "checkpoint-3 is not used: epochs.jsonl lacks" in told and "damaged" not in told
    folder.epochs.unlink()
    assert sound_checkpoints(tmp_path) == []
    (tmp_path / "checkpoint-4").touch()
    remove_broken(tmp_path)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-mine"]


def test_rows_that_were_changed_are_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    """An edited row would stay in the record, and rows after a missing one lie in disorder."""
    folder = RunFolder(tmp_path)
    context: Any = SimpleNamespace(
        args=SimpleNamespace(world_size=1, should_save=True), world=World(), fingerprint={}
    )
    for epoch in (1, 2, 3):
        append_row(folder.epochs, vouched({"epoch": float(epoch), "accuracy": 0.25}))
    (tmp_path / "checkpoint-3").mkdir()
    complete(tmp_path / "checkpoint-3", context, TrainerState(global_step=3), {})
    append_row(
        folder.epochs, vouched({"epoch": 4.0, "accuracy": 0.25})
    )  # killed before its checkpoint
    whole = [tmp_path / "checkpoint-3"]
    assert usable_checkpoint(tmp_path, World()) == whole[0]
    rows = folder.epochs.read_text().splitlines(keepends=True)
    edited = rows[1].replace("0.25", "0.9")
    since = "it was when checkpoint-3 was written"
    for number, changed, then in (
        (2, [rows[0], edited, *rows[2:]], "it was written"), (2, [rows[0], *rows[2:]], since),
        (2, [rows[0], edited], "it was written"), (1, ['{"ep', *rows[1:]], since),
    ):  # fmt: skip
        folder.epochs.write_text("".join(changed))
        with pytest.raises(UserError) as refused:
            usable_checkpoint(tmp_path, World())
        assert str(refused.value) == (
            f"{folder.epochs}: row {number} is not as {then}: "
            "restore the file, or use --rerun to start afresh; the old record is kept aside"
        )
        assert folder.epochs.read_text() == "".join(changed) and whole[0].exists()
    # A copy of the folder says when the checkpoint was complete, though its files are younger.
    copy = shutil.copytree(tmp_path, tmp_path.with_name("copy"), copy_function=shutil.copy)
    times = [
        cast(Any, Context.opened).fget(SimpleNamespace(checkpoint=at, wall_s=0.0, launch=None))
        for at in (whole[0], copy / whole[0].name)
    ]
    assert times[0].counted_unix == times[1].counted_unix > 0
    folder.epochs.write_text("".join(rows) + '{"epo')  # torn by the kill
    assert sound_checkpoints(tmp_path) == whole


@pytest.mark.process
@pytest.mark.parametrize(("count", "more"), [(1, []), (2, []), (1, ["--save", "none"])])
def test_a_row_that_was_edited_between_kill_and_restart_is_refused(
    count: int, more: list[str], tmp_path: Path
) -> None:
    """Also where no checkpoint was written after it."""
    argv = [*(SHORT if more else ARGV), *more, "--o", str(tmp_path)]
    broken_off(count, argv, 11, "kill", "vit")
    folder = only_run(tmp_path)
    written = folder.epochs.read_text()
    first, rest = written.split("\n", 1)
    edited = json.dumps(json.loads(first) | {"accuracy": 1.0})
    folder.epochs.write_text(f"{edited}\n{rest}")
    done = script("vit", *argv, count=count)
    assert done.code == 2, done.err
    assert done.err.count("row 1 is not as it was written: restore") == 1
    assert "Traceback" not in done.err and folder.outcome() != "finished"
    folder.epochs.write_text(written)
    assert script("vit", *argv, count=count).code == 0
    assert recorded(folder).problem is None and len(recorded(folder).epochs) == 3


@pytest.mark.process
def test_rows_that_were_lost_are_made_again(tmp_path: Path, whole: Whole) -> None:
    argv = [*ARGV, "--o", str(tmp_path)]
    shutil.copytree(whole("vit", 1, ARGV).path.parents[2], tmp_path, dirs_exist_ok=True)
    folder = only_run(tmp_path)
    for file in (folder.epochs, folder.summary):
        file.unlink()
    assert recorded(folder).problem is None
    done = script("vit", *argv)
    assert done.code == 0 and "training starts from the beginning" in done.err
    assert_same_training(folder, whole("vit", 1, ARGV))


def test_a_checkpoint_without_checksums_is_not_believed(tmp_path: Path) -> None:
    (checkpoint,) = checkpoints(tmp_path, {10: None})
    (checkpoint / "complete.json").write_text('{"position": {"update": 10}}')
    with pytest.raises(RuntimeError, match=r"complete\.json has no checksum"):
        require_sound(checkpoint, World())


@pytest.mark.process
@pytest.mark.parametrize("count", [1, 2])
def test_a_run_continues_from_the_one_before(count: int, tmp_path: Path, whole: Whole) -> None:
    argv = [*ARGV, "--o", str(tmp_path)]
    broken_off(count, argv, 11, "kill", "vit")
    folder = only_run(tmp_path)
    assert {p.name for p in folder.path.glob("checkpoint-*")} == {"checkpoint-8", "checkpoint-9"}
    plant("one bit", folder.path / "checkpoint-9" / "model.safetensors")
    done = script("vit", *argv, count=count)
    assert done.code == 0, done.err
    assert done.err.count("checkpoint-9 is damaged and not used (model.safetensors") == 1
    assert "resumes from update 8" in done.out
    assert_same_training(folder, whole("vit", count, ARGV))


class DamageBest(TrainerCallback):
    """While the last epoch is trained, a bit of the best checkpoint changes."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and state.epoch > 1.5:
            best = Path(state.best_model_checkpoint)
            plant("one bit", best / "model.safetensors")


def ends_with_the_best(folder: str) -> str:
    flags = ("--save=best", "--epochs=3", "--lr=1e-12")  # no epoch is better than the first
    trainer, run = ours(folder, Net(), Points(64), Points(8), *flags, callbacks=[DamageBest()])
    with pytest.raises(RuntimeError) as raised, run:
        run.train(trainer)
    return str(raised.value)


@pytest.mark.process
@pytest.mark.parametrize("count", [1, 2])
def test_the_best_weights_are_not_believed_either(count: int, tmp_path: Path) -> None:
    reasons = ranks(count, ends_with_the_best, str(tmp_path), env=CPU)
    for reason in reasons:
        assert "is damaged (model.safetensors has changed since it was written)" in reason
    assert (only_run(tmp_path).read_summary() or {})["outcome"] == "failed"
