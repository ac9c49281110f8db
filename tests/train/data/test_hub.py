"""The scripts and the Hub: real command lines against a local server that speaks its protocol."""

from __future__ import annotations

import gzip
import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from torch.distributed.run import parse_args
from transformers import (
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
)

from harness.core.command_line import trainer_flags
from harness.core.records import read_json, read_rows
from harness.core.refused import REFUSED
from harness.core.settings import flag_fields
from harness.read.records.frames import load_runs
from harness.train.run.publish import RECORD
from tests.support.broken_runs import only_run
from tests.support.clients import Client
from tests.support.hub import TOKEN, Hub, image_dataset, text_dataset, tiny_bert, tiny_vit

MODEL = {"bert": "org/tiny-bert", "vit": "org/tiny-vit"}
DATA = {"bert": "org/tiny-text", "vit": "org/tiny-images"}
BARE = "tiny-text"  # the oldest data sets of the Hub have no namespace
PARTS = [f"data/{split}-00000-of-00001.parquet" for split in ("train", "test")]
FILES = {
    "bert": ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"],
    "vit": ["config.json", "model.safetensors", "preprocessor_config.json"],
}
LABELS = {"bert": ["neg", "pos"], "vit": ["red", "green", "blue"]}
HEADED = {"bert": AutoModelForSequenceClassification, "vit": AutoModelForImageClassification}
# A step so small that what is saved is what was loaded: where the weights come from is seen.
STILL = ["--lr", "1e-30", "--epochs", "1", "--b", "4", "--train_size", "all", "--test_size", "all"]
UPLOADED = ["--tiny", "--epochs", "1", "--train_size", "128", "--test_size", "64",
            "--lr", "0.0015", "--push_to_hub", "--hub_model_id", "me/digits",
            "--hub_private_repo", "true"]  # fmt: skip
OFFLINE = ["no network", "--tiny", "HF_HUB_OFFLINE=1", "HF_DATASETS_OFFLINE=1"]
MISSING = ["neither a local folder nor on the Hub", "check the name"]

# A model that brings its own classes. Whoever runs the code leaves a line in a file.
CODE = """
import os
from transformers import BertConfig, BertForSequenceClassification

with open(os.environ["MARKER"], "a") as file:
    file.write("ran\\n")


class OwnConfig(BertConfig):
    model_type = "own-bert"


class OwnModel(BertForSequenceClassification):
    config_class = OwnConfig
"""

# A script on so many ranks: its code, what rank 0 printed, and what any rank complained of.
CLIENT = """
from tests.support.ranks import script

def answer(count, name, *argv):
    env = {}
    if argv[0].startswith("HF_TOKEN="):
        env["HF_TOKEN"], argv = argv[0].partition("=")[2], argv[1:]
    done = script(name, *argv, count=count, env=env)
    return done.code, done.out, done.err + done.others
"""


class Shared(NamedTuple):
    """A Hub, and a warm client whose runs share one cache; what one test loads the next may see."""

    hub: Hub
    cache: Path
    client: Client


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("published")
    tiny_bert(root / "bert")
    tiny_vit(root / "vit")
    tiny_bert(root / "code")
    config = json.loads((root / "code" / "config.json").read_text())
    auto = {"AutoConfig": "own.OwnConfig", "AutoModelForSequenceClassification": "own.OwnModel"}
    config |= {"model_type": "own-bert", "auto_map": auto}
    (root / "code" / "config.json").write_text(json.dumps(config))
    (root / "code" / "own.py").write_text(CODE)
    text_dataset(root / "text", 26, 13)
    image_dataset(root / "images", 19, 7)
    return root


@pytest.fixture(scope="module")
def shared(
    published: Path, tmp_path_factory: pytest.TempPathFactory, calibrated: None
) -> Iterator[Shared]:
    cache = tmp_path_factory.mktemp("cache")
    with Hub() as hub:
        for script in ("bert", "vit"):
            hub.add_model(MODEL[script], published / script)
        hub.add_model("org/own-code", published / "code")
        hub.add_model("org/unseen", published / "vit")
        for name in (DATA["bert"], BARE):
            hub.add_dataset(name, published / "text")
        hub.add_dataset(DATA["vit"], published / "images")
        env = hub.env(cache) | {"MARKER": str(cache / "marker")}
        with Client(CLIENT, env) as client:
            yield Shared(hub, cache, client)


@pytest.fixture
def hub(shared: Shared) -> Hub:
    """Up, and not yet asked."""
    shared.hub.requests.clear()
    shared.hub.down, shared.hub.spoils = False, ""
    return shared.hub


def names(script: str) -> list[str]:
    return ["--model", MODEL[script], "--dataset", DATA[script]]


def test_torchrun_hands_every_flag_on() -> None:
    """torchrun looks at the words after the script's name too, for beginnings of its own flags."""
    names = {n for name, f in flag_fields().items() for n in (name, *f.metadata["names"])}
    names.remove("run")  # the short name of --repeat, for plain python; its help says so
    swallowed = []
    for name in sorted(names | set(trainer_flags()) - set(REFUSED)):
        for words in ([f"--{name}", "2"], [f"--{name}=2"]):
            try:
                parsed = parse_args(["--standalone", "--nproc_per_node=2", "bert.py", *words])
                handed_on = parsed.training_script_args == words
            except SystemExit:
                handed_on = False
            if not handed_on:
                swallowed.append(words)
    assert swallowed == []


@pytest.mark.process
@pytest.mark.parametrize("script", [pytest.param("bert", marks=pytest.mark.slow), "vit"])
def test_two_ranks_load_each_file_once(
    script: str, hub: Hub, shared: Shared, published: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    argv = [*names(script), *STILL, "--save", "last"]
    code, _, err = shared.client(2, script, *argv, "--o", str(out))
    assert code == 0, err
    files_once = [(MODEL[script], file) for file in FILES[script]]
    files_once += [(DATA[script], file) for file in ["README.md", *PARTS]]
    assert hub.downloads() == dict.fromkeys(files_once, 1)

    folder = only_run(out)
    summary, environment = read_json(folder.summary), read_json(folder.environment)
    assert summary is not None and environment is not None
    assert summary["outcome"] == "finished" and summary["epochs_done"] == 1
    assert environment["processes_per_node"] == 2
    assert environment["data"]["dataset"] == DATA[script]
    assert environment["data"]["test_samples"] == {"bert": 13, "vit": 7}[script]
    assert environment["data"]["train_samples"] == {"bert": 24, "vit": 16}[script]
    (row,), _ = read_rows(folder.epochs)
    assert row["eval_samples"] == {"bert": 13, "vit": 7}[script]

    # Weight for weight those of the Hub; only the head is made here.
    (checkpoint,) = folder.path.glob("checkpoint-*")
    saved = HEADED[script].from_pretrained(checkpoint)
    original = AutoModel.from_pretrained(published / script).state_dict()
    kept = saved.base_model.state_dict()
    assert len(kept) > 20 and kept.keys() <= original.keys()
    for name, tensor in kept.items():
        assert torch.allclose(tensor, original[name], rtol=0, atol=1e-20), name
    assert list(saved.config.id2label.values()) == LABELS[script]

    # Once more with what is in the cache: the Hub is asked about it, or nobody is.
    hub.requests.clear()
    again = [2, script, *argv, "--o", str(tmp_path / "again")]
    if script == "vit":
        hub.down = "close"
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        with Client(CLIENT, hub.env(shared.cache) | offline) as client:
            code, _, err = client(*again)
    else:
        code, _, err = shared.client(*again)
    assert code == 0, err
    assert not hub.downloads()
    assert bool(hub.requests) == (script == "bert")
    (row_again,), _ = read_rows(only_run(tmp_path / "again").epochs)
    assert row_again["eval_loss"] == row["eval_loss"]


def refused(client: Client, name: str, *argv: str) -> str:
    """The one line with which this command line is refused."""
    code, out, err = client(1, name, *argv)
    assert code == 2, (argv, code, out, err)
    assert "Traceback" not in err + out
    (line,) = err.strip().splitlines()
    assert line.startswith(f"{name}.py: error: ")
    return str(line)


@pytest.mark.process
@pytest.mark.parametrize("trouble", [
    403, "close", "flipped", "half",
    *(pytest.param(trouble, marks=pytest.mark.slow) for trouble in (401, 404, 429, 500, "silent")),
])  # fmt: skip
def test_ranks_in_trouble_say_it_once(
    trouble: int | str, hub: Hub, shared: Shared, published: Path, tmp_path: Path
) -> None:
    """Also where each of them meets it."""
    model = f"org/trouble-{trouble}"
    hub.add_model(model, published / "bert")
    if trouble in ("flipped", "half"):
        hub.spoils = str(trouble)
    else:
        hub.down = trouble
    argv = ["--model", model, "--dataset", DATA["bert"], *STILL, "--o", str(tmp_path / "out")]
    code, _, err = shared.client(3, "bert", *argv)
    assert code == 2 and err.count("\n") == 1, (code, err)
    assert err.startswith("bert.py: error: --") and "org/t" in err, err
    assert not (tmp_path / "out").exists()
    hub.down, hub.spoils = False, ""
    code, _, err = shared.client(3, "bert", *argv)
    assert code == 0, err


@pytest.mark.process
def test_what_the_hub_does_not_have_and_no_hub(hub: Hub, shared: Shared, tmp_path: Path) -> None:
    client, marker, out = shared.client, shared.cache / "marker", tmp_path / "out"
    small = [*STILL, "--save", "none", "--o", str(out)]
    text, pictures = ["--dataset", DATA["bert"]], ["--dataset", DATA["vit"]]
    # Neither on the Hub nor anywhere else.
    for words in (
        ["bert", "--model", "org/none", *text],
        ["bert", "--model", "nothing-of-this-name", *text],
        ["vit", "--model", "org/none", *pictures],
    ):
        line = refused(client, *words, *small)
        assert all(word in line for word in [f"--model {words[2]}", *MISSING]), line
    for name in ("org/none", "nothing-of-this-name"):
        line = refused(client, "bert", "--model", MODEL["bert"], "--dataset", name, *small)
        assert all(word in line for word in [f"--dataset {name}", *MISSING]), line

    # Code from the Hub runs only where it is allowed to, and is fetched only then.
    own = ["bert", "--model", "org/own-code", *text, *small]
    line = refused(client, *own)
    assert "--model org/own-code" in line and "add --trust_remote_code" in line
    assert not marker.exists() and ("org/own-code", "own.py") not in hub.downloads()
    assert not out.exists()  # nothing of all this is a run

    code, _, err = client(1, *own, "--trust_remote_code")
    assert code == 0, err
    assert marker.exists() and hub.downloads()["org/own-code", "own.py"] == 1
    folder = only_run(out)
    assert (read_json(folder.settings) or {})["trust_remote_code"] is True
    assert folder.outcome() == "finished"

    # A data set without namespace, which the Hub's own library no longer reads.
    line = refused(client, "bert", "--model", MODEL["bert"], "--dataset", BARE, *small)
    assert "--dataset tiny-text" in line and "namespace/name" in line

    hub.down = "close"
    for words in (
        ["bert", "--model", "org/other", *text],
        ["vit", "--model", "org/unseen", "--dataset", DATA["vit"]],
    ):
        line = refused(client, *words, *small)
        assert all(word in line for word in OFFLINE), line
    line = refused(client, "bert", "--model", MODEL["bert"], "--dataset", "org/other", *small)
    assert all(word in line for word in ["--dataset org/other", *OFFLINE]), line


@pytest.mark.process
def test_a_refused_upload_loses_nothing_and_the_same_command_uploads(
    hub: Hub, shared: Shared, tmp_path: Path
) -> None:
    argv = [*UPLOADED, "--o", str(tmp_path / "out")]
    code, out, err = shared.client(2, "vit", f"HF_TOKEN=hf_{'x' * 20}", *argv)
    (line,) = (line for line in err.splitlines() if line.startswith("harness: error: "))
    assert code == 1 and "--push_to_hub: nothing was uploaded (" in line, err
    assert "the Hub answers 401: check the name and the token" in line
    assert "Traceback" not in out + err
    assert [r.status for r in hub.requests if r.method == "POST"] == [401]  # from one rank
    folder = only_run(tmp_path / "out")
    assert folder.outcome() == "finished"
    code, out, err = shared.client(2, "vit", f"HF_TOKEN={TOKEN}", *argv)
    assert code == 0 and "already finished" in out, err
    assert f"{hub.endpoint}/me/digits" in out
    repo = hub.repos["models", "me/digits"]
    assert hub.made["models", "me/digits"]["visibility"] == "private"
    assert len(repo.commits) == 2  # when it was made, and one upload
    there = shutil.copytree(repo.folders[repo.main], tmp_path / "there")
    assert {file.name for file in there.iterdir()} == {
        *("README.md", "record.jsonl.gz"),
        *("config.json", "model.safetensors", "preprocessor_config.json"),
    }
    (checkpoint,) = folder.path.glob("checkpoint-*")
    model = AutoModelForImageClassification.from_pretrained(there).state_dict()
    kept = load_file(checkpoint / "model.safetensors")
    assert {name: model[name].tolist() for name in kept} == {n: t.tolist() for n, t in kept.items()}
    summary, text = dict(folder.read_summary() or {}), (there / "README.md").read_text()
    assert f"| accuracy | {summary['accuracy']:.4f} |" in text
    assert f"| samples/s | {summary['train_samples_per_s']:,.0f} |" in text
    assert "| effective batch | 64 |\n| batch per process | 32 |" in text
    card = ModelCard.load(there / "README.md").data
    assert (card.pipeline_tag, card.base_model, card.datasets) == (
        "image-classification",
        None,
        None,
    )
    assert card.eval_results
    measured = {result.metric_type: result.metric_value for result in card.eval_results}
    assert measured["f1"] == round(summary["f1"], 4)
    record = gzip.decompress((there / RECORD).read_bytes()).decode()
    assert str(tmp_path) not in record and "--o out" in record
    read = load_runs(there)
    assert [*read["accuracy"]] == [summary["accuracy"]] and [*read["setup"]] == ["1_2"]
    for word in (str(tmp_path), socket.gethostname(), TOKEN, str(Path.home())):
        assert word not in text
