"""Prepared data are used as they were written, or made again."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.core.records.disk import DiskError, sync
from harness.core.settings import NodeError, UserError
from harness.core.topology import World
from harness.train.data import cache
from harness.train.data.cache import cached, reserve
from harness.train.manifest import damage, write_manifest
from harness.train.session import OtherFailed
from tests.support.broken_runs import only_run, own_node
from tests.support.damage import KINDS, plant
from tests.support.ranks import ran, run_script, script

NAMES = ("pixels.npy", "inner/labels.npy", "key.json")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path / "harness"


def build(draft: Path) -> None:
    (draft / "inner").mkdir()
    np.save(draft / "pixels.npy", np.arange(5000))
    np.save(draft / "inner" / "labels.npy", np.arange(50) % 7)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in NAMES}


def test_what_killed_processes_left_is_removed_after_a_day(root: Path) -> None:
    for name, at_work in (("old", False), ("busy", True)):
        file = root / f".draft-{name}" / "inner" / "pixels.npy"
        file.parent.mkdir(parents=True)
        file.touch()
        for path in (file.parent.parent, file.parent, *([] if at_work else [file])):
            os.utime(path, (0, 0))
    cached({"of": 1}, build)
    assert {path.name for path in root.glob(".draft-*")} == {".draft-busy"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_entry_is_made_again(
    kind: str, name: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = cached({"kind": kind}, build)
    whole = contents(folder)
    plant(kind, folder / name)
    assert cached({"kind": kind}, build) == folder
    assert contents(folder) == whole
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "is damaged and prepared again" in told and name in told
    assert list(root.iterdir()) == [folder]  # neither a draft nor what was damaged is left

    def unused(draft: Path) -> None:
        raise AssertionError("it was whole")

    assert cached({"kind": kind}, unused) == folder and capsys.readouterr().err == ""


def test_an_entry_whose_manifest_is_not_as_declared_is_made_again(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = cached({"kind": "old"}, build)
    write_manifest(folder / "key.json", {"format": "seven"})
    assert cached({"kind": "old"}, build) == folder and damage(folder / "key.json") is None
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "key.json of another version: format is 'seven'" in told


def test_many_processes_meet_a_damaged_entry(root: Path) -> None:
    def use(number: int) -> int:
        folder = cached({"shared": True}, build)
        return int(
            np.load(folder / "pixels.npy").sum() + np.load(folder / "inner/labels.npy").sum()
        )

    expected = use(0)
    with ThreadPoolExecutor(8) as pool:  # a lock on a folder is that of who has opened it
        for kind in KINDS * 3:
            plant(kind, cached({"shared": True}, build) / "pixels.npy")
            assert set(pool.map(use, range(16))) == {expected}
    assert len(list(root.iterdir())) == 1


def test_other_ranks_of_a_node_compare_lengths(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = cached({}, build)
    plant("one bit", folder / "pixels.npy")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    assert cached({}, build) == folder and capsys.readouterr().err == ""
    plant("truncated", folder / "pixels.npy")
    assert cached({}, build) == folder and "bytes instead of" in capsys.readouterr().err


def refusing(number: int) -> Any:
    def refuse(*args: int) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


def test_a_file_system_that_can_neither_sync_folders_nor_reserve_is_used(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, refuse = os.fsync, refusing(errno.EINVAL)

    def of_files(file: int) -> None:
        (refuse if stat.S_ISDIR(os.fstat(file).st_mode) else fsync)(file)

    monkeypatch.setattr(os, "fsync", of_files)
    folder = cached({}, build)
    assert damage(folder / "key.json") is None
    for number in (errno.EOPNOTSUPP, errno.EINVAL):
        monkeypatch.setattr(os, "posix_fallocate", refusing(number), raising=False)
        reserve(folder / "pixels.npy")
    for name, call in (("posix_fallocate", reserve), ("fsync", sync)):
        monkeypatch.setattr(os, name, refusing(errno.ENOSPC), raising=False)
        with pytest.raises(OSError, match="No space left"):
            call(folder / "pixels.npy")


@pytest.mark.parametrize(
    ("fails", "error", "kinds", "loaded"),
    [
        (None, None, [None] * 4, [0, 1, 2, 3]),
        (0, UserError, [UserError] * 4, []),
        (2, UserError, [UserError, UserError, NodeError, UserError], [0]),
        (0, KeyError, [KeyError, *[OtherFailed] * 3], []),
        (2, KeyError, [OtherFailed, OtherFailed, KeyError, OtherFailed], [0]),
        (2, DiskError, [OtherFailed, OtherFailed, DiskError, OtherFailed], [0]),
    ],
)
def test_what_the_first_rank_of_a_node_fails_at_all_ranks_hear(
    fails: int | None, error: Any, kinds: list[Any], loaded: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Two nodes without a shared disk, of two ranks each: here threads, whose every gather ends."""
    worlds = [World(2, 2, rank=rank, local_rank=rank % 2, launched=True) for rank in range(4)]
    told, meet, own = [None] * 4, threading.Barrier(4, timeout=10), threading.local()
    did: list[int] = []

    def gather(value: Any) -> list[Any]:
        told[own.rank] = value
        meet.wait()
        everyone = [*told]
        meet.wait()
        return everyone

    monkeypatch.setattr(cache.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(cache, "gather", gather)

    def load(world: World) -> str | None:
        own.rank = world.rank
        try:
            with cache.in_turn(world):
                if world.rank == fails:
                    raise error(*([errno.EIO] if error is DiskError else []), "no such data set")
                did.append(world.rank)
        except (KeyError, OSError, OtherFailed, UserError) as ending:
            ended[world.rank] = type(ending)
            return str(ending)
        return None

    ended: list[Any] = [None] * 4
    with ThreadPoolExecutor(4) as pool:
        said = [*pool.map(load, worlds)]
    assert ended == kinds and sorted(did) == loaded
    assert fails is None or "no such data set" in str(said[fails])
    assert (said[0] == "the first rank of another node could not load it, and says why there") == (
        fails == 2 and error is UserError
    )
    told = {KeyError: "KeyError: 'no such data set'", DiskError: "no such data set"}
    for rank, kind in enumerate(kinds):
        assert kind is not OtherFailed or said[rank] == f"{told[error]} (rank {fails})"


def crash(folder: str, argv: list[str]) -> int:
    """vit.py, each rank with a disk of its own, of which the second is broken."""
    import vit

    if own_node(folder).rank == 1:
        vit.load_images = broken_reader
    return run_script("vit", argv, ".")


def broken_reader(*_: Any) -> None:
    raise RuntimeError("planted")


@pytest.mark.process
def test_a_crash_on_another_disk_is_the_recorded_reason(tmp_path: Path) -> None:
    argv = ["--tiny", "--train_size", "96", "--test_size", "20", "--epochs", "1", "--o", "out"]
    done = ran(3, crash, str(tmp_path), argv)
    assert done.code == 1 and "failed: RuntimeError: planted (rank 1); the record is" in done.err
    summary = only_run(tmp_path / "0" / "out").read_summary() or {}
    assert (summary["outcome"], summary["reason"]) == ("failed", "RuntimeError: planted (rank 1)")


def test_folders_have_the_modes_of_the_user(root: Path) -> None:
    before = os.umask(0o002)
    try:
        folder = cached({}, build)
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(p.stat().st_mode) for p in (root, folder, folder / "key.json")]
    assert modes == [0o775, 0o775, 0o664]


def test_a_full_disk_is_one_line(root: Path) -> None:
    def fill(draft: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DiskError, match=f"^no space on {root}$"):
        cached({}, fill)
    assert list(root.iterdir()) == []

    def read(draft: Path) -> None:
        (draft.parent.parent / "images" / "of the user.png").read_bytes()

    with pytest.raises(FileNotFoundError, match="of the user"):  # not the fault of the cache
        cached({}, read)


@pytest.mark.root
@pytest.mark.process
def test_images_on_a_full_disk_end_with_a_line_and_a_record(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], check=True)
    try:
        np.lib.format.open_memmap(disk / "a.npy", "w+", np.uint8, (2**23,))  # which takes no room
        with pytest.raises(OSError, match="No space left"):
            reserve(disk / "a.npy")
        (disk / "a.npy").unlink()
        argv = ["--tiny", "--image_size", "32", "--epochs", "1", "--o", str(tmp_path / "out")]
        done = script("vit", *argv, env={"HF_HOME": str(disk)})
        assert (done.code, done.err.count("\n")) == (1, 1), done.err
        summary = only_run(tmp_path / "out").read_summary() or {}
        assert (summary["outcome"], summary["reason"]) == ("failed", f"no space on {disk}/harness")
        assert [*disk.rglob("*.npy")] == []
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
