"""harness push and pull against the stand-in of the Hub: what arrives is what was recorded."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from harness.cli import main
from harness.core.settings import UserError
from harness.read.records.frames import load_runs
from harness.read.records.sharing import _hub_errors
from tests.support.hub import TOKEN, Hub
from tests.support.records import Plan, lines

ENDPOINT = constants.ENDPOINT


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Hub() as opened:
        monkeypatch.setattr(constants, "ENDPOINT", opened.endpoint)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(ENDPOINT, opened.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield opened


@pytest.fixture
def folder(plan: Plan) -> Path:
    for seed in (1, 2):
        run = plan.run(seed=seed)
        lines(run / "attempts.jsonl", [{"event": "start", "attempt": 1, "unix": float(seed)}])
    return Path(plan.write())


def test_records_travel_whole(hub: Hub, folder: Path, tmp_path: Path) -> None:
    assert main(["push", str(folder), "me/mine"]) == 0
    assert main(["push", str(folder), "me/mine"]) == 0  # once more, as the next runs come
    assert hub.made["datasets", "me/mine"]["visibility"] == "private"
    repo = hub.repos["datasets", "me/mine"]
    assert sorted(repo.commits[repo.main]) == ["README.md", f"{folder.name}.jsonl.gz"]
    into = tmp_path / "pulled"
    for _ in range(2):
        assert main(["pull", "me/mine", str(into)]) == 0
    assert [file.name for file in into.iterdir()] == [f"{folder.name}.jsonl.gz"]
    ours, theirs = (load_runs(root) for root in (folder.parents[1], into))
    assert len(ours) == 2 and list(theirs["accuracy"]) == list(ours["accuracy"])


def test_a_card_that_is_there_is_kept(hub: Hub, folder: Path) -> None:
    assert main(["push", str(folder), "me/mine"]) == 0
    repo = hub.repos["datasets", "me/mine"]
    (repo.folders[repo.main] / "README.md").write_text("Measured in our basement.")
    assert main(["push", str(folder), "me/mine"]) == 0
    assert "basement" in (repo.folders[repo.main] / "README.md").read_text()


def test_an_error_without_a_text_is_told_by_its_name() -> None:
    told = "me/mine: ConnectionError: check the network"
    with pytest.raises(UserError, match=told), _hub_errors("me/mine"):
        raise ConnectionError


def test_offline_is_said_as_what_it_is(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for words in (("push", str(folder), "me/mine"), ("pull", "me/mine", str(folder))):
        said = "me/mine: HF_HUB_OFFLINE is set: unset it to reach the Hub\n"
        assert refused(capsys, *words).endswith(said)


def test_what_everybody_sees_names_no_place_of_this_machine(
    hub: Hub, plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does it take what lies beside a record; a private dataset has paths as recorded."""
    run = plan.run()
    named = {"dataset": "bert/acme/train.csv", "model": "/data/acme/bert"}
    (run / "settings.json").write_text(json.dumps({"schema": 1, **named}))
    lines(run / "attempts.jsonl", [{"event": "start", "attempt": 1, "unix": 1.0}])
    for name in ("tokenizer.json", "train.jsonl", "credentials.json"):
        (run / name).write_text("{}")
    folder = Path(plan.write())
    sweep = json.loads((folder / "sweep.json").read_text())
    sweep["command"] = "sweep --dataset=bert/acme/train.csv /data/acme/mine.yaml"
    (folder / "sweep.json").write_text(json.dumps(sweep))

    def arrived(repo: str) -> str:
        stored = hub.repos["datasets", repo]
        file = stored.folders[stored.main] / f"{folder.name}.jsonl.gz"
        return gzip.decompress(file.read_bytes()).decode()

    assert main(["push", str(folder), "me/open", "--public"]) == 0
    assert "paths in it are shortened" in capsys.readouterr().out
    text = arrived("me/open").replace("\\", "")
    assert "acme" not in text and '"dataset": "train.csv", "model": "bert"' in text
    assert '"command": "sweep --dataset=train.csv mine.yaml"' in text
    assert '"path": "bert/' in text  # of the run, below the folder of the sweep
    assert main(["push", str(folder), "me/open"]) == 0  # it was made public
    assert "acme" not in arrived("me/open")
    assert main(["push", str(folder), "me/mine"]) == 0
    assert "/data/acme/bert" in arrived("me/mine")
    beside = ("tokenizer.json", "train.jsonl", "credentials.json")
    assert not any(name in arrived("me/mine") for name in beside)


def test_public_is_asked_for(hub: Hub, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(folder), "me/open", "--public", "--json"]) == 0
    assert hub.made["datasets", "me/open"]["visibility"] == "public"
    said = json.loads(capsys.readouterr().out)
    assert said["runs"] == 2 and said["commit"] == hub.repos["datasets", "me/open"].main


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and TOKEN not in error
    return error


def test_what_push_refuses(
    hub: Hub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert "expected USER/NAME" in refused(capsys, "push", str(folder), "mine")
    (tmp_path / "empty").mkdir()
    assert "empty" in refused(capsys, "push", str(tmp_path / "empty"), "me/mine")
    odd = folder.rename(folder.with_name("a b"))
    assert "letters, digits" in refused(capsys, "push", str(odd), "me/mine")
    odd.rename(folder)
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    assert "answers 401: check the name and HF_TOKEN" in refused(
        capsys, "push", str(folder), "me/mine"
    )
    monkeypatch.delenv("HF_TOKEN")
    assert "set HF_TOKEN" in refused(capsys, "push", str(folder), "me/mine")
    assert not hub.repos


def test_what_pull_refuses(
    hub: Hub, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    into, made = tmp_path / "into", tmp_path / "made"
    made.mkdir()
    assert "answers 401" in refused(capsys, "pull", "me/none", str(into))
    (made / "weights.bin").write_bytes(b"\x80pickled")
    hub.add_dataset("me/other", made)
    assert "has no archive of records" in refused(capsys, "pull", "me/other", str(into))
    for content, said in (
        (b"\x80pickled", "is not an archive of records"),
        (gzip.compress(b'{"archive": "harness", "schema": 1}\nrubbish\n'), "damaged archive"),
        (
            gzip.compress(
                b'{"archive": "harness", "schema": 1}\n'
                b'{"file": "../../x/settings.json", "content": {}}\n'
            ),
            "damaged archive (it has the folder ../../x",
        ),
    ):
        (made / "x.jsonl.gz").write_bytes(content)
        hub.add_dataset("me/other", made)
        assert said in refused(capsys, "pull", "me/other", str(into))
    assert main(["push", str(folder), "me/mine"]) == 0
    capsys.readouterr()
    hub.spoils = "flipped"
    assert "another checksum" in refused(capsys, "pull", "me/mine", str(into))
    hub.spoils = ""
    (into / f"{folder.name}.jsonl.gz").write_bytes(b"mine")
    assert "has other content" in refused(capsys, "pull", "me/mine", str(into))
    hub.down = "close"
    assert "me/mine: " in refused(capsys, "pull", "me/mine", str(into))
    assert [file.name for file in into.iterdir()] == [f"{folder.name}.jsonl.gz"]
