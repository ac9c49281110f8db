"""--push_to_hub against the stand-in of the Hub: one upload, of what was measured, or one line."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants

from harness.core.command_line import parse
from harness.core.records import COMPLETE, RunFolder, append_row, write_json
from harness.core.records.archives import files_of, unpacked
from harness.core.records.checksums import changed_row, is_changed, vouched
from harness.core.records.places import without_places
from harness.core.records.redact import redacted_command, settings_of
from harness.core.settings import UserError
from harness.train.manifest import write_manifest
from harness.train.run.publish import (
    RECORD,
    _kept,
    _upload,
    card_of,
    check_hub,
)
from tests.support.hub import TOKEN
from tests.support.manifests import facts_of


def test_a_card_names_no_place_of_this_machine(tmp_path: Path) -> None:
    names = ["--model", "/srv/ada/bert-small", "--dataset", "/srv/ada/reviews.csv"]
    settings = parse("bert", [*names, "--label_column", "x", "--lr", "1e-05"], {})
    folder = RunFolder(tmp_path / "bert" / "1_1" / "run")
    write_json(folder.path / "summary.json", {"outcome": "finished", "energy_j": None})
    write_json(folder.path / "environment.json", {"gpus": ["NVIDIA H200", "NVIDIA H200"]})
    card = card_of(settings, folder, Path("checkpoint-8"), "mine")
    assert "\nbert-small, trained on reviews.csv: one run, with seed 42.\n" in card
    assert "| device | NVIDIA H200 |" in card
    assert "ada" not in card and "energy" not in card and "None" not in card
    public = parse("bert", ["--model", "org/bert", "--dataset", "org/news"], {})
    data = ModelCard(card_of(public, folder, Path("checkpoint-8"), "mine")).data
    assert (data.base_model, data.datasets) == ("org/bert", ["org/news"])


def test_the_archive_names_no_place_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a revision of its own, which is made a branch before anything is sent to it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    place = tmp_path / "clients" / "a.c me"
    named = {"model": place / "bert-small", "dataset": place / "reviews.csv",
             "strategy": f"{place}/mine.py:Mine"}  # fmt: skip
    argv = [word for name, value in named.items() for word in (f"--{name}", str(value))]
    argv += [f"--output_dir={place}/out", "--hub_revision", "new", "--push_to_hub"]
    settings = replace(
        parse("bert", ["--hub_revision", "new"], {}),
        output_dir=f"{place}/out", **{name: str(value) for name, value in named.items()},
    )  # fmt: skip
    folder = RunFolder(place / "out" / "bert" / "1_1" / "run")
    write_json(folder.settings, settings_of(settings))
    write_json(folder.path / "environment.json", {"command": redacted_command(["bert.py", *argv])})
    reason = f"no space on {folder.path}, and no file:///{place}/reviews.csv"
    write_json(folder.summary, {"outcome": "failed", "reason": reason})
    model = folder.path / "checkpoint-2"
    model.mkdir()
    of_text = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    for file in (*of_text, "optimizer.pt"):
        (model / file).write_text("{}")
    write_manifest(model / COMPLETE, facts_of())
    calls: dict[str, Any] = {}

    class Api:
        def __init__(self, token: str | None) -> None: ...

        def create_repo(self, name: str, **kwargs: Any) -> Any:
            return SimpleNamespace(repo_id=f"me/{name}")

        def create_branch(self, repo: str, *, branch: str, exist_ok: bool) -> None:
            assert exist_ok and not calls
            calls["branch"] = (repo, branch)

        def upload_folder(self, folder_path: str, **kwargs: Any) -> None:
            calls["sent"] = kwargs["revision"]
            calls["files"] = {file.name for file in Path(folder_path).iterdir()}
            calls["text"] = gzip.decompress(Path(folder_path, RECORD).read_bytes()).decode()

    monkeypatch.setattr("harness.train.run.publish.HfApi", Api)
    monkeypatch.setattr("harness.train.run.publish.get_token", lambda: None)
    _upload(settings, folder)
    assert calls["branch"] == ("me/run", "new") and calls["sent"] == "new"
    assert calls["files"] == {*of_text, "README.md", RECORD}
    for word in ("clients", "a.c me", str(tmp_path)):
        assert word not in calls["text"]
    assert '"reason": "no space on out/bert/1_1/run, and no file:///reviews.csv"' in calls["text"]
    for word in ('"bert-small"', '"reviews.csv"', '"mine.py:Mine"', "--output_dir=out"):
        assert word in calls["text"]
    _upload(replace(settings, trainer=(("hub_revision", "refs/pr/1"),)), folder)
    assert calls["branch"] == ("me/run", "new") and calls["sent"] == "refs/pr/1"


def test_a_published_record_has_right_checksums(tmp_path: Path) -> None:
    """Without the paths a row is another, and readers believe none that is not as written."""
    place = tmp_path / "clients"
    settings = replace(parse("bert", [], {}), dataset=f"{place}/reviews.csv")
    folder = RunFolder(place / "out" / "bert" / "1_1" / "run")
    reason = f"no file {place}/reviews.csv"
    rows = [vouched({"event": "start", "attempt": n, "why": {"text": reason}}) for n in (1, 2)]
    rows.append({**rows[0], "attempt": 3})  # somebody has changed it
    write_json(folder.settings, settings_of(settings))
    data = {"data": {"dataset": f"{place}/reviews.csv", "checksum": "0123"}}
    write_json(folder.path / "environment.json", data)
    write_json(folder.summary, vouched({"outcome": "failed", "reason": reason}))
    for row in rows:
        append_row(folder.attempts, row)
        append_row(folder.epochs, row)
    with folder.epochs.open("a") as file:
        file.write(f'{{"epoch": 3, "from": "{place}/rev')  # torn: it is packed as a text
    files = without_places({"run": files_of(folder.path)})["run"]
    assert not any("clients" in text for text in files.values())
    content = {name: unpacked(text).decode() for name, text in files.items()}
    summary = json.loads(content["summary.json"])
    assert summary["reason"] == "no file reviews.csv" and not is_changed(summary)
    assert json.loads(content["environment.json"])["data"]["checksum"] == "0123"  # of the data
    torn = content["epochs.jsonl"].splitlines()
    assert torn.pop() == '{"epoch": 3, "from": "rev'
    for kept in (content["attempts.jsonl"].splitlines(), torn):
        read = [json.loads(line) for line in kept]
        assert [row["why"]["text"] for row in read] == 3 * ["no file reviews.csv"]
        assert changed_row(read) == 3


def test_the_best_weights_go_and_no_damaged_ones(tmp_path: Path) -> None:
    for update in (2, 4):
        folder = tmp_path / f"checkpoint-{update}"
        folder.mkdir()
        (folder / "model.safetensors").write_text("weights")
        write_manifest(folder / COMPLETE, facts_of(update, best="checkpoint-2"))
    assert _kept(tmp_path).name == "checkpoint-2"
    (tmp_path / "checkpoint-2" / "model.safetensors").write_text("other")
    with pytest.raises(UserError, match="checkpoint-2 is damaged"):
        _kept(tmp_path)
    with pytest.raises(UserError, match="it keeps no checkpoint"):
        _kept(tmp_path / "none")


def test_what_would_fail_at_the_end_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*flags: str) -> str:
        with pytest.raises(UserError) as error:
            check_hub(parse("vit", ["--tiny", "--push_to_hub", *flags], {}))
        return str(error.value)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    check_hub(parse("vit", ["--tiny", "--push_to_hub"], {}))
    check_hub(parse("vit", ["--tiny", "--save", "none"], {}))
    assert "use --save last or best" in said("--save", "none")
    with pytest.raises(UserError, match="--hub_strategy is not taken: the model is uploaded once"):
        parse("vit", ["--hub_strategy", "end"], {})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in said()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("harness.train.run.publish.get_token", lambda: None)
    assert "set HF_TOKEN" in said()
