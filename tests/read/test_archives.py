"""Archives hold records exactly, and every verb reads them as it reads folders."""

from __future__ import annotations

import gzip
import json
import shutil
import tracemalloc
from pathlib import Path

import pytest

from harness.cli import main
from harness.core.records import RunFolder, find_runs
from harness.core.records import archives as of
from harness.core.settings import UserError
from harness.launch.ahead import ahead
from harness.launch.outcome import State
from harness.launch.plan import plan as planned
from harness.launch.sweepfile import load as load_file
from harness.read import load
from tests.support.paired import imported, text_file
from tests.support.records import Plan, epochs, lines, record, with_epochs, with_ranks
from tests.support.sweeps import sweep_file


@pytest.fixture
def sweep(plan: Plan) -> Path:
    for seed in (1, 2):
        with_ranks(plan.run("1_1", seed=seed, epochs=epochs(0.5, 0.6)), {"user_s": 1.0})
        plan.run("1_2", seed=seed, devices=2, epochs=epochs(0.4, 0.7))
    return plan.write()


def tree(root: Path) -> dict[str, bytes]:
    files = (f for f in root.rglob("*") if f.is_file() and not f.name.endswith(of.SUFFIX))
    return {f.relative_to(root).as_posix(): f.read_bytes() for f in files}


def packed_alone(sweep: Path) -> Path:
    """The archive of a sweep whose folders are gone."""
    assert main(["pack", str(sweep)]) == 0
    for folder in ("bert", "sweeps"):
        shutil.rmtree(sweep.parents[1] / folder)
    return sweep.parents[1] / f"sizes{of.SUFFIX}"


def test_unpacking_gives_the_files_that_were_packed(sweep: Path) -> None:
    root = sweep.parents[1]
    torn = root / "bert" / "1_1_4_1"
    with (torn / "epochs.jsonl").open("ab") as file:
        file.write(b'{"epoch": 3, "accu\xff')
    (torn / "attempts.jsonl").write_text('{"event": "start"}\n[1]\nNaN\n{"a": "\\ud800"}\n')
    (torn / "summary.json").write_text('{"schema": 1,   "outcome": "finished"}')
    (torn / "checkpoint-4").mkdir()
    (torn / "checkpoint-4" / "config.json").write_text("{}")
    (torn / "notes.txt").write_text("not a record")
    before = tree(root)
    rows = {run.path: (run.read_epochs(), run.read_attempts()) for run in find_runs(root)}
    archive = packed_alone(sweep)
    first = archive.read_bytes()
    found = find_runs(root)
    assert {run.path: (run.read_epochs(), run.read_attempts()) for run in found} == rows
    assert main(["unpack", str(archive)]) == 0
    left_out = {"bert/1_1_4_1/checkpoint-4/config.json", "bert/1_1_4_1/notes.txt"}
    assert tree(root) == {name: text for name, text in before.items() if name not in left_out}
    assert main(["pack", str(sweep)]) == 0 and archive.read_bytes() == first


def test_verbs_read_an_archive_as_its_folders(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = sweep.parents[1]
    said = {}
    commands = [
        ["table", root], ["table", sweep, "--json"], ["table", root / "bert"],
        ["table", root / "bert" / "1_2_4_1"], ["batches", f"{sweep}:setup=1_1"],
        ["compare", f"{sweep}:setup=1_1", f"{sweep}:setup=1_2"],
        ["explain", f"{sweep}:setup=1_2"],
    ]  # fmt: skip
    for words in commands:
        said[str(words)] = main([*map(str, words)]), capsys.readouterr()
    frame = load(root)
    archive = packed_alone(sweep)
    capsys.readouterr()
    for words in commands:
        assert (main([*map(str, words)]), capsys.readouterr()) == said[str(words)], words
    assert load(root).equals(frame)
    assert main(["table", str(archive)]) == 0
    assert "Which batch?" in capsys.readouterr().out


def test_a_run_on_disk_replaces_its_archived_copy(tmp_path: Path) -> None:
    root = tmp_path / "outputs"
    run = record(root / "bert" / "1_2" / "one", "--seed", "1")
    assert main(["pack", str(root)]) == 0
    run.settings.write_text(run.settings.read_text().replace('"seed": 1', '"seed": 7'))
    run.epochs.unlink()
    (found,) = find_runs(root)
    assert (found.read_settings() or {})["seed"] == 7 and found.read_epochs() == ([], 0)
    assert not RunFolder.at(run.path).has(run.epochs)
    assert main(["unpack", str(root / f"outputs{of.SUFFIX}")]) == 0
    assert not run.epochs.exists()  # a folder that is there stays as it is


def test_a_sweep_does_not_measure_again_what_is_archived(tmp_path: Path) -> None:
    sweep = load_file(sweep_file(tmp_path, "script: vit"))
    (job,) = planned(sweep, str(tmp_path / "outputs"))
    record(job.folder.path)
    assert main(["pack", str(tmp_path / "outputs")]) == 0
    shutil.rmtree(tmp_path / "outputs" / "vit")
    assert ahead([State(job)], None)[0] == "1 done before, 0 to go"


DAMAGE = {
    "cut off": lambda whole: whole[:-20],
    "one bit": lambda whole: whole[:300] + bytes([whole[300] ^ 1]) + whole[301:],
    "a folder above": lambda whole: edited(whole, b'"bert/', b'"../bert/'),
    "an absolute folder": lambda whole: edited(whole, b'"bert/', b'"/bert/'),
    "escaped, above": lambda whole: edited(whole, b'"bert/', b'"\\u002e./bert/'),
    "escaped, absolute": lambda whole: edited(whole, b'"bert/', b'"\\/bert/'),
    "not printable": lambda whole: edited(whole, b'"bert/', b'"\\u001bbert/'),
    "half a character": lambda whole: edited(whole, b'"bert/', b'"\\ud800bert/'),
    "an escape of none": lambda whole: edited(whole, b'"bert/', b'"\\xbert/'),
    "escaped, no record": lambda whole: edited(whole, b"summary.json", b"summary.\\u0073h"),
    "no record": lambda whole: edited(whole, b"summary.json", b"summary.sh"),
    "no line of ours": lambda whole: edited(whole, b'"file"', b'"fill"'),
}


def edited(whole: bytes, old: bytes, new: bytes) -> bytes:
    return gzip.compress(gzip.decompress(whole).replace(old, new))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_archive_is_named_and_hides_nothing(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "outputs"
    record(root / "bert" / "1_2" / "one", "--seed", "1")
    assert main(["pack", str(root)]) == 0
    record(root / "bert" / "1_2" / "two", "--seed", "2")
    shutil.rmtree(root / "bert" / "1_2" / "one")
    archive = root / f"outputs{of.SUFFIX}"
    archive.write_bytes(DAMAGE[damage](archive.read_bytes()))
    capsys.readouterr()
    assert set(load(root)["seed"]) == {2}
    told = capsys.readouterr().err
    assert "damaged archive" in told and told.count("\n") == 1
    for verb in ("unpack", "table"):
        assert main([verb, str(archive)]) == 2
        assert "damaged archive" in capsys.readouterr().err
    assert main(["pack", str(root)]) == 2
    assert not (tmp_path / "bert").exists()


def test_a_small_file_that_claims_to_be_huge_is_refused(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = packed_alone(sweep)
    monkeypatch.setattr(of, "LARGEST", 100)
    assert main(["unpack", str(archive)]) == 2
    assert "more than" in capsys.readouterr().err


def test_an_archive_that_is_too_large_is_not_written(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(of, "LARGEST", 100)
    assert main(["pack", str(sweep)]) == 2
    assert "no reader would take it (more than" in capsys.readouterr().err
    assert not [*sweep.parents[1].glob(f"*{of.SUFFIX}*")]


def test_lines_are_read_one_at_a_time(sweep: Path) -> None:
    """What is unpacked is held once: a small file may unpack to a thousand times as much."""
    archive = packed_alone(sweep)
    one = '{"file": "bert/a/summary.json", "content": "' + "x" * 2**20 + '"}\n'
    archive.write_bytes(gzip.compress((of.HEADER + "\n" + 24 * one).encode()))
    tracemalloc.start()
    try:
        ((folder, files),) = of.read_archive(archive).items()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (folder.name, len(files["summary.json"])) == ("a", 2**20 + 2)
    assert most < 12 * 2**20


@pytest.mark.parametrize("name", ["größe", 'a "b"', "a\\b", "a{b}", "日本"])
def test_folders_may_have_any_printable_name(name: str, tmp_path: Path) -> None:
    root = tmp_path / "outputs"
    record(root / "bert" / name / "one", "--seed", "1")
    before, archive = tree(root), root / f"outputs{of.SUFFIX}"
    assert main(["pack", str(root)]) == 0
    shutil.rmtree(root / "bert")
    assert [run.path for run in find_runs(root)] == [root / "bert" / name / "one"]
    assert main(["unpack", str(archive)]) == 0 and tree(root) == before


def test_a_folder_whose_name_cannot_be_printed_is_not_packed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "outputs"
    record(root / "bert" / "a\x1bb" / "one", "--seed", "1")
    assert main(["pack", str(root)]) == 2
    told = capsys.readouterr().err
    assert "'bert/a\\x1bb/one' cannot be packed: rename this folder" in told
    assert told.count("\n") == 1 and not [*root.glob(f"*{of.SUFFIX}*")]


def test_content_that_is_none_is_an_unreadable_record(sweep: Path) -> None:
    archive = packed_alone(sweep)
    archive.write_bytes(edited(archive.read_bytes(), b'"content": ', b'"content": x'))
    for run in find_runs(archive):
        assert run.read_settings() is None and run.read_epochs() == ([], 1)
    assert main(["pack", str(sweep.parents[1])]) == 0  # and it is packed as it is


def test_packed_runs_that_have_lost_a_file_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An archive took them without a word, and no table of it showed them."""
    root = tmp_path / "outputs"
    imported(root / "theirs", text_file(tmp_path), "--source", "them")  # has no attempts
    whole, no_attempts, no_settings = (
        record(root / "bert" / "1_2" / f"bert_s{seed}_0000000{seed}", "--seed", str(seed))
        for seed in (1, 2, 3)
    )
    for run in (whole, no_attempts, no_settings):
        with_epochs(run.path, epochs(0.5))
        lines(run.attempts, [{"event": "start", "attempt": 1, "unix": 1.0}])
    capsys.readouterr()
    assert main(["pack", str(root)]) == 0
    assert capsys.readouterr().err == ""
    no_attempts.attempts.unlink()
    no_settings.settings.unlink()
    assert main(["pack", str(root)]) == 0
    warning = (
        "warning: 2 packed runs have lost a file: bert/1_2/bert_s2_00000002 (attempts.jsonl), "
        "bert/1_2/bert_s3_00000003 (settings.json)\n"
    )
    assert capsys.readouterr().err == warning
    assert main(["pack", str(root), "--json"]) == 0
    told = capsys.readouterr()
    assert told.err == warning and json.loads(told.out)["lacking"] == {
        "bert/1_2/bert_s2_00000002": "attempts.jsonl",
        "bert/1_2/bert_s3_00000003": "settings.json",
    }


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record(tmp_path / "outputs" / "bert" / "1_2" / "one").path
    foreign = tmp_path / f"foreign{of.SUFFIX}"
    foreign.write_bytes(gzip.compress(b'{"text": "mine"}\n'))
    for words, told in (
        (["pack", tmp_path / "nowhere"], "there is no such folder"),
        (["pack", run], "is a single run: name a folder above it"),
        (["pack", run.parent, "--out", tmp_path / "a.zip"], "expected a name that ends in"),
        (["unpack", foreign], "is not an archive of records"),
        (["unpack", tmp_path / "none"], "is not an archive of records"),
    ):
        assert main([*map(str, words)]) == 2
        assert told in capsys.readouterr().err
    assert main(["table", str(tmp_path / "outputs")]) == 0  # foreign files are left alone
    run.rename(tmp_path / "gone")
    assert main(["pack", str(tmp_path / "outputs")]) == 2
    assert "no records below" in capsys.readouterr().err


def test_two_archives_with_unlike_records_of_one_run_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (tmp_path / f"{name}{of.SUFFIX}" for name in ("one", "two"))
    run = record(tmp_path / "outputs" / "bert" / "1_2" / "run").path
    place = tmp_path / "bert" / "1_2" / "run"
    pack = ["pack", str(tmp_path / "outputs"), "--out"]
    assert main([*pack, str(one)]) == main([*pack, str(two)]) == 0
    assert RunFolder.at(place).read_settings() is not None  # the same in both
    assert main(["table", str(tmp_path / "bert")]) == 0
    with (run / "epochs.jsonl").open("a") as rows:
        rows.write("{}\n")
    assert main([*pack, str(two)]) == 0
    capsys.readouterr()
    assert main(["table", str(tmp_path / "bert")]) == 2
    assert "two.jsonl.gz holds another record of it" in capsys.readouterr().err
    with pytest.raises(UserError, match="move one of the two archives"):
        RunFolder.at(place)


def test_the_published_archives_hold_the_published_sweeps(root: Path) -> None:
    published = root / "outputs" / "published"
    sweeps = {folder.name for folder in (published / "sweeps").iterdir()}
    assert {file.name for file in published.glob("*.gz")} == {f"{n}{of.SUFFIX}" for n in sweeps}
    for name in sweeps:
        inside = of.read_archive(published / f"{name}{of.SUFFIX}")
        plan = (published / "sweeps" / name / "sweep.json").read_bytes()
        assert of.unpacked(inside[published / "sweeps" / name]["sweep.json"]) == plan
        runs = {published / run["path"] for run in json.loads(plan)["runs"]}
        held = {folder for folder, files in inside.items() if "settings.json" in files}
        assert held == runs
