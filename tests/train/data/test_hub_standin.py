"""The stand-in is only worth something if the real clients take it for the Hub."""

from __future__ import annotations

import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.clients import Client
from tests.support.hub import Hub, image_dataset, text_dataset, tiny_bert, tiny_vit

BERT, VIT, TEXT, BARE, IMAGES = ("tiny-bert", "me/vit", "me/text", "me/bare-text", "me/images")

# Loads everything.
LOAD = """
import hashlib
from datasets import load_dataset
from transformers import AutoImageProcessor, AutoModelForImageClassification
from transformers import AutoModelForSequenceClassification, AutoTokenizer

def weights(model):
    state = sorted(model.base_model.state_dict().items())
    return {k: hashlib.sha256(v.numpy().tobytes()).hexdigest() for k, v in state}

def images(split):
    return [hashlib.sha256(row["image"].tobytes()).hexdigest() for row in split]

def load():
    tokenizer = AutoTokenizer.from_pretrained("tiny-bert")
    bert = AutoModelForSequenceClassification.from_pretrained("tiny-bert", num_labels=3)
    processor = AutoImageProcessor.from_pretrained("me/vit")
    vit = AutoModelForImageClassification.from_pretrained("me/vit", num_labels=3)
    text, bare = load_dataset("me/text"), load_dataset("me/bare-text")
    pictures = load_dataset("me/images")
    return {
        "ids": tokenizer("the film was great")["input_ids"],
        "labels": list(bert.classifier.weight.shape),
        "bert": weights(bert),
        "vit": weights(vit),
        "pixels": list(processor(pictures["train"][0]["image"])["pixel_values"][0].shape),
        "text": {name: split.to_dict() for name, split in text.items()},
        "bare": {name: split.to_dict() for name, split in bare.items()},
        "names": [d["train"].features["label"].names for d in (text, bare, pictures)],
        "images": {name: images(split) for name, split in pictures.items()},
        "image labels": pictures["test"]["label"][:],
    }
"""

# The class names of an error and of what caused it, for each thing that must fail; and the status
# of the Hub's answer, from the one call that is not repeated for 23 seconds after a 503.
FAIL = """
from datasets import load_dataset
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig

def error(call):
    try:
        call()
    except Exception as e:
        chain = [e, e.__cause__, e.__context__]
        return sorted({c.__name__ for x in chain if x is not None for c in type(x).__mro__})

def fail(what, when=""):
    if what == "status":
        try:
            HfApi().model_info("tiny-bert")
        except HfHubHTTPError as e:
            return e.response.status_code
    repo = "me/never-published" + when  # other names in each call: some answers are kept
    return {
        "info": error(lambda: HfApi().model_info(repo)),
        "file": error(lambda: hf_hub_download("tiny-bert", "no-such-file" + when)),
        "revision": error(lambda: HfApi().model_info("tiny-bert", revision="v9" + when)),
        "config": error(lambda: AutoConfig.from_pretrained(repo)),
        "dataset": error(lambda: load_dataset(repo)),
    }
"""


BOTH = f"{LOAD}{FAIL}\ndef answer(name, *args):\n    return globals()[name](*args)\n"


class Shared(NamedTuple):
    """A Hub, a process that has loaded the libraries, and the folder of its cache."""

    hub: Hub
    client: Client
    folder: Path

    def up(self) -> Shared:
        """And not yet asked."""
        self.hub.requests.clear()
        self.hub.down = False
        return self


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("published")
    tiny_bert(root / "bert")
    tiny_vit(root / "vit")
    text_dataset(root / "text", 20, 10)
    text_dataset(root / "bare", 20, 10, card=False)
    image_dataset(root / "images", 6, 3)
    return root


def publish(hub: Hub, root: Path) -> None:
    hub.add_model(BERT, root / "bert")
    hub.add_model(VIT, root / "vit")
    hub.add_dataset(TEXT, root / "text")
    hub.add_dataset(BARE, root / "bare")
    hub.add_dataset(IMAGES, root / "images")


@pytest.fixture(scope="module")
def shared(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    # Run elsewhere, so that no folder of this repository is taken for a repository id.
    folder = tmp_path_factory.mktemp("client")
    with Hub() as hub:
        publish(hub, published)
        with Client(BOTH, hub.env(folder / "cache"), folder) as client:
            yield Shared(hub, client, folder)


def check(loaded: dict[str, Any], root: Path) -> None:
    """The clients must hold exactly what the published files hold."""
    from datasets import Image, load_dataset
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(root / "bert")
    assert loaded["ids"] == tokenizer("the film was great")["input_ids"]
    assert tokenizer.unk_token_id not in loaded["ids"]
    assert loaded["labels"] == [3, 32] and loaded["pixels"] == [3, 32, 32]
    for name in ("bert", "vit"):
        # Through the library, because it renames some of the weights in the file.
        state = AutoModel.from_pretrained(root / name).state_dict()
        hashes = {k: hashlib.sha256(v.numpy().tobytes()).hexdigest() for k, v in state.items()}
        assert len(loaded[name]) > 20 and loaded[name].items() <= hashes.items()
    for name, folder in (("text", "text"), ("bare", "bare"), ("images", "images")):
        files = {
            split: str(root / folder / "data" / f"{split}-00000-of-00001.parquet")
            for split in ("train", "test")
        }
        local = load_dataset("parquet", data_files=files, cache_dir=str(root / "cache"))
        if name != "images":
            assert loaded[name] == {split: rows.to_dict() for split, rows in local.items()}
            continue
        assert isinstance(local["train"].features["image"], Image)
        for split, rows in local.items():
            pixels = [hashlib.sha256(row["image"].tobytes()).hexdigest() for row in rows]
            assert loaded["images"][split] == pixels and len(set(pixels)) == len(rows)
        assert loaded["image labels"] == [0, 1, 2]
    assert loaded["names"] == [["neg", "pos"], ["neg", "pos"], ["red", "green", "blue"]]


@pytest.mark.process
def test_clients_load_what_was_published(published: Path, shared: Shared) -> None:
    hub, client, folder = shared.up()
    first = client("load")
    check(first, published)
    files = ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
    once = {(BERT, name) for name in files} | {(TEXT, "README.md"), (IMAGES, "README.md")}
    files = ["config.json", "preprocessor_config.json", "model.safetensors"]
    once |= {(VIT, name) for name in files}
    parts = [f"data/{split}-00000-of-00001.parquet" for split in ("train", "test")]
    once |= {(repo, part) for repo in (TEXT, BARE, IMAGES) for part in parts}
    assert hub.downloads() == dict.fromkeys(once, 1)
    assert any("transformers/" in request.agent for request in hub.requests)

    # The cache holds the contents now: the Hub is asked about them, but sends none.
    hub.requests.clear()
    assert client("load") == first
    assert hub.requests and not hub.downloads()

    # Nobody asks a Hub that is known to be out of reach.
    hub.requests.clear()
    hub.down = True
    env = hub.env(folder / "cache") | {"HF_HUB_OFFLINE": "1"}
    with Client(BOTH, env, folder) as offline:
        assert offline("load") == first
    assert not hub.requests


@pytest.mark.process
def test_clients_get_the_proper_errors(shared: Shared) -> None:
    hub, client, _ = shared.up()
    errors = client("fail", "errors", "up")
    hub.down = True
    assert client("fail", "status") == 503
    # Connections dropped without an answer are not repeated in these calls.
    hub.down = "close"
    when_down = client("fail", "errors", "down")
    assert "RepositoryNotFoundError" in errors["info"]
    assert "EntryNotFoundError" in errors["file"]
    assert "RevisionNotFoundError" in errors["revision"]
    assert {"OSError", "RepositoryNotFoundError"} <= set(errors["config"])
    assert "DatasetNotFoundError" in errors["dataset"]
    for what in ("info", "file", "revision", "dataset"):
        assert "TransportError" in when_down[what], what
    assert "OSError" in when_down["config"]
    assert hub.requests[-1].status == 0


def ask(url: str, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    request = urllib.request.Request(url, method=method, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read(), dict(error.headers)


def test_parts_of_files_commits_and_down(tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a b.txt").write_text("0123456789")
    with Hub() as hub:
        old = hub.add_model("me/it", folder)
        url = f"{hub.endpoint}/me/it/resolve/main/sub/a%20b.txt"
        assert ask(url)[1] == b"0123456789"
        assert ask(url, Range="bytes=2-4")[:2] == (206, b"234")
        assert ask(url, Range="bytes=7-")[:2] == (206, b"789")
        assert ask(url, Range="bytes=10-")[0] == 416
        status, body, headers = ask(url, "HEAD")
        assert (status, body, headers["Content-Length"]) == (200, b"", "10")
        assert headers["X-Repo-Commit"] == old
        assert hub.downloads() == {("me/it", "sub/a b.txt"): 3}

        tree = json.loads(ask(f"{hub.endpoint}/api/models/me/it/tree/main")[1])
        assert [(e["type"], e["path"]) for e in tree] == [("directory", "sub")]
        tree = json.loads(ask(f"{hub.endpoint}/api/models/me/it/tree/main/sub")[1])
        assert [(e["path"], e["size"]) for e in tree] == [("sub/a b.txt", 10)]

        newer = tmp_path / "newer"
        newer.mkdir()
        (newer / "b.bin").write_bytes(b"new")
        assert hub.add_model("me/it", newer) != old
        assert ask(url)[2]["X-Error-Code"] == "EntryNotFound"
        assert ask(url.replace("main", old))[1] == b"0123456789"
        assert ask(f"{hub.endpoint}/me/it/resolve/main/b.bin")[1] == b"new"
        assert hub.downloads()["me/it", "b.bin"] == 1
        assert [r.status for r in hub.requests[-2:]] == [302, 200]

        hub.down = True
        assert ask(url)[0] == 503
