"""What can be said of the examples without the clusters that they are for."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from harness.cli import parser_of
from harness.launch.choices import Slurm
from harness.launch.slurm import MEANINGLESS, slurm_of

NONE_GIVEN = dict.fromkeys((*vars(Slurm()), *MEANINGLESS))


def test_examples_begin_with_whether_they_were_tried(root: Path) -> None:
    files = sorted((root / "examples").iterdir())
    assert len(files) == 6
    assert all("Not tried" in "".join(f.read_text().splitlines(keepends=True)[:3]) for f in files)


def test_the_commands_exist(root: Path) -> None:
    found = 0
    for file in (root / "examples").iterdir():
        text = re.sub(r"\\\n[# ]*", "", file.read_text())
        for line in re.findall(r"(?:^[#! ]*)(.*-m harness .*)$", text, re.MULTILINE):
            verb, *words = line.partition("-m harness ")[2].split()
            parser_of(verb).read(words)
            found += 1
        named = re.findall(r"examples/[\w.]+", text)
        assert all((root / name).is_file() for name in named), file
    assert found >= 4


def test_the_flags_of_a_site_are_read(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, file = tmp_path / "setup.sh", tmp_path / "slurm.flags"
    setup.touch()
    text = (root / "examples/slurm.flags").read_text()
    file.write_text(text.replace("/shared/harness/setup.sh", str(setup)))
    monkeypatch.setenv("HARNESS_SLURM", str(file))
    found = slurm_of({"launcher": "slurm", **NONE_GIVEN})
    assert found.partition == "gpu" and found.cores == 8 and found.sbatch == ("--mem-per-cpu=4G",)


def test_jobs_are_yaml_with_their_command(root: Path) -> None:
    sky = yaml.safe_load((root / "examples/skypilot.yaml").read_text())
    assert sky["num_nodes"] == 2 and "harness.train.torchrun" in sky["run"]
    job = yaml.safe_load((root / "examples/kubeflow_trainjob.yaml").read_text())
    command = job["spec"]["trainer"]["command"]
    assert job["kind"] == "TrainJob" and command[:3] == ["python", "-m", "harness.train.torchrun"]


@pytest.mark.process
def test_the_setup_of_apptainer_puts_the_image_before_python(root: Path, tmp_path: Path) -> None:
    """With a stand-in for apptainer that shows its words."""
    stand_in = tmp_path / "bin" / "apptainer"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/sh\necho "$@"\n')
    stand_in.chmod(0o755)
    done = subprocess.run(
        ["bash", "-euc", f". {root}/examples/slurm_apptainer.sh; python -m harness env"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
        env={"PATH": f"{stand_in.parent}:{os.environ['PATH']}", "SIF": "/an image.sif"},
    )  # fmt: skip
    assert done.stdout == (
        f"exec --nv --bind {tmp_path} --pwd {tmp_path} /an image.sif "
        "/harness/.venv/bin/python -m harness env\n"
    )
    assert list((tmp_path / "outputs").iterdir()) == []  # nothing is left behind
