"""A record is believed once it is checked; one that is not is named and hides no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.core.records import RunFolder, find_runs
from harness.core.records.checksums import OWN, vouched
from harness.core.records.summary import of_rows
from harness.read import load, load_runs
from harness.read.records.packing import texts, write_folder
from harness.read.records.recorded import recorded, telemetry_of
from harness.read.records.selection import read_selected
from harness.read.records.sweeps import read_all, read_sweep
from tests.support.published import PUBLISHED, copied
from tests.support.records import Plan, epochs, record, with_ranks

Change = Callable[[Path], None]


def edit(file: str, **changes: Any) -> Change:
    def change(path: Path) -> None:
        content = json.loads((path / file).read_text())
        (path / file).write_text(json.dumps({**content, **changes}))

    return change


def edit_rows(of: Callable[[list[str]], list[str]], file: str = "epochs.jsonl") -> Change:
    def change(path: Path) -> None:
        lines = (path / file).read_text().splitlines()
        (path / file).write_text("".join(f"{line}\n" for line in of(lines)))

    return change


def in_row(number: int = 0, **changes: Any) -> Change:
    def change(lines: list[str]) -> list[str]:
        lines[number] = json.dumps(json.loads(lines[number]) | changes)
        return lines

    return edit_rows(change)


def vouched_first(lines: list[str]) -> list[str]:
    return [json.dumps(vouched(json.loads(lines[0]))), *lines[1:]]


def cut(file: str) -> Change:
    return lambda path: (path / file).write_text((path / file).read_text()[:40]) and None


def removed(file: str) -> Change:
    return lambda path: (path / file).unlink()


def none_counted(path: Path) -> None:
    """As of a run that went on from its last checkpoint after its rows had been lost."""
    removed("epochs.jsonl")(path)
    edit("summary.json", epochs_done=0, train_time_s=0.0)(path)


def nested(path: Path) -> None:
    (path / "environment.json").write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")


# What is done to a record of four epochs -> a part of the reason why it is not believed.
DAMAGED: dict[str, tuple[Change, str]] = {
    "doubled rows": (edit_rows(lambda r: [x for x in r for _ in "ab"]), "doubled"),
    "first row dropped": (edit_rows(lambda r: r[1:]), "row 1 is of epoch 2 after 0"),
    "last row dropped": (edit_rows(lambda r: r[:-1]), "has 3 rows, summary.json counts 4"),
    "a row in between dropped": (edit_rows(lambda r: [r[0], *r[2:]]), "of epoch 3 after 1"),
    "a torn row in between": (edit_rows(lambda r: [r[0], r[1][:9], *r[2:]]), "epoch 3 after 1"),
    "rows in disorder": (edit_rows(lambda r: r[::-1]), "row 1 is of epoch 4 after 0"),
    "no rows": (removed("epochs.jsonl"), "has 0 rows, summary.json counts 4"),
    "rows that nobody counted": (lambda p: none_counted(p), "epochs.jsonl has no row beside the"),
    "less than its part": (edit("summary.json", wall_s=0.001), "wall_s (0.001) is less than its"),
    "measuring for longer": (
        edit("environment.json", link={"took_s": 600.0}), "measuring took 600 s: with train_time",
    ),
    "another run's rows": (in_row(epoch_time_s=99.0), "do not belong together: train_time_s is 1"),
    "another accuracy": (edit("summary.json", accuracy=0.5), "together: accuracy is 0.936"),
    "another accuracy in its row": (in_row(-1, accuracy=0.5), "together: accuracy is 0.5 by the"),
    "another f1": (edit("summary.json", f1=0.5), "together: f1 is 0.935"),
    "another loss": (edit("summary.json", eval_loss=0.01), "together: eval_loss is 0.211"),
    "another rate": (edit("summary.json", train_samples_per_s=9e3), "train_samples_per_s is"),
    "another best value": (edit("summary.json", best_value=0.99), "best_value (accuracy) is 0.936"),
    "another best epoch": (edit("summary.json", best_epoch=1.5), "best_epoch (accuracy) is"),
    "more updates": (edit("summary.json", updates=9999), "together: updates is "),
    "more samples": (edit("summary.json", samples=9999), "together: samples is "),
    "more samples in a row": (in_row(samples=9999), "together: samples is "),
    "another batch in a row": (in_row(effective_batch=999), "effective_batch of epoch 1 is 999, b"),
    "another batch": (edit("environment.json", effective_batch=999), "effective_batch is 999, but"),
    "another run's settings": (edit("settings.json", lr=0.25), "settings.json is that of another"),
    "shrinking updates": (in_row(1, updates=1), "epochs.jsonl: updates is 1 at epoch 2 after"),
    "shrinking time": (in_row(1, wall_s=0.001), "epochs.jsonl: wall_s is 0.001 at epoch 2 after"),
    "more time than attempts": (in_row(-1, wall_s=9999.0), "more than the"),
    "another rate in a row": (in_row(train_samples_per_s=9e3), "train_samples_per_s of epoch 1 is"),
    "a row changed": (in_row(checksum="0"), "epochs.jsonl: row 1 is not as it was written"),
    "a checksum removed": (edit_rows(vouched_first), "epochs.jsonl: row 2 is not as it was wri"),
    "a changed attempt": (edit_rows(vouched_first, "attempts.jsonl"), "attempts.jsonl: row 2 is"),
    "a summary changed": (edit("summary.json", checksum="0"), "summary.json is not as it was wr"),
    "another wall time": (edit("summary.json", wall_s=9999.0), "attempts.jsonl and summary.json"),
    "other losses": (edit("summary.json", lost_s=5.0), "together: lost_s is 0"),
    "other restarts": (edit("summary.json", restarts=5), "together: restarts is 0"),
    "another goodput": (edit("summary.json", goodput_share=0.01), "together: goodput_share is"),
    "other processor time": (edit("summary.json", user_s=9999.0), "together: user_s is"),
    "other processes": (edit("environment.json", processes_per_node=8), "processes is 8, but 1 in"),
    "negative rate": (edit("summary.json", train_samples_per_s=-100.0), "expected number >= 0"),
    "no rate": (edit("summary.json", train_samples_per_s=0), "is 0 in a finished run"),
    "accuracy of 7": (edit("summary.json", accuracy=7), "accuracy is '7': expected number from 0"),
    "accuracy of 7 in a row": (in_row(accuracy=7), "epochs.jsonl: accuracy is '7'"),
    "negative time": (in_row(epoch_time_s=-1.0), "expected number >= 0, s"),
    "a newer summary": (edit("summary.json", schema=99), "summary.json was written with schema 99"),
    "newer settings": (edit("settings.json", schema=99), "settings.json was written with schema"),
    "true as schema": (edit("summary.json", schema=True), "with schema True"),
    "an outcome of no kind": (edit("summary.json", outcome="done"), "outcome is 'done'"),
    "true as a number": (edit("summary.json", updates=True), "updates is 'True': expected integer"),
    "an endless integer": (edit("summary.json", samples=10**400), "samples is '1000"),
    "an endless metric": (in_row(my_metric=10**400), "my_metric is '1000"),
    "infinity": (edit("summary.json", wall_s=float("inf")), "summary.json is not readable"),
    "not a number": (edit("summary.json", wall_s=float("nan")), "summary.json is not readable"),
    "half of the environment": (cut("environment.json"), "environment.json is not readable"),
    "no environment": (removed("environment.json"), "environment.json is missing"),
    "no attempts": (removed("attempts.jsonl"), "attempts.jsonl is missing beside the summary of a"),
    "torn attempts": (
        edit_rows(lambda r: [x[:9] for x in r], "attempts.jsonl"), "jsonl has no readable start be",
    ),
    "no start": (edit_rows(lambda r: r[1:], "attempts.jsonl"), "has no readable start beside the"),
    "no settings": (removed("settings.json"), "settings.json is missing beside epochs.jsonl"),
    "neither settings nor rows": (
        lambda p: [removed(file)(p) for file in ("settings.json", "epochs.jsonl")] and None,
        "settings.json is missing beside environment.json",
    ),
    "half of the settings": (cut("settings.json"), "settings.json is not readable as JSON"),
    "a list as the settings": (lambda p: (p / "settings.json").write_text("[]") and None, "not re"),
    "deep nesting": (nested, "environment.json is not readable as JSON"),
    "no nodes": (edit("environment.json", nodes=None), "environment.json: nodes is missing"),
    "a link of words": (edit("environment.json", link={"asked": {"delay_ms": "x"}}), "asked.delay"),
    "a long set-up": (edit("settings.json", setup="1" * 300), "that of another run: 1111"),
    "a long model": (edit("settings.json", model="1" * 300), "that of another run: 1_1/1111"),
    "half a character": (edit("summary.json", reason="\ud800"), "summary.json is not readable"),
}  # fmt: skip


def whole(tmp_path: Path, name: str) -> Path:
    """A real run, whose folder has the name that training gave it; without checksums, so that it is
    checked by what belongs together.
    """
    run = next(run for run in find_runs(PUBLISHED / "vit" / "1_1") if "_e4_" in run.path.name)
    target = tmp_path / name / run.path.relative_to(PUBLISHED)
    write_folder(target, texts(run))
    for file in ("epochs.jsonl", "attempts.jsonl"):
        rows = map(json.loads, (target / file).read_text().splitlines())
        bare = ({name: row[name] for name in row if name != OWN} for row in rows)
        (target / file).write_text("".join(f"{json.dumps(row)}\n" for row in bare))
    summary = json.loads((target / "summary.json").read_text())
    summary.pop(OWN)
    (target / "summary.json").write_text(json.dumps(summary))
    return target


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_record_is_not_believed(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, reason = DAMAGED[damage]
    bad = whole(tmp_path, "bad")
    assert recorded(RunFolder(bad), with_ranks=True).problem is None
    change(bad)
    problem = recorded(RunFolder(bad)).problem
    assert problem is not None and reason in problem and len(problem) < 200, problem
    # Alone it is refused in a line.
    assert main(["table", str(bad)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("harness table: error: no run can be read: ") and err.count("\n") == 1


def test_attempts_with_an_odd_value_are_not_lost(tmp_path: Path) -> None:
    """A clock that was set back must not hide a finished run."""
    path = whole(tmp_path, "odd")
    edit_rows(
        lambda lines: [json.dumps({**json.loads(lines[0]), "gap_s": -1.0}), *lines[1:]],
        "attempts.jsonl",
    )(path)
    record = recorded(RunFolder(path))
    assert record.problem is None and not record.attempts


def test_the_rate_of_a_device_where_devices_come_and_go(tmp_path: Path) -> None:
    """It is samples by the seconds of each device, not by the devices of the last row."""
    rows = [
        row | {"timed_samples": 2000, "timed_s": seconds, "train_samples_per_s": 2000 / seconds,
               "train_samples_per_s_per_gpu": 100.0}
        for row, seconds in zip(epochs(0.5, 0.9), (10.0, 20.0), strict=True)
    ]  # fmt: skip
    known = of_rows(rows)
    assert known["train_samples_per_s"] == pytest.approx(4000 / 30)
    assert known["train_samples_per_s_per_gpu"] == pytest.approx(100.0)
    assert of_rows(rows[1:])["train_samples_per_s_per_gpu"] == pytest.approx(100.0)
    plan = Plan(tmp_path)
    folder = plan.run(epochs=rows)
    edit("summary.json", train_samples_per_s_per_gpu=100.0)(folder)
    assert recorded(RunFolder(folder)).problem is None
    edit("summary.json", train_samples_per_s_per_gpu=4000 / 30)(folder)
    problem = recorded(RunFolder(folder)).problem
    assert problem is not None and "train_samples_per_s_per_gpu is 100.0 by the rows" in problem


def test_a_bad_record_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "outputs"
    good, bad = (record(root / "bert" / "1_2" / name, "--seed", name) for name in ("1", "2"))
    edit("summary.json", accuracy=7)(bad.path)
    frame = load_runs(root).set_index("seed")
    assert dict(frame["outcome"]) == {1: "finished", 2: "unreadable"}
    assert frame.loc[1, "accuracy"] == 0.6 and frame["accuracy"].isna()[2]
    assert set(load(root)["seed"]) == {1}
    named = f"warning: not read: {bad.path}: summary.json: accuracy is '7': expected number from 0"
    assert capsys.readouterr().err.count(named) == 2
    for json_or_not in ([], ["--json"]):
        assert main(["table", str(root), *json_or_not]) == 0
        told = capsys.readouterr()
        assert "0.6" in told.out and "unreadable" in told.out and named in told.err
    for verb in (["compare", f"{root}:seed=1", f"{root}:seed=1"], ["report", str(root)]):
        assert main(verb) == 0, verb
        assert named.split("not read: ")[1][-40:] in capsys.readouterr().err
    bad.settings.write_text("{")
    assert main(["table", str(root), "--json"]) == 0
    told = capsys.readouterr()
    assert [run["outcome"] for run in json.loads(told.out)["runs"]] == ["finished", "unreadable"]
    good.settings.write_text("{")
    assert main(["table", str(root)]) == 2
    assert "no run can be read: " in (err := capsys.readouterr().err) and "(and 1 more)" in err


def test_a_run_that_has_lost_its_settings_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It vanished from every reader but the table of its sweep, and nothing was said."""
    _, runs = copied(tmp_path)
    root, lost = tmp_path, runs[0]
    before = load_runs(root)
    removed("settings.json")(lost)
    line = f"{lost}: settings.json is missing beside epochs.jsonl: restore the file"
    frame = load_runs(root)
    assert len(frame) == len(before) and [*frame[frame["outcome"] == "unreadable"]["path"]] == [
        str(lost)
    ]
    assert f"warning: not read: {line}" in capsys.readouterr().err
    assert main(["table", str(root), "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["not_read"] == [line] and line in told.err
    found = read_selected(str(root), None)
    assert found.not_read == (line,) and len(found.runs) == len(before) - 1
    assert [problem for problem in read_all(root)[1] if line in problem]
    assert main(["table", str(lost)]) == 2
    assert f"no run can be read: {line}" in capsys.readouterr().err
    # A launcher leaves an outcome alone where a run never began, which is no loss.
    for file in lost.iterdir():
        if file.is_file() and file.name not in ("summary.json", "attempts.jsonl"):
            file.unlink()
    assert len(load_runs(root)) == len(before) - 1


def test_torn_lines_of_attempts_are_counted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = whole(tmp_path, "torn")
    edit_rows(lambda r: [*r, r[0][:30]], "attempts.jsonl")(path)
    assert recorded(RunFolder(path)).broken_lines == {"attempts.jsonl": 1}
    assert {*load(path)["broken_lines"]} == {1}
    line = f"{path}: 1 line of attempts.jsonl not readable, left out"
    assert f"not read: {line}" in capsys.readouterr().err
    assert main(["table", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_read"] == [line]
    assert main(["explain", str(path)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "1 torn line(s) of attempts.jsonl are left out." in told


def test_a_baseline_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, runs = copied(tmp_path)
    (base,) = (path for path in runs if path.parts[-3:-1] == ("vit", "1_1"))
    (other,) = (path for path in runs if path.parts[-3:-1] == ("vit", "1_2"))
    assert main(["explain", str(other)]) == 0
    assert capsys.readouterr().err == ""
    cut("summary.json")(base)
    assert main(["explain", str(other)]) == 0
    told = capsys.readouterr()
    assert f"warning: not read: {base}: summary.json" in told.err
    assert "No comparable run" in " ".join(told.out.split())


def test_readings_are_believed_once_they_are_checked(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(plan.run("1_1", 4, 1))
    reading = {"unix": 5.0, "gpus": [{"power_w": 100.0}], "node": {"cpu_percent": 5.0}}
    folder.telemetry(0).parent.mkdir()
    folder.telemetry(0).write_text(json.dumps(reading) + "\n" + json.dumps({"gpus": []}))
    assert telemetry_of(folder) == {0: [reading]}
    for odd in ({"unix": -1.0}, {"gpus": [{"power_w": -1.0}]}, {"gpus": 3}, {"node": {"cpu": []}}):
        folder.telemetry(1).write_text(json.dumps(reading | odd) + "\n" + json.dumps(reading))
        believed = telemetry_of(folder)
        assert "cpu" in str(odd) or set(believed) == {0}
    assert "warning: not read: " in capsys.readouterr().err


def test_the_mark_of_another_training_goes_with_its_row(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half an environment.json took the mark and the comparison away, and nothing was said."""
    plan.run("1_1", 4, 1)
    other = plan.run("1_2", 4, 1, 2, updates=50)
    assert main(["table", str(plan.write())]) == 0
    assert "†" in capsys.readouterr().out
    cut("environment.json")(other)
    assert main(["table", str(plan.folder), "--json"]) == 0
    told = capsys.readouterr()
    (line,) = json.loads(told.out)["not_read"]
    assert line == f"bert/1_2_4_1: {recorded(RunFolder(other)).problem}" and line in told.err
    assert main(["table", str(plan.folder)]) == 0
    assert "unreadable: environment.json is not readable as JSON" in capsys.readouterr().out


def test_a_record_of_another_run_is_not_that_of_the_plan(plan: Plan) -> None:
    edit("settings.json", per_gpu_batch=8, setup="1_1_tag")(plan.run("1_1", 4, 1))
    edit("settings.json", per_gpu_batch=4, setup="1_1_tag")(plan.run("1_1", 4, 2))
    (line,) = read_sweep(plan.write()).not_read
    assert "settings.json is that of another run: per_gpu_batch 8, planned was 4" in line


def test_published_records_are_believed() -> None:
    records = [recorded(folder, with_ranks=True) for folder in find_runs(PUBLISHED)]
    assert [r.line for r in records if r.problem] == [] and len(records) > 400


def test_what_interruptions_leave_is_believed(tmp_path: Path) -> None:
    """A run that is killed, goes on, loses a node, ends inside an epoch, or has just begun."""
    for n, of in enumerate((lambda r: [*r, '{"epoch": 5, "accur'], lambda r: [r[0], "{", *r[1:]])):
        path = whole(tmp_path, f"torn{n}")
        edit_rows(of)(path)
        found = recorded(RunFolder(path))
        assert found.problem is None and len(found.epochs) == 4
        assert found.broken_lines == {"epochs.jsonl": 1}
    path = whole(tmp_path, "going")
    removed("summary.json")(path)
    edit_rows(lambda r: r[:1])(path)
    assert recorded(RunFolder(path)).problem is None
    with_ranks(path, {"compute_s": 1.0}, {"compute_s": None}, {"compute_s": 1.0})
    assert recorded(RunFolder(path), with_ranks=True).problem is None
    for file in ("epochs.jsonl", "environment.json"):
        removed(file)(path)
    assert recorded(RunFolder(path)).problem is None
    path = whole(tmp_path, "inside")
    in_row(3, epoch=3.4)(path)
    edit("summary.json", best_epoch=3.4)(path)
    assert recorded(RunFolder(path)).problem is None


def test_a_script_of_one_s_own_may_count_in_per_cent(tmp_path: Path) -> None:
    run = record(tmp_path / "own")
    settings = json.loads(run.settings.read_text())
    edit("summary.json", accuracy=87.5)(run.path)
    in_row(-1, accuracy=87.5)(run.path)
    assert "expected number from 0 to 1" in (recorded(run).problem or "")
    run.settings.write_text(json.dumps({k: v for k, v in settings.items() if k != "script"}))
    assert recorded(run).problem is None


def test_a_fraction_of_epochs_is_read(tmp_path: Path) -> None:
    run = record(tmp_path / "own")
    settings = json.loads(run.settings.read_text())
    del settings["script"]
    run.settings.write_text(json.dumps(settings | {"epochs": 1.5}))
    assert recorded(run).problem is None and load(run.path)["epochs"].tolist() == [1.5, 1.5]


def test_runs_below_links_are_found_once(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "outputs", tmp_path / "elsewhere"
    own, far = record(root / "bert" / "1_2" / "own"), record(elsewhere / "bert" / "far")
    (root / "a").symlink_to(elsewhere)  # before all others in the order of names
    (root / "again").symlink_to(root / "bert")
    (elsewhere / "back").symlink_to(root)
    (root / "bert" / "up").symlink_to(tmp_path)
    assert [run.path for run in find_runs(root)] == [root / "a" / "bert" / "far", own.path]
    assert len(load(root)) == 4 and len(load(far.path)) == 2


def test_no_control_character_reaches_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\x9b\u202e<b>"
    record(tmp_path / "a", "--model", f"m{evil}", "--seed", "1")
    record(tmp_path / "b", outcome="failed", reason=f"reason {evil}")
    assert main(["table", str(tmp_path)]) == 0
    assert main(["table", str(tmp_path / f"none{evil}")]) == 2
    told = "".join(capsys.readouterr())
    assert r"\x1b[2J" in told and not {*"\x1b\x07\x9b\u202e"} & {*told}


def test_a_target_is_not_reached_by_rows_of_another(plan: Plan) -> None:
    """The sums over epochs that a table shows are those of rows that belong together."""
    path = plan.run("1_1", 4, 1, epochs=epochs(0.5, 0.95))
    folder = plan.write(target={"metric": "accuracy", "value": 0.9})
    (run,) = read_sweep(folder).runs
    assert run.measures["tta_train_s"] == 4.0
    edit_rows(lambda rows: rows[1:])(path)
    (run,) = read_sweep(folder).runs
    assert run.state == "unreadable" and run.measures == {}
