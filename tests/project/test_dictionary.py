"""outputs/README.md names every field that a run writes, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness.core.records import FAILURES, FINISHED
from harness.core.settings import flag_fields
from harness.launch.places import Local
from harness.launch.plan import Options, launched, plan
from harness.launch.sweepfile import load
from tests.support.ranks import script
from tests.support.sweeps import sweep_file
from tests.train.run.test_resume import broken_off

pytestmark = pytest.mark.process

SMALL = ["--tiny", "--train_size", "128", "--test_size", "32", "--epochs", "1", "--b", "16"]
# Written only where the hardware is there that no test machine has.
NEEDS_HARDWARE = {"observed.devices"}
# Of runs that wait for a compiler (tests/train/loop/test_compiled.py sees them written).
OF_COMPILED = {"observed.compiled_graphs", "observed.compiled_in_updates"}
# Of runs of peers, which need a package of their own (train/strategy/test_hivemind.py sees them).
OF_PEERS = {"peers", "failed_averages", "peers.json"}
# Of a run of LogCallback alone; the dictionary says so in words.
NESTED = ("observed", "data", "launch", "link", "flops", "comm_probe")


def documented(root: Path) -> dict[str, set[str]]:
    """Section -> the names in the first column of its table."""
    sections: dict[str, set[str]] = {}
    title = ""
    for line in (root / "outputs" / "README.md").read_text().splitlines():
        if line.startswith("## "):
            title = line[3:]
        elif line.startswith("| `"):
            sections.setdefault(title, set()).update(re.findall(r"`([^`]+)`", line.split("|")[1]))
    return sections


def flat(content: dict[str, Any]) -> set[str]:
    names = set()
    for name, value in content.items():
        inner = value if name in NESTED and value is not None else {}
        names |= {f"{name}.{i}" for i in inner} if inner else {name}
        if name in ("launch", "link", "comm_probe"):
            names.add(name)  # null for a run that no sweep has started, on one node, or alone
    return names


def rows(folders: list[Path], pattern: str) -> set[str]:
    return {
        name
        for folder in folders
        for path in folder.glob(pattern)
        for line in path.read_text().splitlines()
        for name in json.loads(line)
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
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
    return [path.parent for path in root.glob("*/*/*/settings.json")]


def test_every_field_is_explained_and_every_explained_field_is_written(
    root: Path, folders: list[Path]
) -> None:
    explained = documented(root)
    written = {
        "epochs.jsonl": rows(folders, "epochs.jsonl"),
        "attempts.jsonl": rows(folders, "attempts.jsonl"),
        "ranks": rows(folders, "ranks/rank_*.jsonl"),
        "summary.json": {
            name for f in folders for name in json.loads((f / "summary.json").read_text())
        },
        "environment.json": {
            name for f in folders for name in flat(json.loads((f / "environment.json").read_text()))
        },
    }
    for section, names in written.items():
        assert names == explained[section] - NEEDS_HARDWARE - OF_COMPILED - OF_PEERS, section


def test_every_file_and_every_outcome_is_explained(root: Path, folders: list[Path]) -> None:
    explained = documented(root)
    assert explained["Outcomes"] == {FINISHED, *FAILURES}
    names = {re.sub("<[rn]>", "0", name) for name in explained[""]}
    found = {
        re.sub(r"_\d+\.", "_0.", str(path.relative_to(folder)))
        for folder in folders
        for path in folder.rglob("*.json*")
        if "checkpoint" not in str(path)
    }
    assert found <= names
    assert names - found <= {"progress.json"} | OF_PEERS  # gone when a run has ended


def test_settings_hold_every_flag(folders: list[Path]) -> None:
    for folder in folders:
        settings = json.loads((folder / "settings.json").read_text())
        assert set(flag_fields()) - {"output_dir", "rerun"} <= set(settings)
