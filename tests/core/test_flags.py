"""What may stand on the command line, what is refused, and with which words."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

import pytest

from harness.core.command_line import (
    command_line,
    names_of,
    parse,
    trainer_flags,
)
from harness.core.provenance import missing_packages, without_package
from harness.core.refused import MEANT
from harness.core.rules import fit_to_world
from harness.core.settings import UserError
from harness.core.tasks import TASKS
from harness.core.topology import World
from tests.support.settings import ALONE, launched, refusal


def test_defaults() -> None:
    bert, vit = parse("bert", [], ALONE), parse("vit", [], ALONE)
    assert (bert.model, bert.dataset) == ("google-bert/bert-base-uncased", "fancyzhx/ag_news")
    assert (vit.model, vit.dataset) == ("google/vit-base-patch16-224-in21k", "ethz/food101")
    for script, settings in (("bert", bert), ("vit", vit)):
        assert (settings.strategy, settings.setup, settings.precision) == ("single", "1_1", "fp32")
        assert all(getattr(settings, name) == v for name, v in TASKS[script].defaults.items())
        tiny = parse(script, ["--tiny", "--epochs", "1"], ALONE)
        assert all(getattr(tiny, k) == v for k, v in {**TASKS[script].tiny, "epochs": 1}.items())
        assert str(tiny.dataset).startswith("embedded:")
    assert parse("bert", [], launched(1, 2)).strategy == "ddp"
    assert parse("bert", [], launched(3, 4)).setup == "3_4"
    assert parse("bert", [], launched(1, 1)).strategy == "single"
    assert parse("vit", ["--strategy", "dp"], ALONE).setup is None  # the GPUs are not counted yet


# The commands that users of the published experiments know, word for word. <0,1>, <ip> and <port>
# are theirs to fill in.
STANDALONE = "torchrun --standalone --nnodes=1 --nproc_per_node="
TWO_NODES = (
    "torchrun --nnodes=2 --nproc_per_node=2 --node_rank=<0,1> --master_addr=<ip> "
    "--master_port=<port> bert.py "
)
COMMANDS = [
    STANDALONE + "1 bert.py --per_gpu_batch=1 --setup 1_1",
    STANDALONE + "1 bert.py --per_gpu_batch=4 --setup 1_1",
    STANDALONE + "1 bert.py --per_gpu_batch=16 --setup 1_1",
    STANDALONE + "4 bert.py --per_gpu_batch=1 --setup 1_4",
    STANDALONE + "4 bert.py --per_gpu_batch=4 --setup 1_4",
    STANDALONE + "4 bert.py --per_gpu_batch=16 --setup 1_4",
    TWO_NODES + "--per_gpu_batch=1 --setup 2_2",
    TWO_NODES + "--per_gpu_batch=4 --setup 2_2",
    TWO_NODES + "--per_gpu_batch=16 --setup 2_2",
    STANDALONE + "1 bert.py --per_gpu_batch=16 --epochs=5 --lr=0.0002 --setup 1_1",
    STANDALONE + "1 bert.py --per_gpu_batch=16 --epochs=5 --lr=0.00002 --setup 1_1",
    STANDALONE + "4 bert.py --per_gpu_batch=16 --epochs=5 --lr=0.0002 --setup 1_4",
    TWO_NODES + "--per_gpu_batch=16 --epochs=5 --lr=0.0002 --setup 2_2",
    TWO_NODES + "--per_gpu_batch=16 --epochs=5 --lr=0.00002 --setup 2_2",
    TWO_NODES.replace("node=2", "node=1") + "--per_gpu_batch=16 --setup 2_1",
    "torchrun --nproc_per_node=4 vit.py --per_gpu_batch=16 --setup 1_4",
]


@pytest.mark.parametrize("script", ["bert", "vit"])
@pytest.mark.parametrize("command", COMMANDS)
def test_published_commands(command: str, script: str) -> None:
    launcher, argv = re.split(r" (?:bert|vit)\.py ", command)
    for word in launcher.split()[1:]:
        # Those are torchrun's own: were one ours as well, it would be ambiguous.
        assert re.match(r"--(standalone|nnodes|nproc_per_node|node_rank|master_addr|master_port)\b",
                        word), word  # fmt: skip
    nodes = int((re.findall(r"nnodes=(\d)", launcher) or ["1"])[0])
    per_node = int(re.findall(r"nproc_per_node=(\d)", launcher)[0])
    settings = parse(script, argv.split(), launched(nodes, per_node))
    flags = dict(word.split("=") for word in argv.split(" --setup")[0].split())
    assert settings.per_gpu_batch == int(flags["--per_gpu_batch"])
    assert settings.lr == float(flags.get("--lr", TASKS[script].defaults["lr"]))
    assert settings.epochs == int(flags.get("--epochs", TASKS[script].defaults["epochs"]))
    assert settings.setup == argv.split()[-1] == f"{nodes}_{per_node}"
    assert settings.strategy == ("ddp" if nodes * per_node > 1 else "single")


SPELLINGS = ["--per_gpu_batch 8", "--per-gpu-batch=8", "--b=8", "--b 8", "-b 8",
             "--b 8 --per_gpu_batch 8",
             "--per_device_train_batch_size=8"]  # fmt: skip


@pytest.mark.parametrize("words", SPELLINGS)
def test_spellings(words: str) -> None:
    assert parse("bert", words.split(), ALONE).per_gpu_batch == 8


def test_flags_with_and_without_value() -> None:
    for words, value in {"--tiny": True, "--tiny=false": False, "--tiny yes": True}.items():
        assert parse("vit", words.split(), ALONE).tiny is value
    for words in (["-o", "a b"], ["-o=a b"], ["--tiny", "-o", "a b"], ["--lr", "1", "-o", "a b"]):
        assert parse("bert", words, ALONE).output_dir == "a b"
    several = parse("bert", ["--weight_decay", "0.5", "-o", "a b"], ALONE)
    assert (several.output_dir, several.trainer) == ("a b", (("weight_decay", 0.5),))
    assert parse("bert", ["--setup=1_1_P100far"], ALONE).setup == "1_1_P100far"
    assert parse("bert", ["--warmup_steps=-1"], ALONE).trainer == (("warmup_steps", -1),)


@pytest.mark.parametrize("script", TASKS)
def test_names_of_other_scripts_are_none_of_ours(script: str) -> None:
    """Each hint is reached, and every flag that it names exists."""
    for name, hint in MEANT.items():
        assert name not in names_of(script) and name not in trainer_flags()
        known = {*names_of(script), *trainer_flags(), "standalone", "nproc_per_node", "nnodes"}
        others = {"max_length"} if script == "vit" else {"image_size", "augment"}
        assert set(re.findall(r"--(\w+)", hint)) <= known | others


@pytest.mark.parametrize("package", [None, "harness.nothing"])
def test_an_import_of_our_own_that_fails_is_no_missing_package(package: str | None) -> None:
    with pytest.raises(ModuleNotFoundError):
        without_package(ModuleNotFoundError("broken", name=package))


def test_a_script_without_its_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with the commands that give the environment, before anything is loaded."""
    activate = tmp_path / ".venv" / "bin" / "activate"
    monkeypatch.setattr("harness.core.command_line.NEEDED", ("no_such_package",))
    monkeypatch.setattr("harness.core.provenance.ROOT", tmp_path)
    (tmp_path / "Makefile").touch()
    with pytest.raises(SystemExit) as ended:
        command_line("vit", ["--tiny"])
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.err.count("\n") == 1
    install = f"make -C {tmp_path} install"
    assert f"no package no_such_package: {install} && source {activate}, then try" in printed.err
    activate.parent.mkdir(parents=True)
    activate.touch()
    error = without_package(ModuleNotFoundError(name="pandas.core"))
    assert f"{install} && source {activate}, then try again" in str(error)  # it is being installed
    (tmp_path / ".venv" / "ready").touch()
    error = without_package(ModuleNotFoundError(name="pandas.core"))
    assert f"has no package pandas: source {activate}, then try again" in str(error)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    error = without_package(ModuleNotFoundError(name="pandas"))
    again = f"rm {tmp_path}/.venv/ready && {install}"  # make takes it for whole
    assert f"has no package pandas: {again}, then try again" in str(error)
    (tmp_path / ".venv" / "ready").unlink()
    error = without_package(ModuleNotFoundError(name="pandas"))
    assert f"has no package pandas: {install}, then try again" in str(error)


def test_an_installed_copy_without_its_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There is no Makefile: pip is given what is missing, in the versions that are needed."""
    needed = ["psutil", "no-such-package<3,>=2", 'other==1; extra == "dev"']
    monkeypatch.setattr("harness.core.provenance.ROOT", tmp_path)
    monkeypatch.setattr("importlib.metadata.requires", lambda name: needed)
    assert missing_packages() == {"no-such-package": "no-such-package<3,>=2"}
    error = without_package(ModuleNotFoundError(name="no_such_package"))
    assert f"{sys.executable} -m pip install 'no-such-package<3,>=2', then" in str(error)

    def unknown(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.requires", unknown)
    assert missing_packages() == {}  # of those whose versions stand in records


# Command line -> words that the answer must hold: the value, and what would be right.
REFUSALS = {
    "--lrr 1": ["--lrr", "did you mean --lr?"],
    "--per_gpu_bach 4": ["--per_gpu_bach", "did you mean --per_gpu_batch?"],
    "--learing_rate 1": ["did you mean --learning_rate?"],
    "--warmup_step 10": ["did you mean --warmup_steps?"],
    "--weight-decai 10": ["did you mean --weight_decay?"],
    "--batch_size 4": ["unknown flag --batch_size: use --per_gpu_batch"],
    "--bacth_size 16": ["--bacth_size: did you mean --batch_size? use --per_gpu_batch"],
    "--train-file a.csv": ["unknown flag --train_file: use --dataset FILE_OR_FOLDER"],
    "--num_epochs 2": ["unknown flag --num_epochs: use --epochs"],
    "--accumulate_grad_batches 2": ["use --grad_acc"],
    "--arch resnet": ["use --model"],
    "--backbon resnet": ["did you mean --backbone? use --model"],
    "--wd 0.1": ["use --weight_decay"],
    "--clip_grad 1": ["use --max_grad_norm"],
    "--lora_rank 8": ["use --lora RANK"],
    "--overwrite_output_dir": ["use --rerun, which keeps the earlier record"],
    "--task_name sst2": ["use --dataset NAME, with --dataset_config"],
    "--num_labels 2": ["the classes are those of --label_column"],
    "--gpu 0": ["CUDA_VISIBLE_DEVICES=N before the command"],
    "--zero_stage 3": ["use --strategy fsdp"],
    "--wandb": ["use --report_to wandb"],
    "--config a.yaml": ["name a settings file first"],
    "--load_best_model 1": ["did you mean --load_best_model_at_end? use --save best"],
    "--quiet": ["unknown flag --quiet: see python bert.py --help"],  # and nothing that is far
    "--nproc_per_node 2": ["torchrun --standalone --nproc_per_node=N"],
    "--qqqqqqqq": ["unknown flag --qqqqqqqq", "--help"],
    "--image_size 32": ["--image_size", "vit.py", "bert.py"],
    "-q 4": ["-q"],
    "4": ["'4'", "--name value"],
    "--lr 1e-3 4": ["'4'"],
    "--b 4 --per_gpu_batch 8": ["8", "4", "contradicts"],
    "--lr 1e-3 --learning_rate=2e-3": ["contradicts"],
    "--warmup_steps 1 --warmup-steps 2": ["contradicts"],
    "--tiny --tiny=false": ["contradicts"],
    "--tiny maybe": ["--tiny maybe", "true or false"],
    "--lr": ["--lr", "needs a value"],
    "--lr=": ["--lr", "needs a value"],
    "--b --lr 1": ["--b", "needs a value"],
    "--b 0": ["--b 0", "at least 1"],
    "--b -4": ["--b -4", "at least 1"],
    "--b 1.5": ["--b 1.5", "whole number"],
    "--b four": ["--b four", "whole number"],
    "--epochs 0": ["at least 1"],
    "--grad_acc 0": ["at least 1"],
    "--num_workers -1": ["at least 0"],
    "--seed -1": ["at least 0"],
    "--seed 4294967296": ["--seed", "4294967295"],
    "--train_size 0": ["--train_size 0", "at least 1"],
    "--train_size some": ["--train_size some", "whole number or all"],
    "--test_size 0.2": ["whole number or all: a share of the training split is --test_split 0.2"],
    "--max_eval_samples 0.1": ["--max_eval_samples 0.1: expected", "--test_split 0.1"],
    "tiny": ["unexpected 'tiny': did you mean --tiny?"],
    "help": ["unexpected 'help': did you mean --help?"],
    "7": ["unexpected '7': flags are written --name value"],
    "--lr 0": ["--lr 0", "above 0"],
    "--lr -1e-3": ["above 0"],
    "--lr nan": ["above 0"],
    "--lr inf": ["above 0"],
    "--lr fast": ["--lr fast", "expected a number"],
    "--dropout 1": ["--dropout 1", "below 1"],
    "--strategy dpp": ["--strategy dpp", "single, dp, ddp, fsdp", "did you mean"],
    "--precision int8": ["int8", "fp32, tf32, bf16, fp16"],
    "--save first": ["first", "none, last, best"],
    "--setup 4": ["--setup 4", "N_M", "1_4"],
    "--setup 12": ["--setup 12", "did you mean 1_2?"],
    "--setup 2x10": ["--setup 2x10", "did you mean 2_10?"],
    "--setup 116": ["--setup 116", "for example 1_4"],  # 1_16, or 11_6
    "--setup 0_1": ["--setup 0_1", "N_M"],
    "--setup 1_1_": ["--setup 1_1_", "N_M"],
    "--setup 1_1_a/b": ["--setup 1_1_a/b", "N_M"],
    "--setup x_1": ["--setup x_1", "N_M"],
    "--setup 1_4": ["--setup 1_4", "one process", "--setup 1_1", "--nproc_per_node=4 bert.py"],
    "--setup 2_4_far": ["--setup 1_1_far", "--nnodes=2 --nproc_per_node=4"],
    "--strategy ddp": ["--strategy ddp", "torchrun --standalone --nproc_per_node=2 bert.py"],
    "--strategy fsdp": ["--strategy fsdp", "torchrun"],
    "--fsdp_shard grads": ["--fsdp_shard grads", "--strategy fsdp"],
    "--fsdp_offload": ["--fsdp_offload", "--strategy fsdp"],
    "--fsdp_offload --strategy fsdp --precision fp16": ["--precision fp16", "bf16"],
    "--fsdp_offload --strategy single": ["--strategy fsdp"],
    "--test_split 1.5": ["--test_split 1.5", "between 0 and 1"],
    "--test_split 0": ["--test_split 0", "between 0 and 1"],
    "--test_split -0.2": ["between 0 and 1"],
    "--test_split 0.2.1": ["between 0 and 1"],
    "--label_column m --text_column a,m": [
        "--label_column m and --text_column a,m both name the column m: classes and input need a"
    ],
    "no.yaml": ["no.yaml", "does not exist"],
    "--lr 1 no.yaml": ["no.yaml"],
}


@pytest.mark.parametrize("words", REFUSALS)
def test_refusals(words: str) -> None:
    message = refusal(words.split())
    assert all(word in message for word in REFUSALS[words]), message


def test_image_and_label_columns_must_differ() -> None:
    message = refusal(["--label_column", "m", "--image_column", "m"], script="vit")
    assert "--label_column m and --image_column m both name the column m" in message


IN_A_WORLD = {
    (1, 2, "--setup 1_4"): ["1 node(s) of 2 process(es)", "--setup 1_2", "--nproc_per_node=4"],
    (2, 2, "--setup 1_4_x"): ["2 node(s) of 2 process(es)", "--setup 2_2_x"],
    (2, 1, "--setup 1_2"): ["--setup 2_1"],
    (1, 1, "--setup 1_2"): ["1 node(s) of 1 process(es)", "--setup 1_1"],
    (1, 2, "--strategy single"): ["--strategy single", "2 were started", "--strategy ddp"],
    (1, 2, "--strategy dp"): ["--strategy dp", "2 were started", "python bert.py"],
}


@pytest.mark.parametrize("case", IN_A_WORLD)
def test_refusals_in_a_world(case: tuple[int, int, str]) -> None:
    nodes, per_node, words = case
    message = refusal(words.split(), launched(nodes, per_node))
    assert all(word in message for word in IN_A_WORLD[case]), message


def test_unequal_nodes_are_refused() -> None:
    # Two processes here and one elsewhere: no N_M says that, and rates per node would be wrong.
    message = refusal([], {**launched(1, 2), "WORLD_SIZE": "3"})
    assert "3" in message and "2" in message


def test_dp_counts_the_gpus() -> None:
    settings = parse("bert", ["--strategy", "dp"], ALONE)
    assert fit_to_world(settings, World(), gpus=4).setup == "1_4"
    with pytest.raises(UserError, match="needs a GPU"):
        fit_to_world(settings, World(), gpus=0)
    asked = parse("bert", ["--strategy", "dp", "--setup", "1_2_x"], ALONE)
    with pytest.raises(UserError, match=r"4 GPU.*--setup 1_4_x.*CUDA_VISIBLE_DEVICES"):
        fit_to_world(asked, World(), gpus=4)


@pytest.mark.parametrize("text", ["no", "0", "F", "false", "yes", "1", "T", "true"])
def test_switches_of_the_trainer_are_true_or_false(text: str) -> None:
    """Its own parser reads `no` as false; here it was a text, which is true."""
    switches = ("push_to_hub", "use_cpu", "hub_private_repo", "gradient_checkpointing")
    argv = [word for name in switches for word in (f"--{name}", text)]
    more = ["--logging_strategy", "no", "--max_steps", "1"]
    passed = parse("vit", ["--tiny", *argv, *more], {}).passed
    assert [passed[name] for name in switches] == [text in ("yes", "1", "T", "true")] * 4
    assert all(isinstance(passed[name], bool) for name in switches)
    assert (passed["logging_strategy"], passed["max_steps"]) == ("no", 1)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_mistake_ends_with_code_2_and_one_line(
    rank: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as left:
        command_line("vit", ["--lrr", "1"])
    expected = "vit.py: error: unknown flag --lrr: did you mean --lr?\n" if rank == "0" else ""
    assert (left.value.code, *capsys.readouterr()) == (2, "", expected)


@pytest.mark.parametrize(("flag", "words"), [("--help", "usage:"), ("--list_models", "vit-tiny")])
def test_printing_flags_work_despite_other_mistakes(
    flag: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A mistake elsewhere on the line must not stand between a user and the help.
    for argv in ([flag], [flag.replace("_", "-"), "--lr", "0.1"]):
        with pytest.raises(SystemExit) as left:
            command_line("vit", argv)
        assert left.value.code == 0 and words in capsys.readouterr().out
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit):
        command_line("vit", [flag])
    assert capsys.readouterr().out == ""


def test_only_a_share_of_the_test_samples_is_another_flag() -> None:
    for words in ("--train_size 100%", "--train_size 0.2", "--test_size 1.2", "--test_size al"):
        assert refusal(words.split()).endswith(": expected a whole number or all")
    assert parse("bert", ["--tiny", "--test_split", "0.2"]).test_split == "0.2"
