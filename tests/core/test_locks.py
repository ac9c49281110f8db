"""Locks end with their holder, leave nothing behind, and never have two holders."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.core.records import append_row, locks, read_rows
from harness.core.records.disk import DiskError
from harness.core.records.locks import Lock
from harness.core.settings import UserError
from tests.support.sweeps import ROOT


@contextmanager
def holding(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process, which holds this lock until it is killed."""
    code = (
        "import sys, time; from pathlib import Path; from harness.core.records.locks import Lock; "
        "assert Lock(Path(sys.argv[1])).take(); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, cwd=ROOT
    ) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
            yield holder
        finally:
            holder.kill()


@pytest.mark.process
def test_a_lock_dies_with_its_holder(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "a" / "lock")
    with holding(lock.path) as holder:
        assert not lock.take() and lock.holder() == f"process {holder.pid}"
        holder.kill()
        assert lock.take(wait_s=5)
    # Of a lock that was given back nothing is left, and one on a removed file is none.
    (tmp_path / "a").mkdir(exist_ok=True)
    again = Lock(tmp_path / "b" / "c" / "lock")
    assert again.take() and not Lock(again.path).take()
    again.path.write_text("")
    assert again.holder() == "another process"
    again.path.unlink()
    assert Lock(again.path).take()
    lock.release()
    assert not lock.path.exists()


def test_a_lock_on_another_file_system_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of two file systems may have the same inode number."""
    (path := tmp_path / "lock").touch()
    at, content = path.stat(), dict[str, str]()
    monkeypatch.setattr(
        locks, "_proc", lambda name: content.get(name.rpartition("/")[0] or name, "")
    )
    of_stat = f"{os.major(at.st_dev):02x}:{os.minor(at.st_dev):02x}:{at.st_ino}"

    def is_held(name: str) -> bool:
        other = "1: POSIX  ADVISORY  WRITE 12 00:2b:7 0 EOF\n"
        content["locks"] = f"{other}2: FLOCK  ADVISORY  WRITE 13 {name} 0 EOF\n"
        return locks.is_held(path)

    # The kernel says nothing more: device and inode are those of stat.
    assert is_held(of_stat)
    assert not is_held(f"ff:ff:{at.st_ino}") and not is_held(f"{of_stat}1")
    assert not locks.is_held(tmp_path / "none")
    # On btrfs and overlayfs the lock has the device of the mount, and perhaps another inode.
    content["self/fdinfo"] = "pos:\t0\nflags:\t010000000\nmnt_id:\t31\nino:\t77\n"
    content["self"] = "27 1 254:0 / / rw - ext4 /dev/vda rw\n31 27 0:43 / /data rw - btrfs x rw\n"
    assert is_held("00:2b:77")
    assert not is_held(of_stat) and not is_held("fe:00:77") and not is_held("00:2b:7")
    content["locks"] = "1: -> FLOCK  ADVISORY  WRITE 13 00:2b:77 0 EOF\n"  # one that waits
    assert not locks.is_held(path)
    del content["locks"]
    assert not locks.is_held(path)


@pytest.mark.process
def test_another_process_with_the_same_number_is_another(tmp_path: Path) -> None:
    """Two containers on one volume: each calls its first process 1."""
    path = tmp_path / "lock"
    with holding(path):
        path.write_text(f"{os.getpid()}\n")
        assert not Lock(path).take_again()
    # What this process holds it may take again, until it has given it back, by any name.
    held, link = Lock(path), tmp_path / "link"
    link.symlink_to(tmp_path)
    assert held.take(wait_s=5) and Lock(link / "lock").take_again()
    held.release()
    other = Lock(path)
    assert other.take_again() and other.file is not None
    other.release()


@pytest.mark.process
def test_locks_leave_nothing_and_never_two_holders(tmp_path: Path) -> None:
    """Many processes take and give back one lock, whose file and folder come and go."""
    code = (
        "import sys; from pathlib import Path; from harness.core.records.locks import Lock\n"
        "count = Path(sys.argv[2])\n"
        "for _ in range(150):\n"
        "    lock = Lock(Path(sys.argv[1]))\n"
        "    assert lock.take(wait_s=30)\n"
        "    number = int(count.read_text()); count.write_text(str(number + 1))\n"
        "    lock.release()\n"
    )
    count, path = tmp_path / "count", tmp_path / "locks" / "inner" / "lock"
    count.write_text("0")
    command = [sys.executable, "-c", code, str(path), str(count)]
    together = [subprocess.Popen(command, cwd=ROOT) for _ in range(3)]
    assert [process.wait(timeout=60) for process in together] == [0, 0, 0]
    assert count.read_text() == "450"
    assert not path.parent.exists()


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(file: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("harness.core.records.locks.fcntl.flock", without)
    assert Lock(tmp_path / "lock").take()
    assert "file system without locks (Operation not supported)" in capsys.readouterr().err


def test_the_lock_of_another_user_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("harness.core.records.locks.os.open", refuse)
    with pytest.raises(UserError, match=r"lock cannot be locked \(Permission denied\): the folder"):
        Lock(tmp_path / "lock").take()


@pytest.mark.parametrize("odd", ["file", "link"])
def test_what_is_no_folder_is_not_waited_for(odd: str, tmp_path: Path) -> None:
    """It was said to be measured by another process."""
    at = tmp_path / "out"
    at.touch() if odd == "file" else at.symlink_to("nowhere")
    with pytest.raises(UserError, match=f"cannot be locked: {at} is not a folder"):
        Lock(at / "lock").take(wait_s=30)
    with pytest.raises(UserError, match=f"cannot be locked: {at} is not a folder"):
        Lock(at / "below" / "lock").take(wait_s=30)


def test_a_full_disk_is_no_reason_against_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("harness.core.records.locks.os.pwrite", full)
    lock = Lock(tmp_path / "lock")
    assert lock.take() and lock.holder() == "another process"
    lock.release()


GROUP, ADA, BOB = 4242, 4243, 4244


def as_user(number: int, umask: int, function: Callable[[Path], None], folder: Path) -> int:
    """The exit code of a function that this user calls, as a member of the group alone."""

    def call() -> None:
        os.setgroups([GROUP])
        os.setgid(GROUP)
        os.setuid(number)
        os.umask(umask)
        function(folder)
        os._exit(0)  # a lock is left behind

    process = multiprocessing.get_context("fork").Process(target=call)
    process.start()
    process.join()
    return process.exitcode or 0


def record(folder: Path) -> None:
    assert Lock(folder / "run" / ".locks" / "run").take()
    append_row(folder / "run" / "rows.jsonl", {"by": os.getuid()})


def refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"Permission denied\): .* may belong to another user$"):
        Lock(folder / "run" / ".locks" / "run").take()
    with pytest.raises(DiskError, match=f"^no permission to write to {folder / 'run'}$"):
        append_row(folder / "run" / "rows.jsonl", {"by": os.getuid()})


@pytest.mark.process
@pytest.mark.root
@pytest.mark.parametrize(("umask", "second"), [(0o002, record), (0o022, refused)])
def test_two_users_share_a_folder_as_their_umask_says(
    umask: int, second: Callable[[Path], None], tmp_path: Path
) -> None:
    ours = [folder for folder in tmp_path.parents if folder.name.startswith(("pytest-", "popen-"))]
    for folder in (tmp_path, *ours):
        folder.chmod(0o755)
    folder = tmp_path / "shared"
    folder.mkdir()
    os.chown(folder, ADA, GROUP)
    folder.chmod(0o2775)
    assert as_user(ADA, umask, record, folder) == 0
    assert as_user(BOB, umask, second, folder) == 0
    users = [row["by"] for row in read_rows(folder / "run" / "rows.jsonl")[0]]
    assert users == ([ADA, BOB] if second is record else [ADA])
