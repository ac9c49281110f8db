"""What the Hub's libraries raise becomes one line that says what to do (train/data/models.py)."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub import constants, errors

from harness.core.settings import Settings, UserError
from harness.train.data import downloads, models, sources
from harness.train.data.models import explain
from tests.support.clients import Client
from tests.support.hub import Hub, text_dataset, tiny_bert, tiny_vit

NOT_HERE = "there is no folder of that name here"
OFFLINE = ["no network", NOT_HERE, "--tiny", "HF_HUB_OFFLINE=1", "HF_DATASETS_OFFLINE=1"]
MISSING = ["neither a local folder nor on the Hub", "check the name", "HF_TOKEN"]
BUILDER = "Config name is missing. Please pick one among the available configs: ['a', 'b']"


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user who has not chosen to work offline."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(models, "no_network", lambda: False)


def answered(kind: type[Exception], text: str) -> Exception:
    """An error that carries the Hub's answer."""
    return kind(text, response=SimpleNamespace(headers={}, request=None))  # type: ignore[call-arg]


# What a library raised -> words of the answer.
ERRORS: list[tuple[Exception, list[str]]] = [
    (UserError("as it was"), ["as it was"]),
    (DatasetNotFoundError("Dataset 'a/b' doesn't exist on the Hub"), MISSING),
    (DatasetNotFoundError("couldn't reach the Hub"), OFFLINE),
    (ImportError("No module named 'timm'", name="timm"), ["needs a package", "timm"]),
    (ImportError("needs detectron\nmore"), ["needs a package", "needs detectron"]),
    (ConnectionError("refused"), OFFLINE),
    (errors.OfflineModeIsEnabled("offline"), OFFLINE),
    (answered(errors.GatedRepoError, "gated"), ["is gated", "ask for access", "HF_TOKEN"]),
    (answered(errors.RepositoryNotFoundError, "401"), MISSING),
    (OSError("We couldn't connect to 'https://huggingface.co'"), OFFLINE),
    (ValueError("requires trust_remote_code=True"), ["code of its own", "--trust_remote_code"]),
    (OSError("a/b is not a local folder and is not a valid model identifier"), MISSING),
    (RuntimeError("Dataset scripts are no longer supported"), ["loading script", "parquet"]),
    (ValueError(BUILDER), ["'a', 'b'", "--dataset_config"]),
    (StopIteration(), ["cannot be read: it is empty"]),
    (EOFError("it ends early"), ["cannot be loaded: it ends early"]),
    (zlib.error("invalid block"), ["cannot be loaded: invalid block"]),
    (ValueError("something\n  else"), ["cannot be loaded: something else"]),
]


@pytest.mark.parametrize(("error", "words"), ERRORS, ids=lambda e: str(e)[:30])
def test_each_error_is_explained(error: Exception, words: list[str]) -> None:
    with pytest.raises(UserError) as raised, explain("dataset", "a/b"):
        raise error
    message = str(raised.value)
    assert all(word in message for word in words), message
    assert "\n" not in message and ("--dataset a/b" in message or error is raised.value)


def test_a_lack_of_memory_is_none_of_the_data() -> None:
    for lack in (MemoryError(), ImportError("libx.so: failed to map segment from shared object")):
        with pytest.raises(type(lack)) as raised, explain("dataset", "a/b"):
            raise OSError("cannot load it") from lack
        assert raised.value is lack


def test_an_error_is_known_by_what_caused_it() -> None:
    for cause, words in ((errors.OfflineModeIsEnabled("x"), OFFLINE),
                         (answered(errors.RepositoryNotFoundError, "401"), MISSING)):  # fmt: skip
        with pytest.raises(UserError) as raised, explain("model", "a/b"):
            raise OSError("cannot load it") from cause
        assert all(word in str(raised.value) for word in words)


def test_offline_users_are_not_advised_to_go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as raised, explain("model", "a/b"):
        raise errors.OfflineModeIsEnabled("offline")
    assert f"--model a/b is not in the cache, {NOT_HERE}" in str(raised.value)
    assert "HF_HUB_OFFLINE=1" not in str(raised.value) and "--tiny" in str(raised.value)


@pytest.mark.parametrize("name", ["two words", "a--b", "-x", "a/b:c"])
def test_what_the_hub_allows_no_name_is_one_line(name: str) -> None:
    for kind in ("dataset", "model"):
        said = f"--{kind} {name}: there is no folder of that name here, and the Hub allows no such"
        with pytest.raises(UserError, match=said), explain(kind, name):
            raise AssertionError("nobody is asked")
    with pytest.raises(UserError, match=f"--dataset {name}: there is no folder"):
        sources.load(Settings(script="bert", dataset=name))


def test_an_unreadable_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: broken"), explain("model", str(tmp_path)):
        raise OSError("broken")


def test_a_damaged_file_that_stays_is_not_said_to_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a cache that several people share."""
    blob = tmp_path / ("0" * 64)
    blob.write_bytes(b"damaged")
    monkeypatch.setattr(downloads, "_large_files", lambda folder: [("model.safetensors", blob)])

    def closed(self: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "unlink", closed)
    with pytest.raises(
        UserError, match=r"and it could not be removed: remove .*models--me--it, and"
    ):
        downloads.check_downloads("model", "me/it")
    monkeypatch.undo()
    monkeypatch.setattr(downloads, "_large_files", lambda folder: [("model.safetensors", blob)])
    with pytest.raises(UserError, match="and removed from the cache: the same"):
        downloads.check_downloads("model", "me/it")
    assert not blob.exists()


def test_a_mistake_of_ours_passes() -> None:
    with pytest.raises(KeyError), explain("model", "a/b"):
        raise KeyError("ours")


# What each name is answered with.
CLIENT = """
from harness.core.settings import Settings
from harness.train.data import images, models, sources

def message(function, **fields):
    try:
        function(Settings(**{"script": "bert", "train_size": 4, "test_size": 2, **fields}))
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def answer(when):
    return {
        "model": message(models.configuration, model=f"me/none-{when}"),
        "bare": message(models.configuration, model=f"nothing-like-{when}"),
        "images": message(images._resizer, script="vit", model=f"me/none-{when}"),
        "dataset": message(sources.load, dataset=f"me/none-{when}"),
        "config": message(sources.load, dataset=f"me/two-{when}"),
    }
"""


@pytest.mark.process
def test_a_hub_without_it_and_no_hub(tmp_path: Path) -> None:
    part = datasets.Dataset.from_dict({"text": ["a", "b"] * 9, "label": [0, 1] * 9})
    for name in ("first", "second"):
        (tmp_path / "two" / name).mkdir(parents=True)
        part.to_parquet(tmp_path / "two" / name / "train.parquet")
    configs = [f"- config_name: {n}\n  data_files: {n}/*.parquet" for n in ("first", "second")]
    card = "---\nconfigs:\n" + "\n".join(configs) + "\n---\n"
    (tmp_path / "two" / "README.md").write_text(card)
    with Hub() as hub:
        hub.add_dataset("me/two-up", tmp_path / "two")
        with Client(CLIENT, hub.env(tmp_path / "cache")) as ask:
            up = ask("up")
            hub.down = "close"
            down = ask("down")
        for what in ("model", "bare", "images", "dataset"):
            assert all(word in up[what] for word in ["UserError", *MISSING]), up[what]
        for word in ("UserError", "me/two-up", "first", "second", "--dataset_config"):
            assert word in up["config"], up["config"]
        for what, message in down.items():
            assert all(word in message for word in ["UserError", *OFFLINE]), (what, message)


# Each load as in a process of its own; the pauses between two tries are left out.
TROUBLED = """
import datasets, os, tempfile
from huggingface_hub import constants
from huggingface_hub.utils import _http

from harness.core.settings import Settings
from harness.train.data import downloads, models, sources
from harness.train.run.start import quiet

quiet(bars=False)
pauses = []

class Time:
    sleep = staticmethod(pauses.append)

_http.time = downloads.time = Time
downloads.ANSWER_S = 0.5

def message(function, **fields):
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = False
    downloads.no_network.cache_clear()
    pauses.clear()
    try:
        function(Settings(**{"script": "bert", "train_size": 4, "test_size": 2, **fields}))
    except Exception as error:
        return f"{type(error).__name__}: {error}", sum(pauses)
    return "loaded", sum(pauses)

def answer(name, what="model"):
    if what == "model":
        return message(lambda s: models.build(s, ["a", "b"]), model=name)
    return message(sources.load, dataset=name)
"""


def printed(client: Client) -> str:
    client.errors.seek(0)
    return str(client.errors.read())


@pytest.mark.process
def test_a_hub_in_trouble_with_and_without_a_cache(tmp_path: Path) -> None:
    tiny_bert(tmp_path / "bert")
    text_dataset(tmp_path / "text", 20, 10)
    with Hub() as hub:
        for name in ("me/cached", "me/new", "me/half", "me/wrong"):
            hub.add_model(name, tmp_path / "bert")
            hub.add_dataset(name, tmp_path / "text")
        with Client(TROUBLED, hub.env(tmp_path / "cache")) as load:
            for what in ("model", "dataset"):
                assert load("me/cached", what) == ["loaded", 0], what
            for down, words in (
                ("close", OFFLINE),
                ("silent", OFFLINE),
                (429, ["the Hub answers 429", "try again later"]),
                (500, ["the Hub answers 500", "try again later"]),
                (403, ["403", "check the name", "HF_TOKEN"]),
                (404, ["--{} me/new"]),
            ):
                hub.down = down
                for what in ("model", "dataset"):
                    text, waited_s = load("me/new", what)
                    found = [
                        word.format(what) in text for word in ["UserError: --{} me/new", *words]
                    ]
                    assert all(found) and "\n" not in text, (down, what, text)
                    assert waited_s <= 1 or down in (429, 500), (down, what, waited_s)
                    # What was downloaded once is there.
                    if down != 403:
                        assert load("me/cached", what)[0] == "loaded", (down, what)
            hub.down = False
            hub.spoils = "flipped"
            for what in ("model", "dataset"):
                text, _ = load("me/wrong", what)
                assert "not what the Hub has (another checksum)" in text, text
            hub.spoils = "half"
            text, _ = load("me/half")
            assert (
                "UserError: --model me/half" in text and "broke off" in text and "\n" not in text
            ), text
            hub.spoils = ""
            for name in ("me/half", "me/wrong"):
                for what in ("model", "dataset"):
                    assert load(name, what)[0] == "loaded", (name, what)
            assert printed(load) == ""


@pytest.mark.process
def test_a_name_of_no_host_is_one_line_and_quick(tmp_path: Path) -> None:
    with Hub() as hub:
        env = hub.env(tmp_path / "cache") | {"HF_ENDPOINT": "http://no-host.invalid"}
    with Client(TROUBLED, env) as load:
        for what in ("model", "dataset"):
            text, waited_s = load("me/new", what)
            assert all(word in text for word in OFFLINE) and waited_s <= 1, text
        assert printed(load) == ""


def test_pickled_weights_are_loaded_only_on_demand(tmp_path: Path) -> None:
    tiny_bert(tmp_path)
    state = models.build(Settings(script="bert", model=str(tmp_path)), ["a", "b"]).state_dict()
    (tmp_path / "model.safetensors").unlink()
    torch.save(state, tmp_path / "pytorch_model.bin")
    pickled = Settings(script="bert", model=str(tmp_path))
    with pytest.raises(UserError, match=r"has no safetensors file: .*add --trust_remote_code"):
        models.build(pickled, ["a", "b"])
    models.build(replace(pickled, trust_remote_code=True), ["a", "b"])


def vit(**fields: Any) -> Settings:
    return Settings(**{"script": "vit", **fields})


def test_models_that_do_not_fit(tmp_path: Path) -> None:
    tiny_bert(tmp_path / "bert")
    tiny_vit(tmp_path / "vit")
    with pytest.raises(UserError, match=r"vit\) is no text classifier"):
        models.build(Settings(script="bert", model=str(tmp_path / "vit")), ["a", "b"])
    with pytest.raises(UserError, match=r"bert\) is no image classifier"):
        models.build(vit(model=str(tmp_path / "bert"), from_scratch=True), ["a", "b"])
    with pytest.raises(UserError, match=r"--image_size 64.*for 32.*--from_scratch"):
        models.configuration(vit(model=str(tmp_path / "vit"), image_size=64))
    scratch = vit(model=str(tmp_path / "vit"), image_size=64, from_scratch=True)
    assert models.configuration(scratch).image_size == 64
    with pytest.raises(UserError, match=r"bert-tiny is for bert\.py, not for vit\.py"):
        models.configuration(vit(model="bert-tiny"))
    with pytest.raises(UserError, match="did you mean vit-small-patch16"):
        models.configuration(vit(model="vit-smal-patch16"))
