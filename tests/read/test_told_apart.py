"""Groups that differ in a setting are told apart wherever they are compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.read.figures.catalogue import draw
from harness.read.labels import short_text
from harness.read.records.runs import read_run
from harness.read.records.sweeps import read_results
from tests.support.paired import Verb
from tests.support.records import Plan, epochs, record, with_epochs


def test_the_short_text_of_a_label() -> None:
    axes = ("strategy", "setup", "per_gpu_batch", "lr", "precision", "lora", "from_scratch")
    label = {"strategy": "ddp", "setup": "1_2", "per_gpu_batch": 8, "lr": 1e-3, "lora": 0}
    found = short_text(label | {"precision": "bf16", "from_scratch": True}, axes)
    assert found == "ddp 1_2 b8 lr 0.001 bf16 lora 0 from scratch"
    assert short_text(label | {"from_scratch": False}, axes) == "ddp 1_2 b8 lr 0.001 lora 0"


def test_the_plain_table_has_a_column_for_what_else_differs(tmp_path: Path, table: Verb) -> None:
    """Shares, adapters and passes of an update, where nothing else tells two runs apart."""
    flags: dict[str, list[str]] = {
        "equal": ["--b", "8", "--seed", "1"], "again": ["--b", "8", "--seed", "2"],
        "shares": ["--b", "8", "--balance", "2,1"], "passed": ["--b", "8", "--optim", "sgd"],
        "slow": ["--b", "8", "--lr", "1e-4", "--dropout", "0.5"],
    }  # fmt: skip
    for name, more in flags.items():
        record(tmp_path / name, *more)
    said = table(tmp_path).splitlines()
    heading = next(line.split() for line in said if "accuracy" in line)
    assert heading[:5] == ["setup", "lr", "balance", "optim", "seed"]
    rows = sorted(line.split()[1:5] for line in said if line.strip().startswith("1_2"))
    assert rows == [
        ["0.0001", "-", "-", "42"], ["0.003", "-", "-", "1"], ["0.003", "-", "-", "2"],
        ["0.003", "-", "sgd", "42"], ["0.003", "2,1", "-", "42"],
    ]  # fmt: skip
    # A record that lacks this flag is older and had it off; without another one it is not read.
    settings = tmp_path / "equal" / "settings.json"
    kept = {n: v for n, v in json.loads(settings.read_text()).items() if n != "lora"}
    settings.write_text(json.dumps(kept))
    assert "lora" not in table(tmp_path)
    del kept["repeat"]
    settings.write_text(json.dumps(kept))
    refusal = "settings.json lacks repeat: read it with the version of this project that wrote it"
    said = table(tmp_path, warned=refusal).splitlines()
    assert "lora" not in next(line.split() for line in said if "accuracy" in line)


def test_the_plain_table_has_a_column_for_threads_that_differ(tmp_path: Path, table: Verb) -> None:
    """Not where a run does not know them, nor on GPUs, whose times do not depend on them."""
    folders = [record(tmp_path / str(n), "--b", "8", "--seed", str(n)) for n in (1, 2)]
    for facts, shown in (
        (({"threads": 1}, {"threads": 2}), ["1", "2"]),
        (({"threads": 1}, {"threads": 1}), None),
        (({"threads": 1}, {}), None),
        (({"threads": 1, "gpus": ["T4"]}, {"threads": 2, "gpus": ["T4"]}), None),
    ):
        for folder, more in zip(folders, facts, strict=True):
            known = json.loads(folder.environment.read_text())
            kept = {n: v for n, v in known.items() if n not in ("threads", "gpus")}
            folder.environment.write_text(json.dumps(kept | more))
        lines = table(tmp_path).splitlines()
        heading = next(line.split() for line in lines if "accuracy" in line)
        assert ("threads" in heading) == (shown is not None), facts
        if shown:
            at = heading.index("threads")
            rows = [line.split() for line in lines if line.strip().startswith(("1 ", "2 ", "1_2"))]
            assert [row[at] for row in rows] == shown


def test_a_model_of_a_script_is_known_by_its_class(tmp_path: Path, table: Verb) -> None:
    """Not by --model, which gives its tokenizer alone: it is another model than that one."""
    bert, own = (record(tmp_path / name, "--b", "8") for name in ("bert", "own"))
    facts = json.loads(own.environment.read_text()) | {"observed": {"own_model": "Bag"}}
    own.environment.write_text(json.dumps(facts))
    assert table(tmp_path).count("Bag") == 1
    runs = [read_run(folder, {}, str(folder.path), None) for folder in (bert, own)]
    assert [run.identity["model"] for run in runs] == ["bert-nano", "Bag"]
    assert json.loads(own.settings.read_text())["model"] == "bert-nano"


def test_the_frontier_names_all_that_differs(tmp_path: Path) -> None:
    """Of runs without a sweep: number formats, adapters and shares, each its own sign."""
    flags = {
        "fp32": [], "bf16": ["--precision", "bf16"], "lora": ["--lora", "8"],
        "shares": ["--balance", "2,1"],
    }  # fmt: skip
    for number, (name, more) in enumerate(flags.items()):
        folder = record(tmp_path / name, *more)
        with_epochs(folder.path, epochs(0.5, 0.5 + number / 10, seconds=1.0 + number))
    drawn = draw("frontier", read_results(tmp_path))
    (legend,) = drawn.figure.legends
    assert {str(text.get_text()) for text in legend.get_texts()} == {
        "lora 0, fp32", "lora 0, bf16", "lora 8, fp32", "lora 0, fp32, balance 2,1",
    }  # fmt: skip
    signs = [(mark.get_color(), mark.get_marker()) for mark in legend.get_lines()]
    assert len({*signs}) == 4


def test_the_frontier_says_what_one_style_does_not_tell(plan: Plan) -> None:
    """Of 14 groups, more than a legend has room for."""
    for batch in range(1, 8):
        for setup in ("1_1", "1_2"):
            plan.run(setup, batch, train_time_s=10.0 * batch, accuracy=batch / 10)
    drawn = draw("frontier", read_results(plan.write()))
    (legend,) = drawn.figure.legends
    assert [str(text.get_text()) for text in legend.get_texts()] == ["1_1", "1_2"]
    assert drawn.notes[0] == "points of one style differ in batch per GPU"


def test_tasks_share_no_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, out = tmp_path / "outputs", tmp_path / "both"
    record(root / "bert" / "one", "--seed", "1", epochs=3)
    record(root / "bert" / "two", "--model", "bert-mini", epochs=3)
    said = Verb("figures", capsys)(root, "--all", "--out", out)
    folders = sorted(folder.name for folder in out.iterdir())
    assert len(folders) == 2 and "bert_mini" in folders[0] + folders[1]
    assert all((out / folder / "accuracy.png").is_file() for folder in folders)
    assert {line.partition(":")[0].split(",")[0] for line in said.splitlines()} >= {"runs of bert"}
