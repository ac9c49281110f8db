"""Reading records: frames of epochs and runs, and the table of what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.cli import main
from harness.core.records import ASIDE, SCHEMA, RunFolder
from harness.core.records.summary import disturbance
from harness.core.settings import UserError
from harness.read import load, load_runs
from harness.read.records.recorded import settings_of
from harness.read.records.runs import read_run
from harness.read.records.sweeps import read_all
from harness.read.tables.columns import DISTURBED
from tests.support.broken_runs import only_run
from tests.support.paired import Verb
from tests.support.ranks import script
from tests.support.records import lines, record


@pytest.fixture
def records(tmp_path: Path) -> Path:
    root = tmp_path / "outputs"
    record(root / "bert" / "1_2" / "good", "--lr", "3e-5", "--seed", "1", "--warmup_steps", "9")
    record(root / "bert" / "1_2" / "going", "--seed", "2", epochs=1, outcome=None)
    reason = "MemoryError: planted: no room for 7 GiB"
    record(root / "bert" / "1_2" / "oom", "--seed", "3", epochs=0, outcome="oom", reason=reason)
    record(root / "vit" / "deep" / "down" / "here", "--seed", "4", machine="b-gpux8", epochs=3)
    record(root / "bert" / "1_2" / f"good{ASIDE}1", "--seed", "5")
    return root


def test_published_records_are_read_where_they_are_named(records: Path) -> None:
    record(records / "published" / "bert" / "1_2" / "other", "--seed", "6")
    assert 6 not in set(load(records)["seed"])
    assert set(load(records / "published")["seed"]) == {6}
    sweeps, _ = read_all(records)
    assert all(run.settings["seed"] != 6 for sweep in sweeps for run in sweep.runs)


def test_a_row_an_epoch_with_the_settings(records: Path) -> None:
    frame = load(records)
    assert len(frame) == 2 + 1 + 0 + 3
    assert sorted(set(frame["seed"])) == [1, 2, 4]  # 3 has no epoch, 5 was set aside
    good = frame[frame["seed"] == 1]
    assert list(good["epoch"]) == [1, 2] and list(good["updates"]) == [30, 60]
    assert list(good["accuracy"]) == [0.5, 0.6]
    for column, value in {
        "script": "bert", "setup": "1_2", "lr": 3e-5, "per_gpu_batch": 32, "model": "bert-nano",
        "trainer_warmup_steps": 9, "machine": "a-cpux2", "processes": 2, "effective_batch": 64,
        "outcome": "finished", "broken_lines": 0,
        "precision": 0.25, "number_format": "fp32",  # the metric and the setting
    }.items():  # fmt: skip
        assert list(good[column]) == [value] * 2, column
    assert set(good["path"]) == {str(records / "bert" / "1_2" / "good")}
    assert "training_arguments" not in frame and "schema" not in frame
    assert set(frame[frame["seed"] == 2]["outcome"]) == {"unfinished"}
    assert list(frame["path"]) == sorted(frame["path"])  # a stable order
    assert frame["accuracy"].dtype == float and frame["seed"].dtype == int


def test_a_row_a_run_failures_included(records: Path) -> None:
    runs = load_runs(records).set_index("seed")
    assert dict(runs["outcome"]) == {1: "finished", 2: "unfinished", 3: "oom", 4: "finished"}
    assert runs.loc[3, "reason"] == "MemoryError: planted: no room for 7 GiB"
    assert runs.loc[1, "reason"] is None or pd.isna(runs.loc[1, "reason"])
    assert runs.loc[4, "accuracy"] == pytest.approx(0.7)
    assert pd.isna(runs.loc[3, "accuracy"]) and pd.isna(runs.loc[2, "accuracy"])
    assert runs.loc[1, "number_format"] == "fp32" and runs.loc[1, "precision"] == 0.25


def test_a_run_s_own_folder_is_enough(records: Path) -> None:
    assert len(load(records / "bert" / "1_2" / "good")) == 2
    assert len(load_runs(str(records / "bert" / "1_2" / "oom"))) == 1
    # One that was set aside is read where it is named itself.
    assert set(load(records / "bert" / "1_2" / f"good{ASIDE}1")["seed"]) == {5}


def test_what_devices_do_has_columns_of_its_own(records: Path) -> None:
    """Of the records that know it; older ones, and those without a GPU, are read beside them."""
    power = {"mean": 300.5, "p95": 400.0, "max": 410.0}
    gpu = {"power_w": power, "temperature_c": None, "throttled": {"heat": 0.25}}
    rows = [
        {"epoch": 1, "mfu": 0.4, "gpu": gpu, "node": {"disk_read_bytes": 7}},
        {"epoch": 2, "mfu": None, "gpu": None, "node": None},
    ]
    lines(RunFolder(records / "bert" / "1_2" / "good").epochs, rows)
    frame = load(records)
    first, second, *older = frame.sort_values(["seed", "epoch"]).to_dict("records")
    assert first["mfu"] == 0.4 and first["node_disk_read_bytes"] == 7
    found = [first[f"gpu_power_w_{name}"] for name in power]
    assert found == [300.5, 400.0, 410.0] and first["gpu_throttled_heat"] == 0.25
    assert first["gpu_temperature_c"] is None or pd.isna(first["gpu_temperature_c"])
    assert all(pd.isna(row["gpu_power_w_mean"]) for row in (second, *older)) and len(older) == 4
    assert not {"gpu", "node"} & set(frame)


def test_broken_lines_are_counted(records: Path) -> None:
    epochs = RunFolder(records / "bert" / "1_2" / "good").epochs
    epochs.write_text(epochs.read_text() + 'no json\n[1]\n{"epoch": 3, "accur')
    frame = load(records)
    assert list(frame[frame["seed"] == 1]["broken_lines"]) == [3, 3]
    assert set(frame[frame["seed"] == 4]["broken_lines"]) == {0}


def test_another_schema_is_refused(records: Path) -> None:
    new = record(records / "bert" / "new", schema=SCHEMA + 1)
    for read in (load, load_runs):
        with pytest.raises(UserError, match=rf"schema {SCHEMA + 1}, this reads {SCHEMA}"):
            read(new.path)
    record(records / "other" / "none", schema=None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="schema None"):
        load(records / "other")


def test_settings_that_cannot_be_read_are_named(records: Path) -> None:
    file = RunFolder(records / "bert" / "1_2" / "good").settings
    file.write_text('{"schema": 1, "lr')
    with pytest.raises(UserError, match=r"good: settings\.json is not readable"):
        load(file.parent)


def test_no_records_and_no_folder(tmp_path: Path) -> None:
    assert load(tmp_path).empty and load_runs(tmp_path).empty
    with pytest.raises(UserError, match=r"there is no such folder$"):
        load(tmp_path / "none")
    (tmp_path / "outputs").mkdir()
    with pytest.raises(UserError, match=rf"no such folder: did you mean {tmp_path}/outputs\?"):
        load(tmp_path / "output")


@pytest.mark.parametrize("below", ["", "outputs/vit/"])
def test_the_folder_that_was_meant_can_be_typed(
    below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / below / "1_1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"did you mean {below}1_1\?"):
        load(Path(f"{below}2_1"))


def test_half_of_a_record_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    """A run killed at its very start has settings and nothing else."""
    folder = record(tmp_path / "run")
    for file in (folder.environment, folder.epochs, folder.summary):
        file.unlink()
    assert load(tmp_path).empty
    (run,) = load_runs(tmp_path).to_dict("records")
    assert run["outcome"] == "unfinished" and run["machine"] is None
    assert main(["table", str(tmp_path)]) == 0


OFF = {"muon": False, "balance": None}
LACKING = ("seed", "lr", "exchange", "repeat")


@pytest.mark.parametrize(
    ("changes", "exchange", "strategy"),
    [
        ({"imported": {"source": "a file"}}, None, "ddp"),
        ({"script": None}, None, None),
    ],
)
def test_a_record_that_lacks_a_flag_is_refused(
    tmp_path: Path, changes: dict[str, Any], exchange: str | None, strategy: str | None
) -> None:
    """Not so imported records, those of LogCallback, which knows no flags, and newer options."""
    file = record(tmp_path / "run").settings
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({n: v for n, v in settings.items() if n not in OFF}))
    run = read_run(RunFolder(file.parent), {}, "run", None)
    assert run.reason is None and run.settings == settings_of(RunFolder(file.parent))
    assert {name: run.settings[name] for name in OFF} == OFF
    file.write_text(json.dumps({n: v for n, v in settings.items() if n not in LACKING}))
    reason = read_run(RunFolder(file.parent), {}, "run", None).reason
    assert reason == "settings.json lacks lr, seed, exchange, and 1 more: " + (
        "read it with the version of this project that wrote it (commit in environment.json)"
    )
    settings |= changes
    for name in ("exchange", *(name for name, value in changes.items() if value is None)):
        del settings[name]
    if strategy is None:
        del settings["strategy"]
    file.write_text(json.dumps(settings))
    run = read_run(RunFolder(file.parent), {}, "run", None)
    assert (run.identity["exchange"], run.identity["strategy"]) == (exchange, strategy)


def test_table_shows_every_run(records: Path, table: Verb) -> None:
    said = table(records)
    lines = [line.split() for line in said.splitlines() if " 1_2 " in f"{line} "]
    rows = {words[-1]: words for words in lines}
    assert sorted(rows) == ["finished", "interrupted", "oom"], said
    assert len(lines) == 4
    # What is the same for all runs of a machine is said once.
    same = "all: script bert, strategy ddp, model bert-nano, dataset embedded:english, precision"
    assert f"{same} fp32, batch 64" in said
    head = next(line for line in said.splitlines() if "setup" in line)
    for heading in ("setup", "lr", "seed", "accuracy", "f1", "outcome"):
        assert heading in head
    (good,) = (line for line in said.splitlines() if "3e-05" in line)
    assert good.split() == [
        "1_2", "3e-05", "1", "60", "0.6000", "0.7654", "1,234", "9.9", "finished",
    ]  # fmt: skip
    assert rows["oom"].count("-") == 3  # updates, accuracy, f1: unknown, not zero
    # Unlike machines stand apart, and a failure says why.
    assert said.index("a-cpux2") < said.index("3e-05") < said.index("b-gpux8")
    assert "oom: MemoryError: planted: no room for 7 GiB" in said
    assert "good" + ASIDE not in said
    assert str(records) in said


def test_runs_that_have_not_finished_are_counted_where_no_column_marks_them(
    tmp_path: Path, table: Verb
) -> None:
    for seed, outcome in enumerate(("finished", "oom", "failed", "failed")):
        record(tmp_path / str(seed), "--seed", str(seed), outcome=outcome)
    counted = "3 of 4 runs have not finished: 2 failed, 1 oom\n"
    said = table(tmp_path)
    assert said.count("failed") == 2 and said.count("oom") == 1  # in their rows
    assert counted in table(tmp_path, "--columns", "seed,accuracy")
    latex = table(tmp_path, "--latex", "--columns", "seed,accuracy")
    assert latex.endswith(f"% {counted}")
    assert "not finished" not in table(tmp_path, "--columns", "seed,outcome")
    assert "not finished" not in table(tmp_path / "0", "--columns", "seed")


def test_mfu_stands_beside_gpu_utilisation(records: Path, table: Verb) -> None:
    assert "MFU" not in table(records) and "J/sample" not in table(records)
    file = RunFolder(records / "bert" / "1_2" / "good").summary
    summary = json.loads(file.read_text())
    for known, shown in (
        ({"mfu": 0.412, "gpu_utilisation_percent": 97.4, "joules_per_sample": 1.234},
         ["0.412", "97", "1.23"]),
        ({"mfu": 0.412, "gpu_utilisation_percent": None}, ["0.412", "-"]),
        ({"gpu_utilisation_percent": 97.4}, ["-", "97"]),
    ):  # fmt: skip
        file.write_text(json.dumps({**summary, "mfu": None, **known}))
        said = table(records)
        # Before the wall time and the outcome.
        (good,) = (line.split() for line in said.splitlines() if "3e-05" in line)
        assert good[-2 - len(shown) : -2] == shown
        # "GPU busy %" stands on several lines, the last of them beside "MFU".
        headings = [line.split() for line in said.splitlines()[:6]]
        assert any("MFU %" in " ".join(line) for line in headings)
        assert any("busy" in line for line in headings)


def test_brackets_are_not_taken_for_markup(tmp_path: Path, table: Verb) -> None:
    record(tmp_path / "run", "--model", "[bold]m", outcome="oom", reason="[rank0]: no room :bomb:")
    said = table(tmp_path)
    assert "oom: [rank0]: no room :bomb:" in said and "[bold]m" in said


@pytest.mark.process
def test_table_of_real_records(tmp_path: Path, table: Verb) -> None:
    argv = ["--tiny", "--train_size", "64", "--test_size", "20", "--epochs", "1", "--b", "16"]
    done = script("vit", *argv, "--o", str(tmp_path), count=2)
    assert done.code == 0, done.err
    (line,) = (line for line in table(tmp_path).splitlines() if "vit-nano" in line)
    (epoch,) = load(tmp_path).to_dict("records")
    shown = line.split()
    assert shown[:4] == ["vit", "1_2", "ddp", "vit-nano"]
    assert shown[4:9] == ["embedded:digits", "fp32", "32", "0.0015", "42"]
    assert f"{epoch['accuracy']:.4f}" in shown and f"{epoch['eval_loss']:.4f}" in shown
    assert epoch["processes"] == 2 and epoch["effective_batch"] == 32
    # Other programs may have been busy just then, and the record says so.
    folder = only_run(tmp_path)
    busy = disturbance((folder.read_environment() or {}).get("launch"), folder.read_epochs()[0])
    assert shown[-1] == ("finished" if busy is None else f"finished{DISTURBED}")
    # A second measurement takes the place of the first.
    done = script("vit", *argv, "--rerun", "--o", str(tmp_path), count=2)
    assert done.code == 0, done.err
    (run,) = load_runs(tmp_path).to_dict("records")
    assert run["outcome"] == "finished" and run["attempts"] == 1
    (aside,) = tmp_path.glob(f"vit/1_2/*{ASIDE}*")
    assert len(load(aside)) == 1


def test_table_is_whole_with_long_names(tmp_path: Path, table: Verb) -> None:
    name = "/data/models/" + "a-very-long-name-of-a-model-" * 4
    record(tmp_path / "run", "--model", name, "--lr", "3e-5")
    said = table(tmp_path)
    row = next(line for line in said.splitlines() if "3e-05" in line)
    assert "0.6000" in row and "1,234" in row and row.split()[-1] == "finished"


def test_table_is_readable_on_a_common_terminal(
    records: Path, table: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    said = table(records)
    for word in ("bert-nano", "3e-05", "0.6000", "1,234", "finished", "interrupted", "oom"):
        assert word in said, word


def test_table_tells_strategies_from_each_other(tmp_path: Path, table: Verb) -> None:
    for name, flags in {
        "plain": (),
        "small": ("--compress", "powersgd:2"),
        "apart": ("--strategy", "diloco", "--sync_every", "50"),
    }.items():
        record(tmp_path / name, *flags)
    said = [" ".join(line.split()) for line in table(tmp_path).splitlines()]
    for name in ("1_2 ddp 60", "1_2 ddp powersgd:2 60", "1_2 diloco h50 60"):
        assert sum(line.startswith(name) for line in said) == 1, said


def test_table_of_records_of_other_scripts(tmp_path: Path, table: Verb) -> None:
    """LogCallback alone knows no settings of ours; its records may lie beside those that do."""
    record(tmp_path / "ours")
    plain = record(tmp_path / "plain")
    settings = {"schema": SCHEMA, "training_arguments": {"learning_rate": 0.1}}
    plain.settings.write_text(json.dumps(settings))
    assert table(tmp_path).count("finished") == 2
    assert table(tmp_path / "plain").count("finished") == 1
    assert len(load(tmp_path)) == 4


def test_table_says_what_is_missing(tmp_path: Path, table: Verb) -> None:
    for root, words in (
        (tmp_path, ["no records below", str(tmp_path), "--tiny"]),
        (tmp_path / "none", ["there is no such folder", "none"]),
    ):
        message = table.refused(root)
        assert all(word in message for word in words), message
    record(tmp_path / "new", schema=99)
    assert "schema 99" in table.refused(tmp_path)


@pytest.mark.parametrize(
    ("argv", "word"), [(["table", "a", "b"], "unexpected b"), (["table", "--sort", "lr"], "--sort")]
)
def test_table_refuses_what_it_does_not_know(argv: list[str], word: str, table: Verb) -> None:
    assert word in table.refused(*argv[1:])


def test_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0 and main(["table", "--help"]) == 0
    assert "table" in capsys.readouterr().out
    assert main(["tabel"]) == 2
    assert "did you mean table?" in capsys.readouterr().err
