"""Each mistake gets one line with the fix and exit code 2, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from harness.core.command_line import command_line
from harness.core.process import report_to_torchrun
from harness.core.provenance import ROOT
from harness.core.settings import Settings, UserError
from harness.train.devices import refuse_impossible
from tests.support.ranks import script


def answer(folder: Path, words: str, count: int = 1, env: dict[str, str] | None = None) -> str:
    """The one line that a command line is answered with."""
    name, *argv = in_a_folder(folder, words)
    done = script(name, *argv, count=count, env=env)
    assert done.code == 2, done.err[-2000:]
    assert_one_line(name, done.err, folder)
    return done.err


def in_a_folder(folder: Path, words: str) -> list[str]:
    """The words, which record there unless they say where."""
    argv = words.split()
    return argv if "--output_dir" in argv else [*argv, "--output_dir", str(folder / "out")]


def assert_one_line(name: str, message: str, folder: Path) -> None:
    assert message.count("\n") == 1 and message.startswith(f"{name}.py: error: "), message
    assert not list((folder / "out").rglob("*"))


def csv(folder: Path, name: str, lines: list[str], header: str = "text,label") -> None:
    file = folder / f"{name}.csv"
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join([header, *lines]) + "\n")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small files, each wrong in its own way; good.csv is right."""
    from datasets import Dataset, DatasetDict
    from PIL import Image

    folder = tmp_path_factory.mktemp("data")
    good = [f"the film was so {i},{i % 2}" for i in range(40)]
    csv(folder, "good", good)
    csv(folder, "nolabel", [f"words {i},{i % 25}" for i in range(40)], "text,score")
    csv(folder, "oneclass", [f"words {i},1" for i in range(40)])
    csv(folder, "hole", [*good, "words,"])
    csv(folder, "notext", [*good, ",1"])
    csv(folder, "float", [f"words {i},{i / 7}" for i in range(40)])
    csv(folder, "ragged", [*good, "words,1,and,more"])
    csv(folder, "two", [f"a {i},b {i},{i % 2}" for i in range(40)], "a,b,label")
    csv(folder, "twolabels", [f"a {i},{i % 3},{i % 2}" for i in range(40)], "text,label,target")
    csv(folder, "few", good[:2])
    csv(folder, "header", [])
    csv(folder, "emptytest/train", good)
    csv(folder, "emptytest/test", [])
    (folder / "nothing.csv").write_text("")
    (folder / "binary.csv").write_bytes(bytes(range(256)) * 8)
    (folder / "bad.json").write_text("{no json")
    (folder / "bad.parquet").write_text("no parquet")
    (folder / "notes.txt").write_text("words")
    (folder / "emptyfolder").mkdir()
    part = Dataset.from_dict({"text": ["a b", "c d"] * 20, "label": [0, 1] * 20})
    DatasetDict({"one": part, "two": part}).save_to_disk(folder / "notrain")
    hidden = part.remove_columns("label").add_column("label", [-1] * 40)
    DatasetDict({"train": part, "test": hidden}).save_to_disk(folder / "hidden")
    bare = part.remove_columns("label")
    DatasetDict({"train": part, "test": bare}).save_to_disk(folder / "barelabel")
    DatasetDict({"train": part, "test": part}).save_to_disk(folder / "both")
    for place, broken in (("images", False), ("broken", True)):
        for name in ("a", "b"):
            (folder / place / "train" / name).mkdir(parents=True)
            for i in range(12):
                file = folder / place / "train" / name / f"{i}.png"
                Image.new("RGB", (8, 8), (i * 20, 0, 0)).save(file)
        if broken:
            (folder / place / "train" / "a" / "3.png").write_bytes(b"no image")
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    (folder / "bad.yaml").write_text("lr: [")
    (folder / "list.yaml").write_text("- lr")
    (folder / "twice.yaml").write_text("lr: 1e-3\nepochs: 1\nlr: 2e-3\n")
    (folder / "within.yaml").write_text("trainer: {adam_beta1: 0.8, adam_beta1: 0.9}\n")
    (folder / "bert.yaml").write_text("script: bert\n")
    models(folder)
    return folder


def models(folder: Path) -> None:
    """Folders of models: one for texts, one for images, and some that do not fit."""
    from transformers import PreTrainedTokenizerFast

    from tests.support.hub import tiny_bert, tiny_vit

    tiny_bert(folder / "bertmodel")
    tiny_vit(folder / "vitmodel")
    # A text model's tokenizer beside other models: it is the model that is refused.
    tiny_vit(folder / "mixed")
    (folder / "detector").mkdir()
    (folder / "detector" / "config.json").write_text('{"model_type": "yolos"}')
    tiny_bert(folder / "nopad")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        for other in ("mixed", "detector"):
            (folder / other / name).write_bytes((folder / "bertmodel" / name).read_bytes())
        (folder / "nopad" / name).unlink()
    file = str(folder / "bertmodel" / "tokenizer.json")
    PreTrainedTokenizerFast(tokenizer_file=file, unk_token="[UNK]").save_pretrained(
        folder / "nopad"
    )
    (folder / "emptymodel").mkdir()
    tiny_bert(folder / "run" / "attempt" / "checkpoint-8")


ALL = "--train_size all --test_size all --epochs 1 --b 4"
TEXT = f"bert --model bert-nano {ALL} --dataset {{d}}"
PICTURES = f"vit --model vit-nano {ALL} --dataset {{d}}"
GOOD = f"bert {ALL} --dataset {{d}}/good.csv --model"
TINY = "bert --tiny"
OFFLINE = ["is not in the cache", "--tiny", "HF_HUB_OFFLINE"]


def short(words: str) -> str:
    """What is wrong in it, as the name of its test."""
    return words.replace(f" {ALL}", "").replace("--dataset {d}/", "").replace("{d}/", "")


# Command line, with {d} for the folder of the data -> words that the answer must hold.
MISTAKES: dict[str, list[str]] = {
    # flags
    "bert --tini": ["--tini", "did you mean --tiny?"],
    f"{TINY} --b 4 --per_gpu_batch 8": ["8", "4", "contradicts"],
    f"{TINY} --setup 1_2": ["--setup 1_2", "--setup 1_1", "--nproc_per_node=2"],
    f"{TINY} --epochs 0": ["--epochs 0", "at least 1"],
    f"{TINY} --lr -1": ["--lr -1", "above 0"],
    f"{TINY} --fp16": ["--fp16", "--precision fp16"],
    f"{TINY} --fsdp_shard grads": ["--fsdp_shard grads", "--strategy fsdp"],
    f"{TINY} --max_length 1": ["--max_length 1"],
    f"{TINY} --lr_scheduler_type cosin": ["lr_scheduler_type", "'cosin'", "'cosine'"],
    f"{TINY} --weight_decay much": ["weight_decay", "'much'"],
    f"{TINY} --warmup_steps -5": ["warmup_steps", "-5", ">= 0"],
    f"{TINY} --report_to nope": ["--report_to", "nope", "tensorboard"],
    f"{TINY} --dataset_config other": ["--dataset_config other", "embedded:english"],
    f"{TEXT}/good.csv --dataset_config other": ["--dataset_config other", "good.csv"],
    f"{TINY} --test_split 1.2": ["--test_split 1.2", "0.2"],
    f"{TINY} --validation_split 0": ["--validation_split 0", "between 0 and 1"],
    "bert {d}/none.yaml": ["none.yaml", "does not exist"],
    "bert {d}/bad.yaml": ["bad.yaml", "line", "YAML"],
    "bert {d}/list.yaml": ["list.yaml", "lr: 3e-5"],
    "bert {d}/twice.yaml": ["twice.yaml", "lr is given twice"],
    "bert {d}/within.yaml": ["within.yaml", "adam_beta1 is given twice"],
    "bert {d}/binary.yaml": ["binary.yaml", "YAML"],
    "vit {d}/bert.yaml": ["bert.yaml", "bert.py", "vit.py"],
    # what the device cannot do
    f"{TINY} --precision fp16": ["--precision fp16", "GPU"],
    f"{TINY} --precision tf32": ["--precision tf32", "GPU"],
    f"{TINY} --batchnorm sync": ["--batchnorm sync", "GPU"],
    f"{TINY} --strategy dp": ["--strategy dp", "GPU", "ddp"],
    f"{TINY} --strategy ddp": ["--strategy ddp", "torchrun"],
    # where the records go
    f"{TINY} --output_dir {{d}}/good.csv": ["--output_dir", "good.csv", "folder"],
    f"{TINY} --output_dir {{d}}/good.csv/a/b": ["--output_dir", "good.csv/a/b", "folder"],
    f"{TINY} --output_dir /proc/nothing/a": ["--output_dir /proc/nothing/a", "/proc"],
    f"{TINY} --output_dir /proc/self/a": ["--output_dir /proc/self/a"],
    # models
    f"{GOOD} bert-nan": ["--model bert-nan", "did you mean bert-nano?"],
    f"{PICTURES}/images --model vit-nan": ["contradicts"],
    f"vit {ALL} --dataset {{d}}/images --model vit-nan": ["vit-nan", "did you mean vit-nano?"],
    f"{GOOD} vit-nano": ["--model vit-nano", "vit.py"],
    f"{GOOD} {{d}}/none": ["--model", "/none", "no such folder"],
    f"{GOOD} ./none": ["--model ./none", "no such folder"],
    f"{GOOD} none/": ["--model none/", "no such folder"],
    f"{GOOD} {{d}}/emptymodel": ["--model", "emptymodel", "config.json", "saved there\n"],
    f"{GOOD} {{d}}/run": ["no model was saved there: did you mean", "/run/attempt/checkpoint-8?"],
    f"{GOOD} me/nothing": ["--model me/nothing", *OFFLINE],
    f"{GOOD} qqqq": ["--model qqqq", *OFFLINE],
    f"{GOOD} {{d}}/mixed": ["mixed", "its config.json says vit", "reads images: for vit.py"],
    f"{GOOD} {{d}}/vitmodel": ["its config.json says vit, which reads images: for vit.py"],
    f"vit {ALL} --dataset {{d}}/images --model {{d}}/bertmodel": [
        "its config.json says bert, which reads texts: for bert.py",
    ],
    f"{GOOD} {{d}}/detector": ["detector", "yolos", "no text classifier"],
    f"{GOOD} {{d}}/nopad": ["nopad", "padding token"],
    f"vit {ALL} --dataset {{d}}/images --model {{d}}/vitmodel --image_size 64": [
        *("--image_size 64", "32", "--from_scratch"),
    ],
    # data
    f"{TEXT}/none": ["/none", "no such folder or file"],
    f"{TEXT}/god.csv": ["no such folder or file: did you mean /", "/good.csv?"],
    f"{GOOD} {{d}}/vitmodle": ["there is no such folder: did you mean /", "/vitmodel?"],
    "bert --tiny --dataset missing.csv": ["missing.csv", "no such folder or file"],
    "vit --tiny --dataset none/": ["--dataset none/", "no such folder or file"],
    "vit --tiny --dataset a/b/c": ["--dataset a/b/c", "no such folder or file"],
    f"{TINY} --dataset a--b": ["--dataset a--b", "no folder of that name", "no such name"],
    f"{TEXT}/notes.txt": ["notes.txt", ".csv", ".parquet"],
    f"{TEXT}/emptyfolder": ["emptyfolder", "data files"],
    f"bert --model bert-nano {ALL} --dataset me/none": ["--dataset me/none", *OFFLINE],
    f"bert --model bert-nano {ALL} --dataset nothing": ["--dataset nothing", *OFFLINE],
    f"{TINY} --dataset embedded:no": ["embedded:no", "embedded:english"],
    f"{TEXT}/ragged.csv": ["ragged.csv", "cannot be read"],
    f"{TEXT}/binary.csv": ["binary.csv", "cannot be read", "save it as UTF-8"],
    f"{TEXT}/bad.json": ["bad.json", "cannot be read"],
    f"{TEXT}/bad.parquet": ["bad.parquet", "cannot be read"],
    f"{TEXT}/nothing.csv": ["nothing.csv", "cannot be read"],
    f"{TEXT}/header.csv": ["header.csv", "empty"],
    f"{TEXT}/emptytest": ["emptytest", "test", "empty"],
    f"{TEXT}/notrain": ["notrain", "train", "one, two"],
    f"{PICTURES}/broken": ["broken", "3.png"],
    f"{TEXT}/images": ["images", "no column of text", "image, label"],
    f"{PICTURES}/good.csv": ["good.csv", "no column of images", "text, label"],
    f"{PICTURES}/images --image_column label": ["--image_column label", "image, label"],
    f"{PICTURES}/images --image_column image,image": ["--image_column", "too many"],
    f"{TEXT}/good.csv --text_column no": ["--text_column no", "text, label"],
    f"{TEXT}/good.csv --text_column text,text,text": ["--text_column", "too many"],
    f"{TEXT}/good.csv --label_column no": ["--label_column no", "text, label"],
    f"{TEXT}/good.csv --label_column lable": ["--label_column lable", "did you mean label? "],
    f"{TEXT}/good.csv --text_column Text": ["--text_column Text", "did you mean text? "],
    f"{TEXT}/two.csv": ["two.csv", "several columns of text", "(a, b)", "or a pair, as a,b"],
    f"{TEXT}/twolabels.csv": ["label, target", "--label_column"],
    f"{TEXT}/nolabel.csv": ["nolabel.csv", "text, score", "--label_column"],
    f"{TEXT}/oneclass.csv": ["label", "one class, ", "--train_size all"],
    f"{TEXT}/hole.csv": ["label", "no class"],
    f"{TEXT}/hidden --test_split test": ["--test_split test", "no class"],
    f"{TEXT}/barelabel --test_split test": ["--test_split test", "label"],
    f"{TEXT}/notext.csv": ["column text", "no text"],
    f"{TEXT}/float.csv": ["label", "float", "--label_column"],
    f"{TEXT}/few.csv": ["few.csv", "2 samples", "too few"],
    f"{TEXT}/good.csv --test_split no": ["--test_split no", "train", "0.2"],
    f"{TEXT}/good.csv --test_split train": ["--test_split train", "0.2"],
    f"{TEXT}/good.csv --validation_split no": ["--validation_split no", "train", "0.2"],
    f"{TEXT}/hidden --test_split 0.2 --validation_split test": ["--validation_split test", "class"],
    f"{TEXT}/both --validation_split test": ["--validation_split test", "test set", "--test_split"],
    f"{TEXT.replace('all', '32', 1)}/good.csv --validation_split 0.2": [
        *("--train_size 32", "--validation_split 0.2", "40 samples", "--train_size 25"),
    ],
    "bert --model bert-nano --train_size 99 --dataset {d}/good.csv": ["99", "32", "all"],
    "bert --model bert-nano --train_size all --test_size 99 --dataset {d}/good.csv": ["99", "all"],
    "bert --tiny --train_size 8 --b 16 --grad_acc 2": ["8", "32", "--per_gpu_batch"],
}  # fmt: skip


# What names and the disk tell.
EARLY = (
    "vit --tiny --dataset none/", "vit --tiny --dataset a/b/c", f"{GOOD} none/",
    f"{TEXT}/good.csv --text_column no", f"{TEXT}/good.csv --label_column no",
    f"{TEXT}/good.csv --label_column lable", f"{TEXT}/good.csv --text_column Text",
    f"{TEXT}/god.csv", f"{GOOD} {{d}}/vitmodle", f"{GOOD} {{d}}/run",
    f"{TEXT}/none", "bert --tiny --dataset missing.csv", f"{TEXT}/notes.txt",
    f"{TINY} --dataset embedded:no", f"{TINY} --dataset_config other",
    f"{TEXT}/good.csv --dataset_config other", f"{GOOD} {{d}}/none", f"{GOOD} {{d}}/emptymodel",
    f"{GOOD} bert-nan", f"{GOOD} vit-nano", f"{TINY} --output_dir {{d}}/good.csv",
)  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("words", [words for words in MISTAKES if words not in EARLY], ids=short)
def test_one_process(words: str, data: Path, tmp_path: Path) -> None:
    message = answer(tmp_path, words.format(d=data))
    assert all(word in message for word in MISTAKES[words]), message


@pytest.mark.parametrize("words", EARLY, ids=short)
def test_before_libraries_are_loaded(
    words: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the first line of a script, which loads torch after it (test_architecture.py)."""
    name, *argv = in_a_folder(tmp_path, words.format(d=data))
    with pytest.raises(SystemExit) as ended:
        command_line(name, argv)
    printed, message = capsys.readouterr()
    assert ended.value.code == 2 and printed == ""
    assert_one_line(name, message, tmp_path)
    assert all(word in message for word in MISTAKES[words]), message


TWO_RANKS: dict[str, list[str]] = {
    "bert --tini": ["did you mean --tiny?"],
    f"{TINY} --setup 1_4": ["--setup 1_4", "2 process(es)", "--setup 1_2"],
    f"{TINY} --strategy single": ["--strategy single", "2 were started"],
    f"{TINY} --strategy fsdp --fsdp_offload": ["--fsdp_offload", "GPU"],
    f"{TINY} --use_cpu false": ["use_cpu"],
    f"{TINY} --output_dir /proc/self/a": ["--output_dir /proc/self/a"],
    f"{TEXT}/good.csv --label_column no": ["--label_column no"],
    f"{TEXT}/ragged.csv": ["ragged.csv", "cannot be read"],
    f"{GOOD} {{d}}/none": ["--model", "no such folder"],
    f"{TINY} --train_size 24": ["24", "64", "2)", "--train_size"],
    f"{TEXT}/both --validation_split test": ["--validation_split test", "test set"],
}


@pytest.mark.process
@pytest.mark.parametrize("words", TWO_RANKS, ids=short)
def test_two_processes(words: str, data: Path, tmp_path: Path) -> None:
    message = answer(tmp_path, words.format(d=data), count=2)
    assert all(word in message for word in TWO_RANKS[words]), message


def test_gpus_that_are_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **how: False)
    for precision, words in (("tf32", "Ampere"), ("bf16", "use fp16 or fp32")):
        with pytest.raises(UserError, match=f"--precision {precision}.*{words}"):
            refuse_impossible(Settings(script="bert", precision=precision), cuda=True)
    for fine in ({"precision": "fp16"}, {"batchnorm": "sync"}, {"fsdp_offload": True}):
        refuse_impossible(Settings(**{"script": "bert", **fine}), cuda=True)  # type: ignore[arg-type]
    refuse_impossible(Settings(script="bert", precision="bf16"), cuda=False)


@pytest.mark.parametrize(("override", "precision"), [("1", "fp32"), ("0", "tf32")])
def test_a_variable_that_replaces_the_precision(
    override: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
    with pytest.raises(UserError, match=f"NVIDIA_TF32_OVERRIDE={override}.*{precision}.*unset"):
        refuse_impossible(Settings(script="bert", precision=precision), cuda=True)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", str(1 - int(override)))  # what it does anyway
    refuse_impossible(Settings(script="bert", precision=precision), cuda=True)


@pytest.mark.process
@pytest.mark.parametrize("launcher", ["torch.distributed.run", "harness.train.torchrun"])
def test_torchrun_ends_with_the_line(launcher: str) -> None:
    """Its last block has the mistake in place of a hint at tracebacks, on whichever rank."""
    command = [sys.executable, "-m", launcher, "--standalone", "--nproc_per_node=2", "bert.py"]
    done = subprocess.run([*command, "--bacth=3"], cwd=ROOT, capture_output=True, text=True)
    line = "bert.py: error: unknown flag --bacth: did you mean --batch? use --per_gpu_batch"
    said = [text for text in done.stderr.splitlines() if "distributed/run.py" not in text]
    assert said.count(line) == 1
    if launcher == "harness.train.torchrun":
        assert done.returncode == 2 and said == [line]
        return
    *_, root_cause = done.stderr.split("Root Cause")
    assert f"  traceback : {line}\n" in root_cause and "exitcode  : 2 " in root_cause
    assert done.returncode == 1 and "Traceback (most" in done.stderr


@pytest.mark.process
def test_what_another_rank_than_the_first_refuses_is_told(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        "import os, sys, time\nfrom harness.core.process import report_to_torchrun\n"
        "if os.environ['RANK'] == '0':\n    time.sleep(30)\n"
        "report_to_torchrun('one.py: error: planted')\nsys.exit(2)\n"
    )
    command = [sys.executable, "-m", "harness.train.torchrun", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, str(tmp_path / "one.py")], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1 and "traceback : one.py: error: planted" in done.stderr


def test_a_line_that_torchrun_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    report_to_torchrun("one")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/proc/nothing/error.json")
    report_to_torchrun("other")
    failure = ProcessFailure(0, 1, 2, str(tmp_path / "gone" / "error.json"))
    assert "traceback : one" in str(ChildFailedError("bert.py", {0: failure}))


@pytest.mark.process
def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    message = answer(tmp_path, TINY, env={"HF_HOME": "/proc/nothing"})
    assert "/proc/nothing/harness" in message and "set HF_HOME" in message


@pytest.mark.process
def test_correct_inputs_run(data: Path, tmp_path: Path) -> None:
    # Otherwise every test above could fail for another reason than the mistake in it.
    for words in (f"{TEXT}/good.csv", f"{PICTURES}/images", f"{GOOD} {{d}}/bertmodel"):
        name, *argv = words.format(d=data).split()
        done = script(name, *argv, "--output_dir", str(tmp_path))
        assert (done.code, done.err) == (0, "") and "epoch 1/1" in done.out
    assert len(list(tmp_path.glob("*/*/*/summary.json"))) == 3
