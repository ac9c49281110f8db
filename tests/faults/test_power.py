"""The power goes between any two writes: what is used afterwards is whole, or made again."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerState

from harness.core.records import RunFolder, append_row, read_json, write_json
from harness.core.topology import World
from harness.train.data import cache
from harness.train.manifest import damage
from harness.train.run.checkpoints import complete, sound_checkpoints
from tests.support.damage import plant
from tests.support.power import disks_after, recorded_writes

PIXELS, LABELS = b"pixels" * 500, b"labels" * 20


def build(draft: Path) -> None:
    (draft / "pixels.npy").write_bytes(PIXELS)
    (draft / "inner").mkdir()
    (draft / "inner" / "labels").write_bytes(LABELS)


@pytest.mark.parametrize("before", ["nothing", "damaged"])
def test_a_cache_entry(before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, built = tmp_path / "cache", list[Path]()

    def counted(draft: Path) -> None:
        built.append(draft)
        build(draft)

    def entry(root: Path) -> bool:
        """Made or found; whether it was found."""
        built.clear()
        monkeypatch.setattr(cache, "cache_root", lambda: root)
        folder = cache.cached({"data": 1}, counted)
        assert (folder / "pixels.npy").read_bytes() == PIXELS
        assert (folder / "inner" / "labels").read_bytes() == LABELS
        return not built

    root.mkdir()
    if before == "damaged":
        entry(root)
        plant("one bit", next(root.glob("*/pixels.npy")))
    with recorded_writes(root, monkeypatch) as disk:
        assert not entry(root)
    assert len(disk.moments) > 12
    for found, at_the_end in disks_after(disk, tmp_path / "found"):
        assert entry(found) or not at_the_end, found
        assert entry(found)  # and the next run finds it


def checkpoint(folder: Path, update: int) -> dict[str, bytes]:
    return {
        name: f"{name} at {update} ".encode() * 50
        for name in ("model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json")
    }


def save(folder: Path, update: int) -> None:
    """As the Trainer and what follows it do."""
    context: Any = SimpleNamespace(
        args=SimpleNamespace(world_size=1, should_save=True), world=World(), fingerprint={}
    )
    path = folder / f"checkpoint-{update}"
    path.mkdir()
    for name, content in checkpoint(folder, update).items():
        (path / name).write_bytes(content)
    complete(path, context, TrainerState(global_step=update), {})


def test_a_power_cut_leaves_a_sound_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    save(run, 4)
    save(run, 8)
    with recorded_writes(run, monkeypatch) as disk:
        save(run, 12)
    assert len(disk.moments) > 15
    for found, at_the_end in disks_after(disk, tmp_path / "found"):
        last = sound_checkpoints(found)[-1]
        update = int(last.name.split("-")[1])
        assert update == 12 or (update == 8 and not at_the_end), found
        for name, content in checkpoint(found, update).items():
            assert (last / name).read_bytes() == content, (found, name)
        assert damage(last / "complete.json") is None


def test_rows_and_summaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has returned is there, in a folder that is new, too; what has not is whole or absent."""
    disk_root = tmp_path / "disk"
    disk_root.mkdir()
    rows = [{"epoch": n, "text": "x" * 50} for n in (1, 2, 3)]
    returned: list[int] = []
    with recorded_writes(disk_root, monkeypatch) as disk:
        folder = RunFolder(disk_root / "vit" / "1_1" / "run")
        for row in rows:
            append_row(folder.epochs, row)
            returned.append(len(disk.moments))
        write_json(folder.summary, {"epochs_done": 3})
    for found, at_the_end in disks_after(disk, tmp_path / "found"):
        moment = int(found.name.split("_")[0])
        folder = RunFolder(found / "vit" / "1_1" / "run")
        read, _ = folder.read_epochs()
        assert read == rows[: len(read)]  # type: ignore[comparison-overlap]
        assert len(read) >= sum(at <= moment for at in returned), found
        assert read_json(folder.summary) in ({"epochs_done": 3}, None)
        assert folder.summary.exists() == (read_json(folder.summary) is not None)
        assert folder.summary.exists() or not at_the_end, found
        append_row(folder.epochs, {"epoch": 9})  # a torn row costs none that follows
        assert folder.read_epochs()[0] == [*read, {"epoch": 9}]


def test_the_model_of_the_disk_is_strict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not sync loses."""
    root = tmp_path / "disk"
    root.mkdir()
    with recorded_writes(root, monkeypatch) as disk:
        (root / "a").write_text("written")
        (root / "a").rename(root / "b")
    ends = {
        tuple((path.name, path.read_bytes()) for path in found.iterdir())
        for found, at_the_end in disks_after(disk, tmp_path / "found")
        if at_the_end
    }
    assert ends == {(), *((("b", content),) for content in (b"", b"written", bytes(7), b"wri"))}
    assert os.fsync is not disk.sync
