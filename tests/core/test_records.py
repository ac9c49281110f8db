"""Records survive what happens to processes: they are killed while they write."""

from __future__ import annotations

import errno
import gc
import getpass
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from harness.core import attempts
from harness.core.command_line import parse
from harness.core.records import (
    ASIDE,
    FINISHED,
    RunFolder,
    append_row,
    disk,
    find_runs,
    plain,
    read_json,
    read_rows,
    redact,
    rows_in,
    total,
    without_collecting,
    write_json,
)
from harness.core.records.disk import DiskError, writing_to
from harness.core.records.redact import redact_logs, redacted, redacted_command, settings_of
from harness.core.settings import UserError

# The records need the standard library only, so these processes are there in a moment.
OVERWRITE = """
import sys
from pathlib import Path
from harness.core.records import write_json
path, number = Path(sys.argv[1]), 0
print("ready", flush=True)
while True:
    number += 1
    write_json(path, {"first": number, "filling": ["x" * 50] * 4000, "last": number})
"""
APPEND = """
import sys
from pathlib import Path
from harness.core.records import append_row
sys.stdin.readline()
for number in range(150):
    row = {"writer": sys.argv[2], "number": number, "filling": "y" * (number * 97 % 20000)}
    append_row(Path(sys.argv[1]), row)
"""


def writer(root: Path, code: str, *argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *argv],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_names(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    names = ["settings.json", "environment.json", "attempts.jsonl", "epochs.jsonl", "summary.json"]
    found = [run.settings, run.environment, run.attempts, run.epochs, run.summary]
    assert found == [tmp_path / name for name in names]
    assert run.progress == tmp_path / "progress.json"
    assert run.rank(3) == tmp_path / "ranks" / "rank_3.jsonl"
    assert run.failure(1) == tmp_path / "ranks" / "failure_1.json"
    assert len({*found, run.progress, run.rank(0), run.rank(1), run.failure(0)}) == 9


@pytest.mark.parametrize("cut", [1, 5, -2, -1])
def test_a_row_cut_off_costs_only_itself(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "ranks" / "rank_0.jsonl"  # the folder is made when it is needed
    append_row(file, {"epoch": 1})
    append_row(file, {"epoch": 2})
    whole = file.read_bytes()
    # In UTF-8 a row can be cut inside a letter; -1 leaves a whole row without its line end.
    row = json.dumps({"epoch": 3, "name": "é"}, ensure_ascii=False).encode() + b"\n"
    file.write_bytes(whole + row[:cut])
    kept = [{"epoch": 3, "name": "é"}] if cut == -1 else []
    broken = 0 if kept else 1
    assert read_rows(file) == ([{"epoch": 1}, {"epoch": 2}, *kept], broken)
    append_row(file, {"epoch": 4})
    assert read_rows(file) == ([{"epoch": 1}, {"epoch": 2}, *kept, {"epoch": 4}], broken)
    assert file.read_bytes().startswith(whole)


def test_a_row_cut_inside_a_letter(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes('{"name": "é'.encode()[:-1])
    append_row(file, {"epoch": 1})
    assert read_rows(file) == ([{"epoch": 1}], 1)


def test_lines_that_are_no_rows_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n\n[1]\n7\nnull\n{"a": 2}\n')
    assert read_rows(file) == ([{"a": 1}, {"a": 2}], 3)
    assert read_rows(tmp_path / "none.jsonl") == ([], 0)


def test_text_with_line_ends_of_all_kinds_is_one_row(tmp_path: Path) -> None:
    row = {"reason": "a\nb\r\nc\u2028d\x85e\x0bf"}
    append_row(tmp_path / "rows.jsonl", row)
    assert read_rows(tmp_path / "rows.jsonl") == ([row], 0)


@pytest.mark.process
def test_a_row_is_on_disk_when_append_returns(tmp_path: Path, root: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from harness.core.records import append_row\n"
        "append_row(Path(sys.argv[1]), {'epoch': 1}); os.kill(os.getpid(), 9)"
    )
    process = writer(root, code, str(tmp_path / "epochs.jsonl"))
    assert process.wait(30) == -9
    assert read_rows(tmp_path / "epochs.jsonl") == ([{"epoch": 1}], 0)


def test_unknown_is_null(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    row = {"a": nan, "b": [inf, 1.5], "c": {"d": -inf, "e": (np.float64("nan"), 2)}, 3: None}
    expected = {"a": None, "b": [None, 1.5], "c": {"d": None, "e": [None, 2]}, "3": None}
    assert plain(row) == expected
    append_row(tmp_path / "rows.jsonl", row)
    write_json(tmp_path / "whole.json", row)
    assert read_rows(tmp_path / "rows.jsonl") == ([expected], 0)
    assert read_json(tmp_path / "whole.json") == expected
    for file in ("rows.jsonl", "whole.json"):
        text = (tmp_path / file).read_text()
        assert "NaN" not in text and "Infinity" not in text and text.endswith("\n")


@pytest.mark.process
def test_a_summary_is_whole_or_absent(tmp_path: Path, root: Path) -> None:
    delays = random.Random(0)
    writes = cut_off = 0
    for trial in range(20):
        run = RunFolder(tmp_path / str(trial))
        process = writer(root, OVERWRITE, str(run.summary))
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        # The shortest delays end before the first file, the longest in the middle of a later one.
        time.sleep(delays.uniform(0, 0.03))
        process.kill()
        process.wait()
        if run.summary.exists():
            content = read_json(run.summary)
            assert content is not None and content["first"] == content["last"] >= 1
            writes += content["last"]
        if run.path.exists():
            cut_off += any(p != run.summary for p in run.path.iterdir())
    # Otherwise nothing has been shown: files were written, and some were being written.
    assert writes > 0 and cut_off > 0


def test_read_json_of_no_record(tmp_path: Path) -> None:
    for number, text in enumerate(["", '{"a": 1', "[1]", "7"]):
        file = tmp_path / f"{number}.json"
        file.write_text(text)
        assert read_json(file) is None
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe{}")
    assert read_json(tmp_path / "bytes.json") is None
    assert read_json(tmp_path / "none.json") is None and read_json(tmp_path) is None


@pytest.mark.process
def test_two_processes_may_append_to_one_file(tmp_path: Path, root: Path) -> None:
    file = tmp_path / "attempts.jsonl"
    writers = [writer(root, APPEND, str(file), name) for name in "ab"]
    for process in writers:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.wait(60) for process in writers] == [0, 0]
    rows, broken = read_rows(file)
    assert broken == 0
    for name in "ab":
        assert [r["number"] for r in rows if r["writer"] == name] == list(range(150))


def test_outcome(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    assert run.outcome() is None
    write_json(run.summary, {"outcome": "failed"})
    assert run.outcome() == "failed"  # a launcher writes it for a run that never began
    write_json(run.summary, {"outcome": FINISHED})
    assert run.outcome() is None  # all that a run leaves whose folder is removed before its end
    run.write_settings({})
    assert run.outcome() == FINISHED
    run.summary.write_text("{")
    assert run.outcome() is None


def test_find_runs_and_those_set_aside(tmp_path: Path) -> None:
    names = ["bert/1_4/b", "bert/1_4/a", "vit/2_2/c", "bert/1_1/z"]
    for name in names:
        write_json(RunFolder(tmp_path / name).settings, {"name": name})
    # Checkpoints and hidden folders hold files of the same name and are no runs.
    for inside in ("bert/1_4/a/checkpoint-3", ".hidden/run"):
        write_json(RunFolder(tmp_path / inside).settings, {})
    (tmp_path / "bert" / "empty").mkdir()
    expected = [RunFolder(tmp_path / name) for name in sorted(names)]
    assert find_runs(tmp_path) == expected

    first = RunFolder(tmp_path / "bert/1_4/a")
    for number in (1, 2):
        aside = first.set_aside()
        assert aside == tmp_path / f"bert/1_4/a{ASIDE}{number}"
        assert not first.path.exists()
        assert first not in find_runs(tmp_path)
        write_json(first.settings, {"name": number})
    assert read_json(RunFolder(tmp_path / f"bert/1_4/a{ASIDE}1").settings) == {"name": names[1]}
    assert read_json(RunFolder(tmp_path / f"bert/1_4/a{ASIDE}2").settings) == {"name": 1}
    assert find_runs(tmp_path) == expected
    # A run that is named itself is found, one set aside too; nothing is not an error.
    assert find_runs(first.path) == [first]
    assert find_runs(aside) == [RunFolder(aside)]
    assert find_runs(tmp_path / "none") == []


def test_a_sum_with_something_unknown_is_unknown() -> None:
    assert total([0.1] * 10) == 1.0
    for values in ([], [1.0, None], [1.0, float("nan")], [1.0, float("inf")]):
        assert total(values) is None


def test_a_draft_does_not_stay(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": 1})
    write_json(tmp_path / "a.json", {"a": 2})
    assert os.listdir(tmp_path) == ["a.json"] and read_json(tmp_path / "a.json") == {"a": 2}
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"a": object()})
    assert read_json(tmp_path / "a.json") == {"a": 2}


@pytest.mark.parametrize(("error", "words"), [
    (OSError(errno.ENOSPC, "full"), "no space on {here}"),
    (OSError(errno.EIO, "broken"), "I/O error on the disk of {here}"),
    (OSError(errno.EACCES, "forbidden", "{here}/a"), "no permission to write to {here}"),
    (OSError(errno.EFBIG, "ulimit -f"), "files of this length are forbidden (ulimit -f) in {here}"),
    (RuntimeError("I/O error: full (os error 28)"), "no space on {here}"),
    (OSError(errno.ENOTDIR, "", "{here}/a"), "a file is where a folder should be in {here}"),
    (OSError(errno.EISDIR, "", "{here}/a"), "a folder is where a file should be in {here}"),
    (OSError(errno.ELOOP, "", "{here}/a"), "symbolic links form a loop in {here}"),
    (OSError(errno.ENAMETOOLONG, "", "{here}/a"), "names are too long in {here}"),
    (OSError(errno.EACCES, "forbidden", "/elsewhere/a"), None),
    (RuntimeError("a file that is not there (os error 2)"), None),
    (OSError(errno.EPERM, "a socket that may not be opened"), None),
    (OSError(errno.ENOENT, "a program that is not there"), None),
    (OSError(errno.EACCES, "a lock"), None),
    (RuntimeError("of a library"), None),
])  # fmt: skip
def test_only_what_a_disk_refuses_is_said_of_its_folder(
    error: Exception, words: str | None, tmp_path: Path
) -> None:
    if isinstance(error, OSError) and error.filename:
        error.filename = error.filename.format(here=tmp_path)
    with pytest.raises(type(error) if words is None else DiskError) as raised, writing_to(tmp_path):
        raise error
    if words is None:
        assert raised.value is error
    else:
        assert str(raised.value) == words.format(here=tmp_path)


def test_an_output_folder_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    lost, circle = tmp_path / "lost", tmp_path / "circle"
    lost.symlink_to("nowhere")
    circle.symlink_to("circle")
    for folder, words in (
        (lost / "out", f"{lost} is a link to nowhere, which is not there: make that folder"),
        (circle, f"{circle} is a link to circle, which is not there"),
        (tmp_path / ("x" * 300), "the name is too long"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            disk.check_writable(folder)
    (tmp_path / "nowhere").mkdir()
    disk.check_writable(lost / "out")


def test_a_draft_replaces_the_file_at_the_end_or_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "table.md"
    with disk.draft_of(file) as draft:
        draft.write_text("first")
        assert not file.exists()

    def broken_off() -> None:
        with disk.draft_of(file) as draft:
            draft.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    assert [*tmp_path.iterdir()] == [file] and file.read_text() == "first"
    with pytest.raises(OSError, match="not empty"), disk.draft_of(tmp_path) as folder:
        (folder / "inside").mkdir(parents=True)
    assert [*tmp_path.iterdir()] == [file] and not folder.exists()


def test_the_disk_that_is_full_is_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has no name may have been written to the folder of temporary files."""
    small = tmp_path / "small"
    monkeypatch.setattr(disk, "gettempdir", lambda: str(small))

    def statvfs(path: Path) -> SimpleNamespace:
        free, flags = 0 if path == small else 2**30, os.ST_RDONLY if path == gone else 0
        sizes = {"f_bavail": free, "f_frsize": 1, "f_files": 9, "f_favail": 9}
        return SimpleNamespace(**sizes, f_flag=flags)

    gone = tmp_path / "remounted"
    monkeypatch.setattr(disk.os, "statvfs", statvfs)
    with pytest.raises(DiskError, match=f"read-only {gone}"), writing_to(gone):
        raise RuntimeError("open file failed with strerror")
    with pytest.raises(DiskError, match=f"no space on {small}"), writing_to(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "full")
    with pytest.raises(RuntimeError, match="of a library"), writing_to(tmp_path / "out"):
        raise RuntimeError("of a library")
    with pytest.raises(DiskError, match=f"no space on {small}"), writing_to(small):
        raise RuntimeError("of a library, which does not say what it met")


def test_a_command_is_recorded_without_secrets_and_home() -> None:
    home = str(Path.home())
    words = ["python", "--hub_token", "abc", "--api-key=abc", "--set", "my_secret=abc", "--lr", "1",
             f"{home}/sweep.yaml", "a b", "token"]  # fmt: skip
    text = redacted_command(words)
    assert "abc" not in text and home not in text
    assert text == (
        "python --hub_token '***' '--api-key=***' --set 'my_secret=***' --lr 1 "
        "'~/sweep.yaml' 'a b' token"
    )


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(("home", "shown"), [
    ("/", "org/m ../a/x.csv /rooted /root/x"), ("/root", "org/m ../a/x.csv /rooted ~/x"),
])  # fmt: skip
def test_a_home_is_a_folder_and_no_part_of_names(
    monkeypatch: pytest.MonkeyPatch, home: str, shown: str
) -> None:
    """A number without a name, as in some containers, has / as its home."""
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("LOGNAME", "ada")
    assert redacted("org/m ../a/x.csv /rooted /root/x") == shown


def test_a_text_is_recorded_without_people_and_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("LOGNAME", "ada-l")
    monkeypatch.setattr(socket, "gethostname", lambda: "vit")
    monkeypatch.setenv("MY_PASSWORD", "Correct-Horse-Battery")
    for text, shown in {
        "/home/ada/x and /scratch/ada-l/x": "~/x and /scratch/USER/x",
        "s3://key:word@bucket/x, http://me@vit/x": "s3://***@bucket/x, http://***@HOST/x",
        "vit:29500 is gone, python vit.py --model vit-nano": (
            "HOST:29500 is gone, python vit.py --model vit-nano"
        ),
        f"Bearer hf_{'a' * 20} AKIA{'A' * 16}": "Bearer *** ***",
        "/mnt/home/bob/x, '/Users/bob/y'": "/mnt/home/USER/x, '/Users/USER/y'",
        # Forty digits are a commit, unless they are said to be a key.
        f"--dataset me/x@{COMMIT} (commit {COMMIT})": f"--dataset me/x@{COMMIT} (commit {COMMIT})",
        f"WANDB_API_KEY={COMMIT} key: {COMMIT}, bearer {COMMIT}": (
            "WANDB_API_KEY=*** key: ***, bearer ***"
        ),
        f"login(token='{COMMIT}') api_key={COMMIT}": "login(token='***') api_key=***",
        "the word is Correct-Horse-Battery": "the word is ***",
        "a token of the tokenizer, keys: input_ids": "a token of the tokenizer, keys: input_ids",
        "hf_hub_download, /models/vit": "hf_hub_download, /models/vit",
    }.items():
        assert redacted(text) == shown
    passed = parse("vit", ["--tiny", "--run_name", "mine", "--hub_model_id", "ada/x"], {})
    assert settings_of(passed)["trainer"] == {"run_name": "***", "hub_model_id": "***"}
    words = ["vit.py", "--run_name", "mine", "--hub_model_id=ada/x"]
    assert redacted_command(words) == "vit.py --run_name '***' '--hub_model_id=***'"
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.setattr(getpass, "getuser", lambda: {}["nobody"])
    assert redacted("localhost:1") == "localhost:1"


def test_logs_of_all_ranks_are_redacted_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = parse("vit", ["--tiny", "--run_name", "mine"], {})
    log = tmp_path / "vit_1_2_x[1]_1.txt"
    other = log.with_name(f"{log.stem}_rank1.txt")
    log.write_bytes(b"[gpu7] mine, not determined \xff gpu71\n")
    with other.open("ab") as still_open:
        still_open.write(b"/home/bob/x\n")
        still_open.flush()
        redact_logs(log, settings, [("gpu6:2222", "gpu6"), ("gpu7", "gpu7")])
        still_open.write(b"more\n")
    assert log.read_bytes() == b"[node 1] ***, not determined \xff gpu71\n"
    assert other.read_bytes() == b"/home/USER/x\nmore\n"
    redact_logs(tmp_path / "nothing.txt", settings)

    def meanwhile(text: str) -> str:
        """A process prints in each of the first two moments in which the log is looked at."""
        if len(late):
            with log.open("ab") as printing:
                printing.write(late.pop())
        return redacted(text)

    monkeypatch.setattr(redact, "redacted", meanwhile)
    late = [b"/home/eve/y\n", b"mine again\n"]
    log.write_bytes(b"mine\n")
    redact_logs(log, settings)
    assert log.read_bytes() == b"***\n*** again\n/home/USER/y\n"


def test_settings_are_recorded_without_places() -> None:
    settings = parse("vit", ["--tiny", "--dataset", f"{Path.home()}/data", "--rerun"], {})
    named = settings_of(settings)
    assert "output_dir" not in named and "rerun" not in named
    assert named["dataset"] == "~/data" and named["script"] == "vit"


def test_invalid_rows_of_attempts_do_not_end_a_run(tmp_path: Path) -> None:
    """Cut off or written by hand: what they do not say is unknown."""
    folder = RunFolder(tmp_path / "run")
    assert attempts.begin(folder, 0, 2) == 1
    write_json(folder.failure(0), {"rank": 0})
    odd_rows = ({"event": "end", "attempt": 1}, {"event": "start"}, {}, {"event": "end"})
    for row in odd_rows:
        append_row(folder.attempts, row)
    assert attempts.begin(folder, 3, 2) == 3
    start = attempts.starts_of(folder.read_attempts())[-1]
    assert (start["gap_s"], start["redone_updates"]) == (None, None)
    assert (
        attempts.is_resumed(folder, 1.0)
        and attempts.total_elapsed_s(attempts.believed(folder)) is None
    )
    write_json(folder.environment, {"comm_probe": {"with_s": [1.0]}})
    for row in ({"epoch": 1}, {"timed_s": 1.0, "train_samples_per_s_per_gpu": 2.0}):
        append_row(folder.epochs, row)
    attempts.write_summary(folder, "failed", "odd")
    summary = read_json(folder.summary) or {}
    assert (summary["epochs_done"], summary["samples"], summary["restarts"]) == (2, None, 0)
    assert summary["comm_share"] is summary["best_epoch"] is summary["mfu"] is None


def test_a_failure_that_lacks_fields_was_written_by_no_rank(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    write_json(folder.failure(0), {"rank": 0, "unix": 5.0})
    assert attempts.first_failure(folder, lambda f: f["unix"] >= 0) is None
    whole = {"rank": 1, "unix": 9.0, "outcome": "oom", "reason": "too much"}
    write_json(folder.failure(1), whole)
    assert attempts.first_failure(folder, lambda f: f["unix"] >= 0) == whole


def test_rows_in_what_a_shell_has_printed_into() -> None:
    text = b'Welcome\n{"a": 1}\n\n[2]\n"b"\n{"c":\n\xff\n{"d": 4}'
    assert rows_in(text) == ([{"a": 1}, {"d": 4}], 5)
    assert rows_in(b"") == ([], 0)


@pytest.mark.parametrize("was_on", [True, False])
def test_reading_leaves_the_garbage_collector_as_it_was(was_on: bool) -> None:
    (gc.enable if was_on else gc.disable)()  # whatever the tests before have left
    try:
        with without_collecting():
            assert not gc.isenabled()
        assert gc.isenabled() is was_on
    finally:
        gc.enable()
