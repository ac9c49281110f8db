"""Records that are explained: how their steps are separated, and to what they are compared."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.read.explain import causes
from harness.read.explain.explain import explain
from harness.read.explain.time_breakdown import (
    COMMUNICATION,
    DATA,
    EVALUATION,
    FIRST,
    SAVING,
    UNSEPARATED,
    time_breakdown,
)
from harness.read.records.selection import read_group
from tests.support.paired import DATA as SAMPLES
from tests.support.paired import Verb, imported, pair, text_file
from tests.support.paired import written as record_of
from tests.support.records import lines, with_epochs, with_ranks

ROW = {
    "epoch": 1.0, "timed_steps": 4, "timed_s": 8.0, "timed_samples": 64, "epoch_time_s": 12.0,
    "data_wait_share": 0.25, "eval_samples": 16, "eval_time_s": 2.0,
}  # fmt: skip


TIMES = {"updates": 5, "wall_s": 20.0, "eval_time_s": 2.0, "save_time_s": 1.0}


def written(folder: Path, *flags: str, row: dict[str, Any] | None = None, **more: Any) -> Path:
    """A record of two processes without rows of their ranks, with one epoch."""
    path = pair(folder, 1, *flags, **{**TIMES, **more})
    return with_epochs(path, [{**ROW, **(row or {})}])


def test_without_records_of_ranks_the_probe_and_the_data_separate_a_step(tmp_path: Path) -> None:
    path = written(tmp_path, "--strategy", "fsdp", comm_share=0.25)
    result = time_breakdown(read_group("x", str(path), None).runs[0])
    assert result.step_s == 2.0 and result.samples == 16
    known = {name: value for name, value in result.parts.items() if value}
    # A quarter of a step is waiting for data and a quarter communicating; the first steps took 2 s.
    assert known == {
        DATA: 0.5, COMMUNICATION: 0.5, UNSEPARATED: 1.0, FIRST: 0.4, EVALUATION: 0.4, SAVING: 0.2,
        "startup and other": 1.0,
    }  # fmt: skip
    assert result.evaluation_s == 2 * 2 / 16


def test_first_steps_may_be_those_of_a_start_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    explained = Verb("explain", capsys)
    said = "Each of the first 3 updates waits for an exchange (--sync_first), which is part of that"
    long: dict[str, Any] = {"row": {"epoch_time_s": 22.0}, "wall_s": 30.0}
    one = written(tmp_path / "one", "--strategy", "local_sgd", **long)
    text = explained.in_one_line(one)
    assert "more than as many later steps" in text and "--sync_first" not in text
    two = written(tmp_path / "two", "--strategy", "local_sgd", "--sync_first", "3", **long)
    assert said in explained.in_one_line(two)


@pytest.fixture
def explained(capsys: pytest.CaptureFixture[str]) -> Verb:
    return Verb("explain", capsys)


def test_what_cannot_be_explained_is_refused(tmp_path: Path, explained: Verb) -> None:
    path = written(tmp_path / "a")
    assert "[BASELINE]" in explained.refused(path, path, path)
    assert "there is no such folder" in explained.refused(tmp_path / "none")
    broken = written(tmp_path / "b", outcome="interrupted", reason="SIGTERM")
    assert "no finished run to explain: interrupted (SIGTERM)" in explained.refused(broken)
    short = written(tmp_path / "c", row={"timed_steps": 0, "timed_s": 0.0, "timed_samples": 0})
    assert "no timed steps: measure a longer run" in explained.refused(short)
    other = written(tmp_path / "d", environment={"machine": "b-cpux2"})
    assert "not comparable: machine" in explained.refused(path, other)
    data = written(tmp_path / "e", data={"data_checksum": "bbbb"})
    assert "not comparable: data checksum" in explained.refused(path, data)
    model = written(tmp_path / "f", "--model", "bert-mini")
    assert "not comparable: the model differs" in explained.refused(path, model)


def test_an_imported_run_has_no_steps_to_explain(tmp_path: Path, explained: Verb) -> None:
    out = imported(tmp_path / "records", text_file(tmp_path))
    assert "is imported: its source does not record single steps" in explained.refused(out)


def test_help_and_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--help"]) == 0
    assert "RUN [BASELINE]" in capsys.readouterr().out
    path = written(tmp_path)
    assert main(["explain", str(path), str(path)]) == 0
    shown = capsys.readouterr().out
    assert "Less than 10 % is lost against the baseline." in shown
    assert "Not known from this record: computing, communicating" in shown
    # The heading is wrapped to the width of its column.
    assert "baseline's" in shown and "share, ms" in shown and " - " in shown
    # "under 1 %" counts as a number: its column stands right, and so does the heading.
    assert re.search(r"ms +run +share, ms *$", shown, re.M)


def test_notes(tmp_path: Path) -> None:
    path = written(tmp_path / "a", wall_s=60.0, attempts=2, lost_s=3.0)
    written(tmp_path / "a", outcome="failed", reason="a reason")
    base = written(tmp_path / "b", "--dropout", "0.5")
    run = read_group("RUN", str(path.parent), None)
    text = " ".join(explain(run, read_group("BASELINE", str(base), None)).sentences)
    assert "They also differ in dropout." in text
    assert "took 45 s of 60 s" in text
    assert "1 run(s) were interrupted and resumed: 3 s lost." in text
    assert "1 run(s) did not finish and are not counted." in text
    assert "Training reaches 1 times its samples/s." in text and "inside" not in text
    attempts = [
        {"event": "start", "attempt": n + 1, "from_update": at} for n, at in ((0, 0), (1, 3))
    ]
    lines(path / "attempts.jsonl", attempts)
    with_epochs(path, [{**ROW, "updates": 5}])
    (path / "epochs.jsonl").write_text('{"epoch": 1, "upd\n' + (path / "epochs.jsonl").read_text())
    text = " ".join(explain(read_group("RUN", str(path), None)).sentences)
    assert f"{path}: epoch 1 interrupted inside and continued: its parts are sums" in text
    many = [{"event": "start", "attempt": n + 1, "from_update": 5 * n + 2} for n in range(10)]
    lines(path / "attempts.jsonl", many)
    short = ROW | {"epoch_time_s": 5.0, "timed_s": 4.0}
    with_epochs(path, [{**short, "epoch": n, "updates": 5 * n} for n in range(1, 11)])
    shown = " ".join(explain(read_group("RUN", str(path), None)).sentences)
    assert f"{path}: epochs 1, 2, 3, 4, 5, 6, and 4 more interrupted inside" in shown
    assert "1 torn line(s) of epochs.jsonl are left out; every epoch has a whole one." in text


def test_ranks_that_do_not_know_their_computing(tmp_path: Path) -> None:
    path = written(tmp_path)
    with_ranks(path, {"compute_s": None, "comm_wait_s": 1.0}, {"compute_s": 1.0, "comm_wait_s": 0})
    assert time_breakdown(read_group("x", str(path), None).runs[0]).parts[UNSEPARATED]


def test_a_flag_of_several_values_is_compared(tmp_path: Path) -> None:
    path = written(tmp_path)
    settings = json.loads((path / "settings.json").read_text())
    settings["trainer"] = {"optim_args": ["a", {"b": 1}]}
    (path / "settings.json").write_text(json.dumps(settings))
    run = read_group("RUN", str(path), None)
    assert run.identity["optim_args"] == '["a", {"b": 1}]'
    assert explain(run).sentences


def test_a_run_beside_other_programs_is_compared_with_no_other(tmp_path: Path) -> None:
    for busy, said in ((0.1, "No comparable run on one process"), (0.6, "It ran beside other")):
        folder = written(tmp_path / str(busy), environment={"launch": {"cpu_busy_share": busy}})
        sentences = explain(read_group("RUN", str(folder), None)).sentences
        assert sentences[1].startswith(said)


def test_others_that_come_during_a_run_count_by_time(tmp_path: Path) -> None:
    """As much of it as 0.6 of the cores in half of the time, or as nobody knows."""
    for shares, seconds, whole in (
        ((0.0, 0.6), (1.0, 1.0), 0.3), ((0.0, 0.6), (3.0, 1.0), 0.15),
        ((None, 0.6), (3.0, 1.0), 0.6), ((None, None), (1.0, 1.0), None),
    ):  # fmt: skip
        folder = written(tmp_path / str(shares) / str(seconds), environment={"cpu_cores": 2})
        rows = [
            {**ROW, "epoch": n + 1, "others_cpu_share": share, "epoch_time_s": s}
            for n, (share, s) in enumerate(zip(shares, seconds, strict=True))
        ]
        group = read_group("RUN", str(with_epochs(folder, rows)), None)
        (run,) = group.runs
        assert run.others_cpu_share == (whole if whole is None else pytest.approx(whole))
        assert run.is_beside_others == (whole is not None and whole > 0.25)
        cores = causes.run_context(group, None).others_cores
        assert cores == (whole if whole is None else pytest.approx(2 * whole))


FACTS = {
    "machine": "a-cpux2", "gpus": [], "effective_batch": 32, "threads": 1,
    "observed": {"device": "cpu"}, "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
}  # fmt: skip


def on_one(root: Path, seed: int, timed_s: float, **facts: Any) -> Path:
    """A record of one process, with 64 timed samples."""
    path = root / "bert" / "1_1" / f"s{seed}"
    known = {**FACTS, "data": SAMPLES, "launch": {"cpu_busy_share": 0.1}, **facts}
    words = ["--seed", str(seed), "--setup", "1_1"]
    record_of(path, "bert", words, (1, 1), known, {**TIMES, "samples": 2000})
    return with_epochs(path, [{**ROW, "timed_s": timed_s}])


def test_a_baseline_is_that_of_quiet_runs_of_the_same_folder(tmp_path: Path) -> None:
    """8 samples/s. One beside others had 16, and one of a folder inside this one 32."""
    run = written(tmp_path, environment=FACTS)
    on_one(tmp_path, 1, 8.0)
    on_one(tmp_path, 2, 4.0, launch={"cpu_busy_share": 0.9})
    on_one(tmp_path / "demo", 3, 2.0)
    told = explain(read_group("RUN", str(run), None)).sentences[1]
    assert "reaches 8 samples/s" in told and "demo" not in told, told


def test_why_a_run_beside_it_is_no_baseline(tmp_path: Path) -> None:
    run = written(tmp_path, environment=FACTS)
    one = on_one(tmp_path, 1, 8.0, threads=2)
    told = explain(read_group("RUN", str(run), None)).sentences[1]
    assert f"found beside it ({one} is not: threads per process: RUN has 1, the other has 2" in told
