"""Every record that runs write is as the schema declares it, and every declared field is written.

outputs/README.md and outputs/schema.json are made of the same declarations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from benchmarks.loading import epoch_row, machine
from docs.generate.dictionary import APART, OUTPUTS, json_schema, readme
from harness.cli import main
from harness.core.identity import run_id
from harness.core.records import FAILURES, FINISHED, find_runs, read_json, read_rows
from harness.core.schema.checks import (
    RECORDS,
    check_fields,
    fields,
)
from harness.core.schema.fields import Field, fields_of
from harness.core.schema.rows import OUTCOMES
from harness.core.settings import Settings, flag_fields
from harness.launch.places import Local, Options, launched
from harness.launch.plan import plan
from harness.launch.sweepfile import load
from tests.support.broken_runs import broken_off
from tests.support.declared import assert_declared
from tests.support.ranks import script
from tests.support.sweeps import sweep_file

pytestmark = pytest.mark.process

SMALL = ["--tiny", "--train_size", "128", "--test_size", "32", "--epochs", "1", "--b", "16"]
NOT_WRITTEN_HERE = {
    "environment.observed.devices",  # dp: needs several GPUs
    "environment.observed.shares",  # tests/train/loop/test_balance.py
    "environment.observed.loss_of_batch",  # tests/train/loop/test_own_parts.py
    # tests/train/data/test_read_padding.py
    "environment.observed.reads_padding", "environment.observed.reads_padding.train_batch",
    "environment.observed.reads_padding.eval_batch",
    "environment.launch.processes_per_gpu",  # tests/standin_gpu/test_standin.py
    # tests/train/data/test_sources.py
    "environment.data.alike_classes", "environment.data.rare_classes",
    "environment.data.untrained_classes", "environment.data.blank_texts",
    # tests/train/data/test_splits.py
    "environment.data.unused_test_splits", "environment.data.empty_test_splits",
    "sweep.changed_after",  # tests/launch/test_sweep.py
    # Of links with a delay: tests/train/strategy/test_choice.py
    "environment.observed.exchange_estimates_s.all_to_all", "environment.observed.exchange_early_s",
    # Of runs that wait for a compiler (tests/train/loop/test_compiled.py sees them written).
    "environment.observed.compiled_graphs", "environment.observed.compiled_in_updates",
    "environment.observed.compile_s", "environment.observed.compiled_pass_s",
    "environment.observed.eager_pass_s",
    "environment.link.asked.nodes",
    "environment.inputs.strategy",  # tests/train/strategy/test_own_strategy.py
    "end.as_reported",  # of a killed attempt: tests/core/test_attempts.py
    "failure.rank", "failure.outcome", "failure.reason", "failure.unix",
    "settings.imported",  # tests/read/test_importing.py
    "peers.loss_samples", "peers.before",  # tests/train/strategy/test_hivemind_counts.py
}  # fmt: skip
KIND_OF_FILE = {
    "settings.json": "settings", "environment.json": "environment", "epochs.jsonl": "epochs",
    "summary.json": "summary", "progress.json": "progress", "peers.json": "peers",
    "sweep.json": "sweep", "rank.jsonl": "ranks", "node.jsonl": "telemetry",
    "failure.json": "failure",
}  # fmt: skip
PLACES = (OUTPUTS / "published", OUTPUTS.parent / "records")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published records as folders."""
    folder = tmp_path_factory.mktemp("published")
    for archive in chain(*(place.rglob("*.jsonl.gz") for place in PLACES)):
        assert main(["unpack", str(archive), "--out", str(folder)]) == 0
    return folder


def records(root: Path) -> Iterator[tuple[str, dict[str, Any], Path]]:
    """(kind, record, file) of everything that is recorded below a folder."""
    for file in sorted(root.rglob("*.json*")):
        if any(part.startswith("checkpoint") for part in file.parts):
            continue
        kind = KIND_OF_FILE.get(re.sub(r"_\d+\.", ".", file.name))
        rows = [json.loads(file.read_text())] if file.suffix == ".json" else []
        rows = rows or [json.loads(line) for line in file.read_text().splitlines()]
        if kind == "peers":
            rows = list(rows[0].values())
        for row in rows:
            yield kind or row["event"], row, file


def shape(value: Any) -> Any:
    """The names that a record has, and the types of their values: with equal ones, and values that
    readers accept, two records are both valid or both not.
    """
    if isinstance(value, dict):
        return (dict, *((name, shape(inner)) for name, inner in value.items()))
    return (list, frozenset(map(shape, value))) if isinstance(value, list) else type(value)


def written(kind: str, content: dict[str, Any], known: dict[str, Field]) -> Iterator[str]:
    """Dotted names of the fields that a record has, those of the records inside it included."""
    for name, value in content.items():
        yield f"{kind}.{name}"
        inner = known[name].kind if name in known else None
        if inner is not None and inner.record is not None and value and name not in APART:
            yield from written(f"{kind}.{name}", value, fields_of(inner.record))


def declared(kind: str, known: dict[str, Field]) -> Iterator[str]:
    for name, field in known.items():
        yield f"{kind}.{name}"
        within = field.kind.record if name not in APART else None
        if within is not None and f"{kind}.{name}" not in NOT_WRITTEN_HERE:
            yield from declared(f"{kind}.{name}", fields_of(within))


@pytest.fixture(scope="module")
def root_of_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts and images, one process and two, finished and failed."""
    root = tmp_path_factory.mktemp("records")
    (job,) = plan(load(sweep_file(root, "script: vit")))
    facts = launched("mine", Options(), {}, Local(Options()).facts(job))
    launch = {"HARNESS_LAUNCH": json.dumps(facts)}
    assert script("bert", *SMALL, "--o", str(root), count=2, env=launch).code == 0
    held_out = ["--validation_split", "0.2", "--strategy", "diloco", "--sync_every", "2"]
    two_nodes = {"LOCAL_WORLD_SIZE": "1"}
    done = script("vit", *SMALL, *held_out, "--o", str(root), count=2, env=two_nodes)
    assert done.code == 0, done.err
    broken_off(1, [*SMALL, "--seed", "1", "--o", str(root)], 3, "crash")
    return root


def test_what_is_written_of_the_schema_is_what_the_schema_gives() -> None:
    assert (OUTPUTS / "README.md").read_text() == readme(), "python -m docs.generate.dictionary"
    assert json.loads((OUTPUTS / "schema.json").read_text()) == json_schema()
    assert set(OUTCOMES) == {FINISHED, *FAILURES}


def test_every_record_of_new_runs_is_valid(root_of_runs: Path) -> None:
    seen = set()
    for kind, record, file in records(root_of_runs):
        assert_declared(kind, record, file)
        seen.add(kind)
    assert seen >= {"settings", "environment", "epochs", "ranks", "start", "end", "summary"}


def test_the_benchmark_of_loading_makes_records_like_real_ones(root_of_runs: Path) -> None:
    for run in find_runs(root_of_runs / "vit"):
        (row,), _ = read_rows(run.epochs)
        assert set(epoch_row(1, 1)) == set(row)
        assert set(machine(1)) <= set(read_json(run.environment) or {})


@pytest.fixture(scope="module")
def in_published(published: Path) -> set[str]:
    """The fields of the published records, each of which is valid: of each record its values, and
    of each shape, once, what it has and lacks by the schema.
    """
    seen: set[str] = set()
    shapes = set()
    for kind, record, file in records(published):
        check_fields(kind, record, file)
        if (found := (kind, shape(record))) not in shapes:
            shapes.add(found)
            assert_declared(kind, record, file)
            seen.update(written(kind, record, fields(kind)))
    return seen


@pytest.mark.usefixtures("in_published")
def test_every_published_record_is_valid_and_has_the_name_of_its_settings(
    published: Path,
) -> None:
    runs = find_runs(published)
    for run in runs:
        recorded = json.loads(run.settings.read_text())
        passed = sorted(recorded["trainer"].items())
        values = {name: recorded[name] for name in flag_fields() if name in recorded}
        settings = Settings(script=recorded["script"], **values, trainer=tuple(passed))
        assert run_id(settings) == run.path.name
    assert len(runs) > 400


def test_every_declared_field_is_written_by_something(
    in_published: set[str], root_of_runs: Path
) -> None:
    """By the runs of this test or, for runs of peers and emulated links, by published ones."""
    seen = in_published | {
        name
        for kind, record, _ in records(root_of_runs)
        for name in written(kind, record, fields(kind))
    }
    expected = {
        name for kind in RECORDS for name in declared(kind, fields(kind)) if kind != "progress"
    }
    assert expected - seen <= NOT_WRITTEN_HERE
    unknown = {name for name in seen - expected if not name.startswith("progress.")}
    assert unknown == set()


def test_every_file_is_explained(root_of_runs: Path) -> None:
    names = {re.sub("<[rn]>", "0", record.file) for record in RECORDS.values()}
    found = {
        re.sub(r"_\d+\.", "_0.", str(path.relative_to(run.path)))
        for run in find_runs(root_of_runs)
        for path in run.path.rglob("*.json*")
        if "checkpoint" not in str(path)
    }
    assert found <= names
    assert all(f"`{record.file}`" in readme() for record in RECORDS.values() if record.scope)
    # progress.json is gone when a run has ended; only runs of peers have peers.json.
    assert {name.split("/")[0] for name in names - found} == {
        "progress.json",
        "peers.json",
        "sweeps",
    }
