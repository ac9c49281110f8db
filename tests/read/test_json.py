"""--json: one document on stdout and nothing else, of every verb that prints data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.core.command_line import print_json
from harness.core.records import find_runs
from harness.read.records.packing import texts, write_folder

SWEEPS = "outputs/published/sweeps"
VIT = "outputs/published:script=vit,epochs=12,lr=0.0015,per_gpu_batch=32"
PLANNED = "outputs/published:script=vit,dataset=embedded:digits"
# A line -> names that the document must have.
DOCUMENTS = {
    f"table {SWEEPS}/demo-tiny": {"sweep", "question", "rows", "runs"},
    "table outputs/published/bert/1_1": {"records", "runs"},
    f"compare {VIT},setup=1_1 {VIT},setup=1_2": {"sides", "verdicts", "measures", "notes"},
    f"explain {SWEEPS}/demo-tiny:script=vit,setup=1_2": {"sentences", "main", "parts"},
    f"batches {SWEEPS}/batch_size-tiny:script=vit --target accuracy=0.85": {"target", "families"},
    f"predict {SWEEPS}/prediction-tiny:script=vit --setup 2_1 --link 20ms,200mbit": {"step_s"},
    f"plan {PLANNED} --nodes 4 --link 80ms/50mbit --target accuracy=0.9": {"choices", "missed"},
    "sweep experiments/batch_size.yaml --tiny --dry_run --out OUT": {"sweep", "runs", "lines"},
    f"figures {SWEEPS}/demo-tiny --out OUT": {"written", "notes"},
}  # fmt: skip


@pytest.mark.parametrize("line", DOCUMENTS)
def test_a_verb_prints_one_document(
    line: str,
    root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(root)
    assert main([*line.replace("OUT", str(tmp_path)).split(), "--json"]) == 0
    printed = capsys.readouterr()
    document: dict[str, Any] = json.loads(printed.out, parse_constant=pytest.fail)
    assert document.keys() >= DOCUMENTS[line] and printed.err == ""
    assert all(document[name] or name in ("main", "notes") for name in DOCUMENTS[line])
    if "written" in DOCUMENTS[line]:
        assert all(Path(file).is_file() for file in document["written"])


def test_integers_stay_integers_where_a_run_does_not_have_them(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = find_runs(root / "outputs" / "published" / "vit" / "1_1")[:2]
    for name, run in (("one", one), ("other", other)):
        write_folder(tmp_path / name, texts(run))
    settings = tmp_path / "one" / "settings.json"
    known = json.loads(settings.read_text())
    settings.write_text(json.dumps(known | {"seed": None}))
    assert main(["table", str(tmp_path), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["runs"]
    assert first["seed"] is None and type(second["seed"]) is int
    assert type(first["epochs"]) is type(second["updates"]) is int and first["lr"] == known["lr"]


def test_unknown_is_null_and_a_missed_target_is_inf(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": Path("x"), 4: (True, None)})
    found = json.loads(capsys.readouterr().out)
    assert found == {"a": None, "b": ["inf", 1.5], "c": "x", "4": [True, None]}
