"""A disk that refuses, or a folder that is gone, ends a run with one line and no false record."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from harness.core import attempts, process
from harness.core.records import RunFolder, write_json
from harness.core.records.disk import DiskError
from harness.core.records.redact import settings_of
from harness.core.settings import Settings
from harness.read.records.recorded import recorded
from harness.train.run.checkpoints import require_space
from harness.train.run.failures import outcome_of
from harness.train.run.start import remove_log_folder
from tests.support.broken_runs import SHORT, attempts_of, only_run
from tests.support.ranks import ran, script
from tests.support.toys import CPU, Net, Points, ours, started, trainer_of

pytestmark = pytest.mark.process


# What a library may put into the text of an error.
PRIVATE = {
    "home": "/home/ada/data/faces.csv",
    "account": "/scratch/ada-l/faces.csv",
    "host": f"{socket.gethostname()}:29500",
    "url": "https://ada:hunter2@example.org/faces.csv",
    "token": "hf_abcdefghijklmnopqrstuvwxyz",
    "CUDA out of memory": "at /home/ada/x",
}


OUTSIDE = "outside training steps: if in an evaluation, try a smaller --eval_batch"
OTHERWISE = ("nothing", "removed at the end")
IN_EVALUATION = ("oom in evaluation", "kill in evaluation")


class Plant(TrainerCallback):
    """Once this update is made, the folder is removed, or the disk refuses."""

    def __init__(self, how: str, folder: RunFolder) -> None:
        self.how, self.folder = how, folder

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.how == "oom in evaluation":
            raise MemoryError("planted")
        if self.how == "kill in evaluation":
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != 4 or self.how in (*OTHERWISE, *IN_EVALUATION):
            return
        if self.how == "unfit":
            raise RuntimeError("aten.mm: got mixed torch.Tensor and DTensor")
        if self.how in PRIVATE:
            raise RuntimeError(f"{self.how}: {' '.join(PRIVATE.values())}")
        if self.how == "removed":
            shutil.rmtree(self.folder.path)
            return
        number = getattr(errno, self.how)

        def refuse(file: int) -> None:
            # What is open already is never forbidden: that comes with the name of a file.
            name = (os.readlink(f"/proc/self/fd/{file}"),) if self.how == "EACCES" else ()
            raise OSError(number, os.strerror(number), *name)

        os.fsync = refuse


def remove_before_the_summary(folder: RunFolder) -> None:
    write_summary = attempts.write_summary

    def removed_first(*args: Any) -> None:
        attempts.write_summary = write_summary
        shutil.rmtree(folder.path)
        write_summary(*args)

    attempts.write_summary = removed_first


def train(folder: str, how: str, *flags: str) -> None:
    trainer, run = ours(folder, Net(), Points(64), Points(8), "--save=last", *flags)
    trainer.add_callback(Plant(how, run.context.folder))
    if how == "removed at the end":
        remove_before_the_summary(run.context.folder)
    with run:
        run.train(trainer)


@pytest.mark.parametrize(("how", "words"), [
    ("ENOSPC", "no space on"), ("EROFS", "nothing can be written to the read-only"),
    ("EACCES", "no permission to write to"), ("EDQUOT", "the quota is used up on"),
    ("EIO", "I/O error on the disk of"),
])  # fmt: skip
@pytest.mark.parametrize("flags", [["--save_steps=5"], []])
def test_what_a_disk_refuses_is_one_line(
    how: str, words: str, flags: list[str], tmp_path: Path
) -> None:
    done = ran(1, train, str(tmp_path), how, *flags, env=CPU)
    assert (done.code, done.err.count("\n")) == (1, 1), done.err
    assert done.err.startswith(f"failed: {words} {tmp_path}/bert/1_1/")
    assert "; it cannot be recorded" in done.err
    assert only_run(tmp_path).outcome() is None


def test_a_model_that_a_strategy_cannot_train_is_a_recorded_failure(tmp_path: Path) -> None:
    """Its first steps show it: the attempt has an end, and the line is one."""
    done = ran(1, train, str(tmp_path), "unfit", env=CPU)
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    folder = only_run(tmp_path)
    _, (end,) = attempts_of(folder)
    reason = "--strategy single: Net calls layers past the hooks"
    assert (end["outcome"], end["update"]) == ("failed", 4) and end["reason"].startswith(reason)
    assert (folder.read_summary() or {})["reason"] == end["reason"]
    assert done.err == f"failed: {end['reason']}; the record is in {folder.path}\n"


def test_no_smaller_batch_is_tried_for_what_an_evaluation_lacks(tmp_path: Path) -> None:
    for _ in range(2):
        done = ran(1, train, str(tmp_path), "oom in evaluation", "--auto_batch", env=CPU)
        assert done.code == 1 and "--per_gpu_batch" not in done.err, done.err
    folder = only_run(tmp_path)
    starts, ends = attempts_of(folder)
    assert [row["per_gpu_batch"] for row in starts] == [4, 4]
    assert [(row["outcome"], row["in_step"]) for row in ends] == [("oom", False)] * 2
    reason = (folder.read_summary() or {})["reason"]
    assert reason == f"planted; {OUTSIDE}"


def test_a_killed_evaluation_is_no_step(tmp_path: Path) -> None:
    """By the position that it reported, as nothing else is left of it."""
    done = ran(1, train, str(tmp_path), "kill in evaluation", "--epochs=2", env=CPU)
    assert done.code == 128 + signal.SIGKILL
    folder = only_run(tmp_path)
    progress = folder.read_progress() or {}
    assert (progress["epoch"], progress["update"], progress["updates"]) == (1, 16, 32)
    assert attempts.may_be_in_step(folder, progress) is False


def test_a_removed_folder_is_no_finished_run(tmp_path: Path) -> None:
    for flags in ([], ["--save_steps=5"]):
        done = ran(1, train, str(tmp_path), "removed", *flags, env=CPU)
        assert (done.code, done.err.count("\n")) == (1, 1), done.err
        assert "was removed while the run was in progress; it cannot be recorded" in done.err
        assert [*tmp_path.glob("bert/1_1/*/settings.json")] == []
        assert [p for p in tmp_path.glob("bert/1_1/*") if ".earlier-" not in p.name] == []


def test_a_folder_that_is_removed_before_the_last_write_is_no_finished_run(
    tmp_path: Path,
) -> None:
    done = ran(1, train, str(tmp_path), "removed at the end", env=CPU)
    assert (done.code, done.err.count("\n")) == (1, 1), done.err
    assert "was removed while the run was in progress; it cannot be recorded" in done.err
    assert [p for p in tmp_path.glob("bert/1_1/*") if ".earlier-" not in p.name] == []
    assert ran(1, train, str(tmp_path), "nothing", env=CPU).code == 0
    assert recorded(only_run(tmp_path)).problem is None
    assert only_run(tmp_path).outcome() == "finished"


@pytest.mark.parametrize("how", ["nothing", "home", "CUDA out of memory"])
def test_no_byte_of_a_record_is_private(how: str, tmp_path: Path) -> None:
    """Of a run that ends well, one that fails, and one that lacks memory."""
    where = {"HOME": "/home/ada", "USER": "ada-l", "LOGNAME": "ada-l", "HF_TOKEN": PRIVATE["token"]}
    flags = ["--run_name=my-secret-plan", "--save_steps=2", "--hub_model_id=ada/plan"]
    done = ran(1, train, str(tmp_path), how, *flags, env=CPU | where)
    assert done.code == (0 if how == "nothing" else 1), done.err
    folder = only_run(tmp_path)
    summary = folder.read_summary() or {}
    if "memory" in how:
        assert summary["outcome"] == "oom", summary
        assert str(summary["reason"]).endswith("the same effective batch")
    planted = (*PRIVATE.values(), "/home/ada", "ada-l", "my-secret-plan", "ada/plan", "hunter2")
    for file in (p for p in folder.path.rglob("*") if p.is_file()):
        found = [word for word in planted if word.encode() in file.read_bytes()]
        assert found == [], file.name


def test_the_largest_batch_that_fits_lies_beyond_what_fitted_on_record(tmp_path: Path) -> None:
    some = Settings(script="vit", per_gpu_batch=32, grad_acc=2)

    def beside(
        name: str,
        outcome: str,
        machine: str | None = "cpu",
        batch: int | None = None,
        **changes: Any,
    ) -> None:
        other = RunFolder(tmp_path / name)
        ran_as = replace(some, **changes)
        other.write_settings(settings_of(ran_as))
        write_json(other.environment, {"machine": machine})
        attempts.begin(other, 0, 1, per_gpu_batch=batch or ran_as.per_gpu_batch)
        attempts.end(other, outcome, None, 1.0)
        attempts.write_summary(other, outcome)

    def advice() -> str:
        folder = RunFolder(tmp_path / "own")
        return attempts.with_smaller_batch("oom", "no memory", some, folder).partition("; to")[0]

    beside("of another model", "finished", per_gpu_batch=24, model="vit-tiny")
    beside("larger", "finished", per_gpu_batch=40)
    beside("without dropout", "finished", per_gpu_batch=29, dropout=0.0)
    beside("with Muon", "finished", per_gpu_batch=29, muon=True)
    beside("that lacked memory", "oom", per_gpu_batch=28)
    beside("of another machine", "finished", "gpu", per_gpu_batch=27)
    beside("that took less (--auto_batch)", "finished", batch=10, per_gpu_batch=30)
    write_json(tmp_path / "own" / "environment.json", {"machine": "cpu"})
    RunFolder(tmp_path / "damaged").path.mkdir()
    RunFolder(tmp_path / "damaged").settings.write_text("[")
    assert advice() == "no memory; 10 fitted on record, so the largest that fits is 10 to 31"
    beside("of another seed", "finished", per_gpu_batch=12, seed=9, grad_acc=1)
    older = RunFolder(tmp_path / "of another seed")  # from before there was Muon or LoRA
    known = older.read_settings() or {}
    older.write_settings({name: known[name] for name in known if name not in ("muon", "lora")})
    assert advice().startswith("no memory; 12 fitted on record")
    beside("that fits", "finished", per_gpu_batch=20)
    said = "no memory; 20 fitted on record, so the largest that fits is 20 to 31"
    assert advice() == said
    beside("of an unknown machine", "finished", None, per_gpu_batch=26)
    assert advice() == said
    (tmp_path / "own" / "environment.json").unlink()
    assert advice() == "no memory"


def test_what_to_try_where_memory_lacks(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)

    def advice(outcome: str, reason: str, settings: Settings) -> str:
        return attempts.with_smaller_batch(outcome, reason, settings, folder)

    some = Settings(script="vit", per_gpu_batch=32, grad_acc=2)
    text = advice("oom", "no memory", some)
    assert text == (
        "no memory; to try: --per_gpu_batch 16 --grad_acc 4, which is the same effective batch"
    )
    assert advice("oom", text, some) == text
    odd = replace(some, per_gpu_batch=5)
    assert "--per_gpu_batch 2 --grad_acc 5, which is the same" in advice("oom", "x", odd)
    assert advice("oom", "x", replace(some, per_gpu_batch=1)) == "x"
    assert advice("failed", "x", some) == "x"
    # With --auto_batch: half of what was run last, under the name that was asked for.
    auto = replace(some, per_gpu_batch=6, auto_batch=True)
    assert attempts.batch_to_try(folder, auto) is None

    def lacked(batch: int, in_step: bool | None) -> int | None:
        attempts.begin(folder, 0, 2, 24, None, batch)
        assert attempts.batch_to_try(folder, auto) is None  # as after a kill
        attempts.end(folder, "oom", None, 1.0, per_gpu_batch=batch, in_step=in_step)
        assert attempts.last_batch(folder, auto) == batch
        assert attempts.batch_to_try(folder, some) is None
        return attempts.batch_to_try(folder, auto)

    for batch, then in ((6, 3), (3, 1), (1, None)):
        assert lacked(batch, True) == lacked(batch, None) == then
    assert advice("oom", "x", auto) == "x"
    # What an evaluation, a checkpoint or the model itself lack, no batch gives.
    assert lacked(6, False) is None
    assert advice("oom", "x", auto) == f"x; {OUTSIDE}"
    attempts.end(folder, "oom", None, 1.0, begun=False, per_gpu_batch=6)
    assert attempts.batch_to_try(folder, auto) is None and advice("oom", "x", auto) == "x"


@pytest.mark.parametrize("limited", [True, False])
def test_an_error_without_a_reason_is_a_lack_of_memory_where_the_shell_limits_it(
    limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "limits_memory", lambda: limited)
    for unsaid in (
        "error return without exception set",
        "f returned NULL without setting an exception",
    ):
        reason = f"SystemError: {unsaid}"
        told = ("oom", f"{reason}: probably out of memory, as ulimit -v is set")
        assert outcome_of(SystemError(unsaid)) == (told if limited else ("failed", reason))
    other = "bad argument to internal function"
    assert outcome_of(SystemError(other)) == ("failed", f"SystemError: {other}")


def test_reasons_name_memory_and_hide_homes(monkeypatch: pytest.MonkeyPatch) -> None:
    one_dnn = "could not create a primitive"
    assert outcome_of(RuntimeError(one_dnn)) == ("oom", f"out of memory: {one_dnn}")
    assert outcome_of(RuntimeError("std::bad_alloc"))[0] == "oom"
    for text in (
        "CUDA error: out of memory",
        "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: not enough memory",
        "unable to mmap 4096 bytes: Cannot allocate memory (12)",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        f"NCCL error in: {'x' * 300} ncclUnhandledCudaError: Cuda failure 2 'out of memory'",
    ):
        assert outcome_of(RuntimeError(text))[0] == "oom"
    unsupported = "could not create a primitive descriptor for a matmul primitive"
    assert outcome_of(RuntimeError(unsupported)) == ("failed", f"RuntimeError: {unsupported}")
    monkeypatch.setenv("HOME", "/home/ada")
    reason = "FileNotFoundError: [Errno 2] No such file or directory: '~/data/images.csv'"
    error = FileNotFoundError(
        errno.ENOENT, "No such file or directory", "/home/ada/data/images.csv"
    )
    assert outcome_of(error) == ("failed", reason)
    assert outcome_of(DiskError(errno.ENOSPC, "no space on /home/ada/out")) == (
        "failed", "no space on ~/out",
    )  # fmt: skip


@pytest.mark.parametrize(("free", "before", "refused"), [
    (1000, 0, "1.0 MB, and 0.0 MB"), (2 * 10**6, 0, None),
    (2 * 10**6, 3 * 10**6, "3.0 MB, and 2.0 MB"), (4 * 10**6, 3 * 10**6, None),
])  # fmt: skip
def test_there_is_room_for_a_checkpoint_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, before: int, refused: str | None
) -> None:
    model = torch.nn.Linear(500, 500, bias=False)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
    if before:
        (tmp_path / "checkpoint-4").mkdir()
        (tmp_path / "checkpoint-4" / "complete.json").touch()
        (tmp_path / "checkpoint-4" / "weights").write_bytes(bytes(before))
    if refused is None:
        require_space(tmp_path / "checkpoint-8", model)
        return
    with pytest.raises(DiskError, match=f"^no space on {tmp_path}: .* {refused} are free$"):
        require_space(tmp_path / "checkpoint-8", model)


class Ends(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.process_index == 1:
            raise RuntimeError("the true reason")


def behind(folder: str) -> None:
    if os.environ["RANK"] == "1":
        now = time.time
        time.time = lambda: now() - 3600
    run = started(folder, "--setup=1_2", "--hang_after=0")
    with run:
        run.train(trainer_of(run, Net(), Points(16), Points(8), callbacks=[Ends()]))


def test_the_reason_is_that_of_the_rank_whose_clock_is_behind(tmp_path: Path) -> None:
    assert ran(2, behind, str(tmp_path), env=CPU).code == 1
    summary = only_run(tmp_path).read_summary() or {}
    assert summary["reason"] == "RuntimeError: the true reason (rank 1)"


def refused_to_a_library(folder: str) -> None:
    with started(folder) as run:
        raise OSError(errno.ENOSPC, "No space left", str(run.context.folder.path / "file"))


def reads_what_is_not_there(folder: str) -> None:
    with started(folder) as run:
        path = run.context.folder.path
        path.mkdir(parents=True, exist_ok=True)
        (path / "of mine").read_text()


def test_a_file_that_is_missing_is_named_and_no_disk(tmp_path: Path) -> None:
    done = ran(1, reads_what_is_not_there, str(tmp_path), env=CPU)
    summary = only_run(tmp_path).read_summary() or {}
    assert done.code == 1 and summary["reason"].startswith("FileNotFoundError: ")
    assert "of mine" in summary["reason"]


def refused_a_removal(folder: str) -> None:
    trainer, run = ours(folder, Net(), Points(16), Points(8))
    with run:
        remove, progress = Path.unlink, run.context.folder.progress

        def refused(path: Path, missing_ok: bool = False) -> None:
            if path == progress:
                raise OSError(errno.EROFS, "Read-only", str(path))
            remove(path, missing_ok=missing_ok)

        Path.unlink = refused  # type: ignore[method-assign]
        run.train(trainer)


def test_what_a_disk_refuses_to_whomever_is_one_line(tmp_path: Path) -> None:
    done = ran(1, refused_to_a_library, str(tmp_path), env=CPU)
    path = only_run(tmp_path).path
    told = f"failed: no space on {path}; the record is in {path}\n"
    assert (done.code, done.err) == (1, told)


def test_a_finished_run_whose_progress_cannot_be_removed_is_finished(tmp_path: Path) -> None:
    done = ran(1, refused_a_removal, str(tmp_path), env=CPU)
    assert (done.code, done.err) == (0, "")
    assert only_run(tmp_path).outcome() == "finished"
    assert recorded(only_run(tmp_path)).problem is None


@pytest.mark.root
@pytest.mark.parametrize("count", [1, 2])
def test_a_full_disk_is_the_recorded_reason(count: int, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    # Room for the records and one checkpoint, but not for two.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=True)
    try:
        done = script("vit", *SHORT, "--o", str(disk), count=count)
        assert done.code == 1
        assert done.err.count("\n") == 1, done.err
        folder = only_run(disk)
        summary = folder.read_summary() or {}
        assert summary["outcome"] == "failed"
        assert summary["reason"].startswith(f"no space on {folder.path}")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_the_folders_of_torchrun_are_removed_while_they_are_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(name: str) -> Path:
        own = tmp_path / name / "run_1" / "attempt_0" / "0"
        own.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(own / "error.json"))
        return own

    own = begun("torchelastic_a")
    (own.parent / "1").mkdir()
    remove_log_folder()
    assert not own.exists() and (own.parent / "1").is_dir()  # which the other rank removes
    (own.parent / "1").rmdir()
    begun("torchelastic_a")
    remove_log_folder()
    assert not (tmp_path / "torchelastic_a").exists() and tmp_path.is_dir()
    own = begun("torchelastic_b")
    (own / "stdout.log").touch()  # torchrun --redirects 3
    remove_log_folder()
    kept = begun("logs of the user")
    remove_log_folder()
    assert own.is_dir() and kept.is_dir()
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    remove_log_folder()
