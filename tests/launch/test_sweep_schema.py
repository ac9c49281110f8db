"""The schema of sweep files is that of the reader, and takes what the reader takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from docs.generate.sweep_schema import EXPERIMENTS, json_schema
from harness.launch.sweepfile import YamlSource, load


def as_an_editor(value: Any) -> Any:
    """Numbers and true as YAML 1.2 has them, to which 1_1 is a text."""
    if isinstance(value, dict):
        return {name: as_an_editor(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [as_an_editor(inner) for inner in value]
    try:
        return json.loads(value)
    except ValueError:
        return value


def valid(file: Path) -> bool:
    schema = json.loads((EXPERIMENTS / "schema.json").read_text())
    return bool(jsonschema.Draft7Validator(schema).is_valid(as_an_editor(YamlSource(file).content)))


def test_what_is_shipped_is_what_is_generated() -> None:
    shown = json.loads((EXPERIMENTS / "schema.json").read_text())
    assert shown == json_schema(), "python -m docs.generate.sweep_schema"
    jsonschema.Draft7Validator.check_schema(shown)
    assert all(shown["properties"][key]["description"] for key in ("script", "runs", "tiny"))


def test_every_shipped_file_names_the_schema_and_is_valid() -> None:
    files = sorted(EXPERIMENTS.rglob("*.yaml"))
    assert len(files) > 18
    for file in files:
        first = file.read_text().splitlines()[0]
        assert first.startswith("# yaml-language-server: $schema=")
        assert (file.parent / first.partition("=")[2]).resolve() == EXPERIMENTS / "schema.json"
        assert valid(file), file
        assert load(file).header["question"]


def test_the_example_of_the_docs_is_valid(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "example.yaml"
    file.write_text((root / "docs/sweeps.md").read_text().split("```yaml\n")[1].split("```")[0])
    assert valid(file)


@pytest.mark.parametrize(
    "text",
    ["script: vit\ngrids: {setup: [1_1]}", "script: vit\ngrid: {set_up: [1_1]}",
     "script: vit\nsettings: {epochs: many}", "script: vit\nhold: batch",
     "script: vit\nsettings: {strategy: dpp}", "script: vit\nsettings: {output_dir: there}",
     "script: vit\ntarget: {metric: accuracy}", "script: vit\ntiny: {tiny: {script: bert}}",
     "script: vit\ngrid: {per_gpu_batch: [0]}",
     "script: vit\nexpect: [{of: {setup: 1_2}, measure: accuracy}]",
     "script: vit\nexpect: [{of: {setup: 1_2}, measure: loss, at_most: 1}]"],
)  # fmt: skip
def test_mistakes_are_not_valid(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    assert not valid(tmp_path / "mine.yaml")
