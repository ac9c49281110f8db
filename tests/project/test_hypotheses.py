"""Hypotheses that stand with published records were committed before the first of these runs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from harness.core.records import FINISHED
from harness.launch.sweepfile import header_of, load
from harness.read.records.sweeps import read_results

# Those of older sweeps were written later, or with a commit that is not kept (docs/sweeps.md).
PUBLISHED = (
    "sweeps/batch_size-tiny", "sweeps/demo-tiny", "sweeps/learning_rate-tiny", "sweeps/lora-tiny",
    "sweeps/news", "sweeps/pictures", "sweeps/weak_scaling-tiny",
    "exchange/sweeps/slow_link_ways-tiny",
)  # fmt: skip


NAMED = {
    "half": 0.5,
    "all": 1.0,
    "more": 1.0,
    "twice": 2.0,
    "proportion": 2.0,
    "faster": 1.0,
    "slower": 1.0,
}
NO_CHANGE = 0.0  # of what gains or loses, without a number


def git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else ""


def test_the_commit_of_the_records_has_the_hypothesis(root: Path, tmp_path: Path) -> None:
    unknown: set[str] = set()
    folders = [*root.glob("records/*/sweeps/*")]
    folders += [root / "outputs/published" / name for name in PUBLISHED]
    assert len(folders) > len(PUBLISHED)
    for folder in folders:
        sweep = read_results(folder)
        begun = [run for run in sweep.runs if run.state == FINISHED]
        starts = [row["unix"] for run in begun for row in run.attempts]
        assert begun and sweep.hypothesis
        for commit in {run.environment["commit"] for run in begun}:
            if not git(root, "cat-file", "-t", commit):
                unknown.add(commit)
                continue
            (name,) = (root / "experiments").rglob(f"{folder.name.removesuffix('-tiny')}.yaml")
            (tmp_path / "then.yaml").write_text(
                git(root, "show", f"{commit}:{name.relative_to(root)}")
            )
            assert header_of(tmp_path / "then.yaml")["hypothesis"] == sweep.hypothesis
            assert int(git(root, "show", "-s", "--format=%ct", commit)) < min(starts)
    if unknown:
        pytest.skip(f"the history does not have {', '.join(sorted(unknown))}")


def test_what_is_expected_repeats_numbers_of_the_hypothesis(root: Path) -> None:
    checked = 0
    for file in (root / "experiments").rglob("*.yaml"):
        text = header_of(file)["hypothesis"]
        said = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)}
        said |= {value for word, value in NAMED.items() if word in text} | {NO_CHANGE}
        for tiny in (False, True):
            for entry in load(file, tiny).expect:
                bounds = {entry["at_least"], entry["at_most"]} - {None}
                assert {abs(bound) for bound in bounds} <= said, (file.name, entry)
                checked += 1
    assert checked > 30
