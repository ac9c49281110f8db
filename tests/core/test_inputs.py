"""Which local files a run reads, and whether they are still what they were."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from harness.core import provenance
from harness.core.provenance import changed_inputs, inputs, recorded_inputs
from harness.core.records import SCHEMA, RunFolder, write_json
from harness.core.rules import resolve
from harness.core.settings import Settings, UserError
from tests.support.sweeps import harness_sweep, jobs_of


def settings(**changes: Any) -> Settings:
    return resolve(Settings(script="bert", **changes))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = tmp_path / "data"
    (folder / "train").mkdir(parents=True)
    for name in ("one", "two"):
        (folder / "train" / f"{name}.txt").write_text(name)
    return folder


def change_of(before: dict[str, Any], **changes: Any) -> str:
    return changed_inputs(before, inputs(settings(**changes)))


def test_each_change_of_the_data_is_seen(data: Path) -> None:
    chosen = {"dataset": str(data)}
    before = inputs(settings(**chosen))
    assert before["dataset"]["files"] == 2 and before["dataset"]["bytes"] == 6
    file = data / "train" / "one.txt"
    file.write_text("eno")  # of the same size
    assert "the files of --dataset have changed" in change_of(before, **chosen)
    file.write_text("one")
    assert change_of(before, **chosen) == ""
    file.rename(file.with_name("three.txt"))
    assert "have changed" in change_of(before, **chosen)
    file.with_name("three.txt").unlink()
    assert "(2 files of 6 bytes, now 1 file of 3 bytes)" in change_of(before, **chosen)


def test_what_libraries_keep_beside_the_data_is_no_change(data: Path, tmp_path: Path) -> None:
    chosen = {"dataset": str(data)}
    before = inputs(settings(**chosen))
    (data / "train" / "cache-12.arrow").write_text("indices")
    (data / "train" / "cache-1.png").write_text("a picture of the user")
    with_picture = inputs(settings(**chosen))
    assert with_picture["dataset"]["files"] == 3
    (data / "train" / "cache-1.png").unlink()
    (data / ".git").mkdir()
    (data / ".git" / "head").write_text("x")
    assert change_of(before, **chosen) == ""
    moved = data.rename(tmp_path / "elsewhere")
    assert change_of(before, dataset=str(moved)) == ""


def test_of_a_model_what_loading_reads_counts(data: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "checkpoint-3").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    before = inputs(settings(model=str(model)))
    (model / "README.md").write_text("for people")
    (model / "checkpoint-3" / "model.safetensors").write_text("other weights")
    assert change_of(before, model=str(model)) == ""
    (model / "config.json").write_text("{ }")
    assert "the files of --model have changed" in change_of(before, model=str(model))


def test_the_hub_and_embedded_data_have_no_local_files(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data.parent)
    found = inputs(settings(dataset="embedded:english", model="org/model"))
    assert found["dataset"] is None and found["model"] is None
    assert change_of({"dataset": {"checksum": "x"}}, dataset="embedded:english") == ""
    assert change_of({}, dataset=str(data)) == ""  # a record without inputs


def test_the_content_is_read_again_only_after_a_change(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = inputs(settings(dataset=str(data)))
    read: list[Path] = []
    real = provenance._checksum

    def counted(root: Path, files: Any) -> str:
        read.append(root)
        return real(root, files)

    monkeypatch.setattr(provenance, "_checksum", counted)
    assert inputs(settings(dataset=str(data))) == first and not read
    os.utime(data / "train" / "one.txt", (1, 1))
    assert inputs(settings(dataset=str(data))) == first and len(read) == 1
    (kept,) = provenance.cache_root().glob("checksums/*.json")
    kept.write_text("{")  # damaged: read again
    assert inputs(settings(dataset=str(data))) == first and len(read) == 2
    monkeypatch.setenv("HF_HOME", "/proc/nowhere")  # not writable: only slower
    assert inputs(settings(dataset=str(data))) == first and len(read) == 3


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "part.csv").mkdir()
    with pytest.raises(UserError, match=r"part\.csv cannot be read: Is a directory"):
        provenance._checksum(tmp_path, [tmp_path / "part.csv"])


def test_a_run_over_one_emulated_link_does_not_answer_for_another(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {"dataset": "embedded:english"}
    monkeypatch.delenv(provenance.NODES_LINK, raising=False)
    alone = inputs(settings(**chosen))
    monkeypatch.setenv(provenance.NODES_LINK, "20ms/200mbit")
    slow = inputs(settings(**chosen))
    assert changed_inputs(slow, slow) == ""
    assert "(over 20ms/200mbit, now without one)" in changed_inputs(slow, alone)
    assert "(without one, now over 20ms/200mbit)" in changed_inputs(alone, slow)
    del alone["link"]  # of a record from before
    assert changed_inputs(alone, slow) == ""


def test_a_sweep_does_not_mix_the_data_of_two_days(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Finished runs with the data as they were: the sweep is refused, and names what to do."""
    texts = data.parent / "texts.csv"
    texts.write_text("text,label\n")
    plan = f"script: bert\nsettings: {{dataset: {texts}}}\ngrid: {{seed: [1, 2]}}\n"
    out = data.parent / "out"
    for job in jobs_of(data.parent, plan, out):
        environment = {"inputs": inputs(job.settings)}
        write_json(job.folder.environment, environment)
        job.folder.write_settings({})
        write_json(job.folder.summary, {"outcome": "finished", "schema": SCHEMA})
    texts.write_text("text,label\nnew,1\n")
    argv = [str(data.parent / "mine.yaml"), "--out", str(out)]
    assert harness_sweep(argv) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "is finished (and 1 more), but the files of --dataset have changed since" in said
    assert "--rerun all" in said


@pytest.mark.parametrize(
    "odd", [[1], {"dataset": "x"}, {"dataset": {"files": 1}}, {"dataset": {"checksum": 1}}, None, 7]
)
def test_an_odd_record_is_one_without_inputs(odd: Any, data: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    write_json(folder.environment, {"inputs": odd})
    assert change_of(recorded_inputs(folder), dataset=str(data)) == ""
