"""Whatever a file holds: no traceback, and no value that is none of its kind is believed.

hypothesis draws the file and what is changed in it, and shrinks what fails to the smallest change
that does; the line that it prints (@reproduce_failure) repeats it.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import randoms

from docs.generate.dictionary import json_schema
from harness.cli import main
from harness.core import attempts
from harness.core.provenance import recorded_inputs
from harness.core.records import RunFolder, find_runs
from harness.core.schema.checks import check_fields
from harness.core.settings import UserError, as_mapping
from harness.launch import outcome
from harness.launch.launcher import Exit
from harness.launch.plan import plan
from harness.launch.sweepfile import load
from harness.read import load as load_records
from harness.read.records.packing import texts, write_folder
from harness.read.records.recorded import Recorded, recorded
from harness.train.context import Position
from harness.train.manifest import write_manifest
from harness.train.run.checkpoints import sound_checkpoints
from tests.support.mutants import VALUES, WHOLE, amount, mutated, planted
from tests.support.published import DEMO, PUBLISHED, ROOT, copied
from tests.support.sweeps import jobs_of

FILES = ("settings.json", "environment.json", "summary.json", "epochs.jsonl", "attempts.jsonl",
         "ranks/rank_0.jsonl")  # fmt: skip


def lenient(schema: Any) -> Any:
    """What readers promise: a value that is there is of its kind, or null. Imported records and
    those cut off know less, and newer ones more."""
    if isinstance(schema, list):
        return [lenient(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    content = {k: lenient(v) for k, v in schema.items() if k not in ("required", "title")}
    if content.get("additionalProperties") is False:
        del content["additionalProperties"]
    if isinstance(content.get("type"), str):
        content["type"] = [content["type"], "null"]
    if "enum" in content:
        content["enum"] = [*content["enum"], None]
    return content


ORACLES = {
    kind: jsonschema.Draft202012Validator(lenient(schema))
    for kind, schema in json_schema()["$defs"].items()
}


def assert_plausible(record: Recorded) -> None:
    """By the published schema, read by another program than the one that checks records."""
    found: list[tuple[str, Any]] = [("settings", {**record.settings, "schema": 1})]
    found += [("environment", record.environment)]
    found += [("epochs", row) for row in record.epochs]
    found += [("ranks", row) for rows in record.ranks.values() for row in rows]
    if record.summary is not None:
        found.append(("summary", record.summary))
        done = record.summary.get("epochs_done")
        assert done is None or done == len(record.epochs)
    for kind, content in found:
        errors = [*ORACLES[kind].iter_errors(content)]
        assert errors == [], f"{kind}: {errors[0].json_path}: {errors[0].message}"
    epochs = [row["epoch"] for row in record.epochs]
    assert epochs == sorted({*epochs})


def verbs(root: Path) -> Iterator[list[str]]:
    sweep = f"{root}/sweeps/{DEMO.name}"
    yield ["table", sweep]
    yield ["table", str(root)]
    yield ["explain", f"{sweep}:script=vit,setup=1_2"]
    yield ["compare", f"{sweep}:script=vit,setup=1_1", f"{sweep}:script=vit,setup=1_2"]
    yield ["batches", str(root), "--target", "accuracy=0.5"]
    yield ["predict", f"{root}:script=vit", "--setup", "2_1", "--link", "20ms"]


def each_trial(count: int, trial: Callable[[random.Random], None]) -> None:
    """The same ones in every run of the suite, others in each `make faults`."""

    @settings(
        max_examples=count, derandomize=not WHOLE, print_blob=True, deadline=None,
        suppress_health_check=[*HealthCheck],
    )  # fmt: skip
    @given(randoms())
    def drawn(chance: random.Random) -> None:
        told = ""
        try:
            trial(chance)
        except UserError as error:
            told = str(error)
        assert "\n" not in told

    drawn()


def test_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, runs = copied(tmp_path)
    every = [*verbs(root)]

    def trial(chance: random.Random) -> None:
        path = chance.choice(runs)
        file = path / chance.choice([name for name in FILES if (path / name).exists()])
        with planted(file, chance):
            record = recorded(RunFolder(path), with_ranks=True)
            if record.problem is None:
                assert_plausible(record)
            else:
                assert "\n" not in record.problem and len(record.problem) < 300
            reader = chance.randrange(10)
            if reader == 0:
                assert main(chance.choice(every)) in (0, 1, 2)
            elif reader == 1:
                load_records(root)

    each_trial(amount(300, 10_000), trial)
    told = capsys.readouterr()
    assert "\x1b" not in told.out + told.err


RESUMED = ("settings.json", "environment.json", "summary.json", "epochs.jsonl", "attempts.jsonl",
           "progress.json", "ranks/failure_0.json", "ranks/failure_1.json",
           "checkpoint-8/complete.json", "checkpoint-8/trainer_state.json")  # fmt: skip


def killed(path: Path, source: Path) -> None:
    """What a process that is killed in its second attempt leaves of a real run."""
    for name in ("settings.json", "environment.json", "summary.json", "epochs.jsonl"):
        shutil.copy(source / name, path / name)
    folder = RunFolder(path)
    attempts.begin(folder, 0, 2, 32)
    cpu = {"user_s_per_rank": [1.0, 2.0], "system_s_per_rank": [0.5, 0.5]}
    facts = {"attempt": 1, "update": 8, "wall_s": 500.0, **cpu}
    attempts.end(folder, "interrupted", "the process was killed", 500.0, cpu, 8)
    attempts.begin(folder, 8, 2, 32)
    attempts.write_progress(folder, {**facts, "attempt": 2})
    for rank in (0, 1):
        row = {"rank": rank, "outcome": "failed", "reason": "planted", "unix": 5.0}
        folder.failure(rank).parent.mkdir(exist_ok=True)
        folder.failure(rank).write_text(json.dumps(row))
    for update in (4, 8):
        checkpoint = path / f"checkpoint-{update}"
        checkpoint.mkdir()
        (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": update}))
        position = {"update": update, "epoch": 1, "samples": 32}
        facts = {"fingerprint": {}, "processes": 2, "best": None, "position": position}
        write_manifest(checkpoint / "complete.json", {**facts, "epoch": {}})


def test_what_a_resumed_run_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the run itself, and by the runner that brings it to an outcome."""
    (job,) = jobs_of(tmp_path, "script: vit\nsettings: {setup: 1_2}", out=tmp_path / "out")
    before, folder = tmp_path / "before", job.folder
    before.mkdir()
    run = next(run for run in find_runs(PUBLISHED / "vit" / "1_1") if "_e4_" in run.path.name)
    write_folder(tmp_path / "original", texts(run))
    killed(before, tmp_path / "original")
    monkeypatch.setattr(os, "fsync", lambda file: None)  # 10,000 times
    believed = json.loads((before / "checkpoint-8" / "complete.json").read_text())

    def trial(chance: random.Random) -> None:
        shutil.rmtree(folder.path, ignore_errors=True)
        shutil.copytree(before, folder.path)
        with planted(folder.path / chance.choice(RESUMED), chance):
            folder.outcome()
            recorded_inputs(folder)
            attempts.is_resumed(folder, 1.0)
            sound = sound_checkpoints(folder.path)
            assert folder.path / "checkpoint-4" in sound
            mark = json.loads((sound[-1] / "complete.json").read_text())
            assert Position(**mark["position"]).update in (4, 8)
            if sound[-1].name == "checkpoint-8":
                assert mark == believed
            rows, summary = len(folder.read_attempts()), folder.summary.read_text()
            if chance.random() < 0.5:
                attempts.begin(folder, 8, 2, 32, attempts.Opened(9.0, 4.0, 0.0))
                attempts.end(folder, "finished", None, 3.0, None, 12)
                attempts.write_summary(folder, "finished")
            else:
                failures = [{"rank": 0, "exit_code": 1, "unix": 6.0}]
                state = outcome.settle(
                    job,
                    Exit(1, failures),
                    outcome.Began(0.0),
                    tmp_path / "log",
                    chance.choice([None, ("timeout", "longer than --timeout 1h")]),
                )
                assert state in outcome.KNOWN or state == outcome.ELSEWHERE
            for row in folder.read_attempts()[rows:]:
                check_fields(row["event"], row, "attempts")
            if folder.summary.read_text() != summary:  # a finished one stays as it is
                content = json.loads(folder.summary.read_text())
                assert [*ORACLES["summary"].iter_errors(content)] == []

    each_trial(amount(200, 10_000), trial)


KEYS = ("script", "settings", "grid", "runs", "exclude", "seeds", "order", "baseline", "target",
        "hold", "lr_rule", "columns", "per_node", "tiny", "link", "setup", "lr")  # fmt: skip
TEXTS = [file.read_text() for file in sorted((ROOT / "experiments").glob("*.yaml"))]


def mutated_sweep(chance: random.Random) -> str:
    """Its content, its keys, or its characters changed."""
    text, kind = chance.choice(TEXTS), chance.random()
    content = yaml.safe_load(text)
    if kind < 0.6:
        return yaml.safe_dump(mutated(content, chance))
    if kind < 0.75:
        moved = copy.deepcopy(content)
        moved[chance.choice(KEYS)] = chance.choice([*content.values(), *VALUES])
        return yaml.safe_dump(moved)
    at = chance.randrange(len(text))
    odd = chance.choice(
        ["", "\t", ":", "- ", "{", "]", "&a ", "*a", "'", "\x00", "\u2028", "!!int "]
    )
    return text[:at] + odd + text[at + chance.randrange(3) :]


def test_sweep_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"

    def trial(chance: random.Random) -> None:
        text = mutated_sweep(chance)
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        sweep = load(file, tiny=chance.random() < 0.5)
        for job in plan(sweep, "out", 1)[:20]:
            values = as_mapping(job.settings)
            check_fields("settings", values, file)
            assert values["epochs"] > 0 and values["lr"] > 0 and values["per_gpu_batch"] > 0
            assert job.nodes >= 1 and job.processes >= 1 and ".." not in job.path

    each_trial(amount(200, 10_000), trial)
