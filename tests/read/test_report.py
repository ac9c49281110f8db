"""The report of a folder: what stands in it, and what becomes of records that are not whole."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli import main
from harness.core.records import SCHEMA, RunFolder
from harness.core.records.locks import Lock, is_held
from harness.core.settings import UserError
from harness.read.labels import duration
from harness.read.records.sweeps import read_all, read_results
from harness.read.report.report import _end_quietly, _interrupts_blocked, make_report
from harness.read.table import Item
from harness.read.tables.results import fairness
from tests.support.paired import Verb
from tests.support.records import Plan, epochs, lines, record, with_ranks
from tests.support.sweeps import ROOT, wait_for


def make_sweep(plan: Plan) -> Plan:
    """A sweep with all that a report has a place for, on two machines, and a run beside it."""
    for setup, devices, top5 in (("1_1", 1, None), ("2_1", 2, 0.95)):
        for seed, accuracy in ((1, 0.8), (2, 0.9)):
            folder = plan.run(
                setup, 4, seed, devices, accuracy=accuracy, train_time_s=4920.0,
                top5_accuracy=top5, epochs=epochs(0.5, accuracy, seconds=2460.0, loss=0.5),
                environment={"nodes": devices, "processes_per_node": 1, "dirty": seed == 2},
            )  # fmt: skip
            if devices == 2:
                shared = {"user_s": 6205.0, "system_s": 2191.0, "eval_samples": 10}
                first = {**shared, "eval_accuracy": 0.322, "eval_top5_accuracy": 0.58}
                with_ranks(folder, first, {**shared, "eval_accuracy": 0.5})
    file = plan.run("1_1", 4, 3, machine="b-cpux8") / "telemetry" / "node_0.jsonl"
    reading = {"unix": 1.0, "gpus": [], "node": {"cpu_percent": 5.0}}
    lines(file, [reading, {**reading, "unix": 2.0}])
    file.write_text(file.read_text() + '{"unix": 3.0, "gp')  # torn: left out
    lines(file.with_name("node_of_another.jsonl"), [reading])
    plan.run("1_1", 64, 1, outcome="oom", reason="<script>alert('no | room')</script>", updates=7)
    plan.planned("1_1", 128, 1, skipped="needs 2 nodes")
    plan.write()
    record(plan.output_dir / "bert" / "alone", "--seed", "7")
    return plan


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The files of its report, made once."""
    root = tmp_path_factory.mktemp("made")
    return make_report(make_sweep(Plan(root / "outputs")).output_dir, root / "report")


def test_the_page_holds_everything_and_needs_nothing(made: list[Path]) -> None:
    page, text, *folders = made
    out = page.parent
    html = page.read_text()
    # Nothing is loaded from anywhere; what is linked lies beside the page.
    linked = [link for link in re.findall(r'(?:href|src)="([^"#][^"]*)"', html)]
    assert linked and all((out / link).is_file() for link in linked)
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=|@import|url\(http", html)
    addresses = set(re.findall(r"https?://[\w./-]+", html))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    # What a record says is text, never code.
    assert "alert(" in html and "<script>alert" not in html
    drawings = re.findall(r'<figure id="sizes-(\w+)-figure">', html)
    assert {"accuracy", "loss", "throughput", "efficiency", "frontier", "usage"} <= {*drawings}
    for name in drawings:
        assert (out / "sizes" / "figures" / f"{name}.svg").read_bytes().startswith(b"<svg")
    assert not [*(out / "sizes" / "figures").glob("*.png")]  # `figures --all` writes them
    # The page itself follows the reader's choice; `figures` writes dark files.
    assert not [*(out / "sizes" / "figures").glob("*-dark*")]
    assert [folder.name for folder in folders] == [
        "sizes", "runs_of_bert_bert_nano_embedded_english",
    ]  # fmt: skip
    for words in ("82 min", "1 h 22 min", "Which batch?", "python -m harness sweep sizes.yaml",
                  "torch 2.13.0", "Several kinds of machine (a-cpux2, b-cpux8)",
                  "2 of 6 runs ran from a checkout with changed files",
                  "1 run", "skipped: needs 2 nodes"):  # fmt: skip
        assert (words in html) == (words != "82 min"), words
    assert text.read_text().startswith("# What was measured: ")


def test_every_row_says_what_it_is_of(made: list[Path]) -> None:
    html = made[0].read_text()
    rows = Counter(re.findall(r"<tr (data-[^>]*)><td", html))
    single = 'data-script="-" data-setup="1_1" data-strategy="-" data-link="-"'
    two = single.replace("1_1", "2_1")
    # In the results and in what was compared: batch 4, 64 and 128 on 1_1 and batch 4 on another
    # machine; the failed run has a row more, and so have the two nodes.
    assert rows[single] == 2 * 4 + 1 and rows[two] == 2 * 1 + 2
    # Runs that did not begin are counted together and belong to no filter.
    assert re.search(r"<tr><td>1 run</td><td>skipped: needs 2 nodes", html)


def test_the_figure_of_batches_answers_alone_as_it_shows_accuracy(made: list[Path]) -> None:
    html = made[0].read_text()
    section = html[html.index('<section id="sizes"') :]
    shown = re.findall(
        r'<figure id="sizes-(\w+)-figure">', section[: section.index("<summary><h3>")]
    )
    assert shown == ["epoch_time"]
    assert "More figures" in section and section.count('<figure id="sizes-frontier-figure">') == 1


@pytest.mark.usefixtures("undrawn")
def test_each_section_opens_with_what_was_expected(plan: Plan, tmp_path: Path) -> None:
    plan.run()
    record(plan.output_dir / "bert" / "alone", "--seed", "7")
    for given, shown in (
        ("four is <enough>.", "four is &lt;enough&gt;."),
        (None, "none was written down before the runs."),
        ("local_sgd is faster.", "local_sgd is faster."),
    ):
        page, text, *_ = make_report(plan.write(hypothesis=given).parents[1], tmp_path / "report")
        html = page.read_text()
        assert html.count("<h3>Hypothesis</h3>") == 1  # none of runs of no sweep
        assert html.count("whole 95 % interval is within its bounds") == 1
        marked = ' class="as_it_is"' if shown.startswith("local_sgd") else ""  # no capital letter
        both = f"<h3>Hypothesis</h3>\n<p{marked}>{shown}</p>\n<h3>Answer</h3>\n"
        measured_on = '<p class="small">Measured: sweep sizes (--tiny), a-cpux2</p>'
        assert both + measured_on in html
        assert "\n\nMeasured: sweep sizes (--tiny), a-cpux2\n\n- " in text.read_text()
        assert f"Hypothesis: {given or shown}".replace("<", r"\<").replace(">", r"\>") in (
            text.read_text()
        )


@pytest.mark.usefixtures("undrawn")
def test_a_disturbed_sweep_names_the_command_that_repeats_it(plan: Plan, tmp_path: Path) -> None:
    def repeats(command: str | None) -> list[str]:
        folder = plan.write(command=command).parents[1]
        page, text, *_ = make_report(folder, tmp_path / "report")
        on_page = re.findall(r"Repeat when nothing else runs: <code>(.*)</code>", page.read_text())
        assert on_page == re.findall("\nRepeat when nothing else runs: `(.*)`", text.read_text())
        return on_page

    command = "python -m harness sweep a.yaml --tiny --pack --rerun failed --select setup=1_1"
    plan.run("1_1", 4, seed=1, environment={"launch": {"cpu_busy_share": 0.9}})
    plan.run("1_1", 8)
    again = "python -m harness sweep a.yaml --tiny --select setup=1_1 --rerun disturbed "
    again += "--isolation error"
    assert repeats(command) == [again] and repeats(None) == []
    plan.run("1_1", 4, seed=2)  # a quiet run of the same row, whose times count
    assert repeats(command) == []


@pytest.mark.usefixtures("undrawn")
def test_what_was_measured_last_comes_first(plan: Plan, tmp_path: Path) -> None:
    def titles() -> list[str]:
        page = make_report(plan.output_dir, tmp_path / "report")[0]
        return re.findall("<h2>(.*)</h2>", page.read_text())[:2]

    alone, planned = plan.output_dir / "bert" / "alone", plan.run()
    record(alone, "--seed", "7")
    plan.write()
    for folder, unix in ((alone, 1.0), (planned, 2.0)):
        start = {"event": "start", "attempt": 1, "unix": unix, "from_update": 0}
        (folder / "attempts.jsonl").write_text(json.dumps(start) + "\n")
    assert titles()[0] == "Which batch?"
    start = {"event": "start", "attempt": 1, "unix": 3.0, "from_update": 0}
    (alone / "attempts.jsonl").write_text(json.dumps(start) + "\n")
    first, second = titles()
    assert first.startswith("runs of bert") and second == "Which batch?"


@pytest.mark.process
def test_several_processes_make_the_same_report(
    made: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = made[0].parent
    monkeypatch.setattr("harness.read.report.report.os.cpu_count", lambda: 2)
    monkeypatch.setattr("harness.read.report.report.MANY_RUNS", 2)
    assert len(made) == len(make_report(alone.parent / "outputs", tmp_path)) == 4
    one, two = (
        {file.relative_to(out): file.read_bytes() for file in out.rglob("*") if file.is_file()}
        for out in (alone, tmp_path)
    )
    assert one == two and len(one) > 10


def test_a_process_that_is_ended_from_outside_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Verb
) -> None:
    def ended(*_: object) -> None:
        raise BrokenProcessPool

    plan = make_sweep(Plan(tmp_path / "outputs"))
    monkeypatch.setattr("harness.read.report.report.MANY_RUNS", 2)
    monkeypatch.setattr("harness.read.report.report.os.cpu_count", lambda: 2)
    monkeypatch.setattr("harness.read.report.report.ProcessPoolExecutor.submit", ended)
    error = report.refused(plan.output_dir)
    assert "a process that draws was ended from outside" in error and "report one sweep" in error


def test_the_tables_are_those_of_a_readme(made: list[Path]) -> None:
    _, text, folder, _ = made
    body = text.read_text()
    assert (
        "| setup 2\\_1, batch per GPU 4, a-cpux2 | 2/2 | 0.8500 ± 0.0707 | 0.9500 ± 0.0000 | "
        "0.5000 ± 0.0000 | 100 ± 0 | +0.0% | 1 h 22 min | 40 s | 8 | finished |"
    ).replace("\\", "") in body
    # The node of seed 001: 1 h 43 min 25 s of user time, 36 min 31 s of the system's.
    assert (
        "| setup 2_1, batch per GPU 4, a-cpux2 | 0 | 1 h 43 min | 36 min 31 s | 0.3220 | 0.5800 |"
        in body
    )
    assert "| setup 1_1, batch per GPU 64, a-cpux2 | 0/1 |" + " - |" * 7 + " 64 | oom |" in body
    # Machines are never averaged: the third seed has a row of its own.
    assert "| setup 1_1, batch per GPU 4, b-cpux8 | 1/1 | 0.8000 |" in body
    with (folder / "runs.csv").open() as file:
        runs = list(csv.DictReader(file))
    assert [run["state"] for run in runs].count("finished") == 5 and len(runs) == 7
    with (folder / "table.csv").open() as file:
        assert {row["machine"] for row in csv.DictReader(file)} == {"a-cpux2", "b-cpux8", ""}
    for alt, target in re.findall(r"!\[([^]]*)\]\(([^)]*)\)", body):
        assert len(alt) > 40 and (text.parent / target).is_file()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(8.44, "8.44 s"), (59.96, "60 s"), (750, "12 min 30 s"), (4920, "1 h 22 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("baseline", "setups", "reason"),
    [
        (None, ["1_1", "1_2"], "no baseline is named, such as baseline: {setup: 1_1} in its file"),
        (None, ["1_1", "1_1"], "all runs have the same settings"),
        (None, ["1_1"], "there is one run"),
        ({"setup": "4_1"}, ["1_1", "1_2"], "no finished run of the baseline (setup 4_1)"),
        ({"setup": "1_1"}, ["1_1"], "no finished run beside the baseline (setup 1_1)"),
    ],
)
@pytest.mark.usefixtures("undrawn")
def test_why_nothing_is_compared_is_one_line(
    baseline: dict[str, str] | None, setups: list[str], reason: str, plan: Plan, tmp_path: Path
) -> None:
    for seed, setup in enumerate(setups):
        plan.run(setup, 4, seed)
    plan.write(axes=["setup"], baseline=baseline)
    _, text, *_ = make_report(plan.output_dir, tmp_path / "report")
    assert f"- Nothing is compared: {reason}." in text.read_text().splitlines()


@pytest.mark.usefixtures("undrawn")
def test_runs_of_no_sweep_are_not_called_one(plan: Plan, tmp_path: Path) -> None:
    plan.run("1_1", 4)
    _, text, *_ = make_report(plan.output_dir, tmp_path / "report")
    body = text.read_text()
    assert "## runs of " in body and "sweep runs of" not in body and "\na-cpux2\n" in body


@pytest.mark.usefixtures("undrawn")
def test_an_explanation_has_its_place(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says is tested where real runs are (test_explain.py)."""
    monkeypatch.setattr(
        "harness.read.report.report.explain_sweep",
        lambda sweep: [Item(f"{sweep.name}:", ("& its <reasons>", "and why"))],
    )
    plan.run()
    page, text, *_ = make_report(plan.write(), tmp_path / "report")
    assert "<h3>Explanation</h3>" in page.read_text()
    below = "<ul><li>&amp; its &lt;reasons&gt;</li><li>and why</li></ul>"
    assert f"<li>sizes:{below}</li>" in page.read_text()
    assert "### Explanation\n\n- sizes:\n  - " in text.read_text()
    assert text.read_text().count("\n  - and why") == 1


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Verb:
    return Verb("report", capsys)


def text_of(report: Verb, folder: Path, tmp_path: Path, warned: str = "") -> str:
    report(folder, "--out", tmp_path / "report", warned=warned)
    return (tmp_path / "report" / "report.md").read_text()


@pytest.mark.usefixtures("undrawn")
def test_half_written_runs_are_running_or_interrupted(tmp_path: Path, report: Verb) -> None:
    root = tmp_path / "outputs"
    record(root / "bert" / "done", "--seed", "1")
    held = record(root / "bert" / "held", "--seed", "2", epochs=1, outcome=None)
    running = record(root / "bert" / "told", "--seed", "3", epochs=1, outcome=None)
    running.progress.write_text(json.dumps({"unix": time.time(), "update": 40, "updates": 60}))
    gone = record(root / "bert" / "gone", "--seed", "4", epochs=1, outcome=None)
    gone.progress.write_text(json.dumps({"unix": time.time() - 3600, "update": 40}))
    lock = Lock(held.lock("run"))
    assert lock.take()
    try:
        body = text_of(report, root, tmp_path)
        assert "- seed 2, repeat 1: running: 1 epoch recorded" in body
    finally:
        lock.release()
    assert "- seed 3, repeat 1: running: 1 epoch recorded, update 40 of 60" in body
    assert "- seed 4, repeat 1: interrupted: 1 epoch recorded" in body
    assert "| 1/4 |" in body  # only the finished one is in any number
    assert "- seed 2, repeat 1: interrupted" in text_of(report, root, tmp_path)


def test_asking_for_a_lock_takes_nothing(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "lock")
    assert not is_held(lock.path) and not lock.path.exists()
    assert lock.take() and is_held(lock.path) and is_held(lock.path)
    lock.release()
    tmp_path.mkdir(exist_ok=True)  # which went with the lock
    lock.path.touch()
    assert not is_held(lock.path)


@pytest.mark.usefixtures("undrawn")
def test_corrupt_lines_are_left_out_counted_and_named(tmp_path: Path, report: Verb) -> None:
    root = tmp_path / "outputs"
    folder = record(root / "bert" / "torn", "--seed", "1", epochs=3)
    folder.epochs.write_text(folder.epochs.read_text() + 'no json\n{"epoch": 4, "accur')
    body = text_of(report, root, tmp_path, warned="bert/torn: 2 lines of epochs.jsonl")
    assert "- bert/torn: 2 lines of epochs.jsonl not readable, left out" in body
    (part,), _ = read_all(root)
    assert [row["epoch"] for row in part.runs[0].epochs] == [1, 2, 3]


@pytest.mark.parametrize("schema", [SCHEMA - 1, SCHEMA + 1])
@pytest.mark.usefixtures("undrawn")
def test_records_of_other_definitions_are_named_not_shown(
    schema: int, tmp_path: Path, report: Verb
) -> None:
    root = tmp_path / "outputs"
    record(root / "bert" / "mine", "--seed", "1")
    record(root / "bert" / "other", "--seed", "2", schema=schema)
    body = text_of(report, root, tmp_path, warned=f"schema {schema}")
    assert f"run not shown: {root}/bert/other: settings.json was written with schema" in body
    assert "| 1/1 |" in body
    assert f"schema {schema}" in report.refused(root / "bert" / "other")


@pytest.mark.usefixtures("undrawn")
def test_a_sweep_that_cannot_be_read_is_named_its_runs_are_shown(
    plan: Plan, tmp_path: Path, report: Verb
) -> None:
    make_sweep(plan)
    (plan.folder / "sweep.json").write_text("{")
    body = text_of(report, plan.output_dir, tmp_path, warned="sweep not shown")
    assert "sweep not shown:" in body and "is not readable as JSON" in body
    assert body.count("\n## ") >= 2
    settings = RunFolder(plan.output_dir / "bert" / "1_1_4_1").settings
    plan.write()
    settings.write_text(json.dumps({"schema": SCHEMA + 1}))
    body = text_of(report, plan.output_dir, tmp_path, warned="1_1_4_1: settings.json was written")
    assert "sweep not shown:" not in body and "unreadable: settings.json was written with" in body


def test_nothing_to_report_is_one_line(
    tmp_path: Path, report: Verb, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    record(tmp_path / "outputs" / "bert" / "one")
    for argv, message in (
        ([str(tmp_path / "empty")], "no records below"),
        ([str(tmp_path / "none")], "there is no such folder"),
        (["a", "b"], "unexpected b; usage:"),
        (["--out"], "--out needs a value"),
        ([str(tmp_path / "outputs"), "--out", str(tmp_path / "file")], "cannot be written"),
    ):
        assert message in report.refused(*argv)
    assert main(["report", "--help"]) == 0
    assert "usage: python -m harness report" in capsys.readouterr().out
    for path in (tmp_path / "empty", tmp_path / "none"):
        with pytest.raises(UserError):
            read_results(path)


def test_figures_of_any_folder(tmp_path: Path, figures: Verb) -> None:
    root = tmp_path / "outputs"
    record(root / "bert" / "one", "--seed", "1", epochs=3)
    assert "; --all draws every figure for which they have something" in figures.refused(root)
    assert main(["figures", str(root), "--all", "--out", str(tmp_path / "drawn")]) == 0
    assert (tmp_path / "drawn" / "accuracy-dark.svg").is_file()
    record(tmp_path / "failed" / "bert" / "one", epochs=0, outcome="oom", reason="planted")
    assert "there is nothing to draw" in figures.refused(tmp_path / "failed", "--all")


def test_an_interrupt_while_processes_start_takes_effect_afterwards() -> None:
    """The first of them may have ended by it: its end would be taken for a lack of memory."""
    begun = []

    def interrupted() -> None:
        with _interrupts_blocked():
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            begun.append(True)

    # A launcher that an earlier test of this process started may have left its own handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    finally:
        signal.signal(signal.SIGINT, before)
    assert begun


def test_processes_that_draw_ignore_what_the_first_one_ignores() -> None:
    """A report that a shell has put behind goes on where the terminal sends an interrupt."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _end_quietly()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _end_quietly()
        assert callable(signal.getsignal(signal.SIGINT))
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.process
def test_an_interrupt_while_many_sweeps_are_drawn_is_one_line(tmp_path: Path) -> None:
    """A terminal sends it to all of its processes."""
    command = [
        sys.executable,
        "-m",
        "harness",
        "report",
        "outputs/published",
        "--out",
        str(tmp_path),
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True,
        # The tests may run in the background of a shell, which has them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert wait_for(lambda: any(tmp_path.rglob("table.csv")), 100)
    os.killpg(process.pid, signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert (process.returncode, printed) == (130, "harness report: stopped by SIGINT\n")


def test_the_limits_name_what_tells_trainings_apart_once() -> None:
    sweep = read_results(ROOT / "outputs" / "published" / "sweeps" / "demo-tiny")
    same = "rows that differ in them are not the same training."
    assert fairness(sweep)[:3] == [
        f"Different updates (vit: 264, 528; bert: 176, 352): {same}",
        f"Different effective batches (vit: 32, 64; bert: 32, 64): {same}",
        "Groups of one run have no spread: a difference between them may be the seed's.",
    ]


def test_the_limits_name_cores_that_no_process_used(plan: Plan) -> None:
    """Unless some process had all of them, or none ran alone, or a GPU computed."""
    sentence = "Each process had 1 of 2 cores: one process that uses all was not measured."
    facts = {"threads": 1, "observed": {"device": "cpu"}}
    for setup, processes in (("1_1", 1), ("1_2", 2), ("1_4", 4)):
        plan.run(setup, devices=processes, environment=facts)
    sweep = read_results(plan.write())
    assert sentence in fairness(sweep)
    assert sentence not in fairness(replace(sweep, planned=sweep.planned[1:]))
    plan.run("1_2", 8, devices=2, environment={**facts, "threads": 2})
    plan.run("1_2", 16, devices=2, environment={"threads": 1, "observed": {"device": "cuda:0"}})
    planned = read_results(plan.write()).planned
    for more in (planned[3], planned[4]):
        limits = fairness(replace(sweep, planned=(*planned[:3], more)))
        assert not any("Each process had" in text for text in limits)


@pytest.mark.usefixtures("undrawn")
def test_answers_have_a_line_a_measure_and_their_words_are_defined(plan: Plan) -> None:
    plan.run("1_1", seed=1, train_samples_per_s=100.0)
    plan.run("1_2", seed=1, train_samples_per_s=120.0)
    _, text, *_ = make_report(plan.write().parent, plan.output_dir / "page")
    assert "- **set-up 1_2**: one node with two processes" in text.read_text()
    answer = "\n- setup 1_2 against setup 1_1:\n  - samples/s: 1.20 times as many\n  - accuracy: "
    assert answer in text.read_text()
    assert "of unknown noise" not in text.read_text()
    plan.run("1_1", seed=2, train_samples_per_s=110.0)
    _, text, *_ = make_report(plan.write().parent, plan.output_dir / "page")
    assert "- **of unknown noise**: a side has too few runs" in text.read_text()
    assert (
        "- **time to accuracy**: wall time, but for what the record took to measure"
        in text.read_text()
    )
