"""One experiment as one flat, frozen value: what is trained, on what data, how, and where to write.

The command line is generated from these fields (core/command_line.py). Every field that can change
the result is part of the run's identity; where the run is written and how it is shown are not.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

# What a flag that is true or false takes, as the Trainer's own flags do.
TEXT_OF_BOOL = dict.fromkeys(("true", "t", "yes", "y", "1"), True)
TEXT_OF_BOOL |= dict.fromkeys(("false", "f", "no", "n", "0"), False)


class UserError(ValueError):
    """A mistake that the user can correct: shown as one line, exit code 2."""


class NodeError(UserError):
    """A mistake on this node, perhaps not on others: the first rank of each node prints it."""


def nearest(name: str, known: Iterable[str], otherwise: str | None = None, mark: str = "") -> str:
    """'did you mean X?' with the most similar known name; if none is similar, `otherwise`, which by
    default lists all known names.

    mark: put before each name, such as -- for a flag.
    """
    names = [*known]
    swapped = [each for each in names if sorted(each) == sorted(name)]
    if near := difflib.get_close_matches(name, names, n=1) or swapped:
        return f"did you mean {mark}{near[0]}?"
    return f"there are {', '.join(mark + n for n in names)}" if otherwise is None else otherwise


# Of an option that is off by default: it is in the name of a run only where it is set, and a record
# that lacks it is older and had it off. A new option so leaves all records as they are.
IF_SET = "if set"


def flag(
    default: Any,
    kind: str,
    group: str,
    help: str,
    *,
    names: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    input: str = "",
    identity: bool | str = True,
) -> Any:
    """A dataclass field with what its flag needs: kind of value, group in --help, other names.

    input: the kind of samples ("text", "image") whose tasks have the flag; empty: all tasks.
    identity: whether it can change the result, and so is in the name of a run: always, or IF_SET.
    """
    return field(default=default, metadata={
        "kind": kind, "group": group, "help": help, "names": names, "choices": choices,
        "input": input, "identity": identity,
    })  # fmt: skip


# Formatted by hand: the formatter would give each bracket of the texts a line of its own.
# fmt: off
@dataclass(frozen=True)
class Settings:
    """None means: the script's default, or a derived value (see resolve)."""

    script: str
    # What is trained
    model: str | None = flag(None, "text", "Model",
        "Hub name, local folder, or an architecture with random weights (--list_models)",
        names=("model_name_or_path",))
    from_scratch: bool = flag(False, "bool", "Model",
        "random weights for any model; only its configuration is loaded")
    dropout: float | None = flag(None, "share", "Model",
        "set every dropout rate of the model, 0 to below 1 (the model's own)")
    lora: int = flag(0, "natural", "Model",
        "train low-rank adapters of this rank and the head, by peft, instead of all weights; what "
        "is saved has them merged; 0 trains all weights", identity=IF_SET)
    max_length: int | None = flag(None, "count", "Model",
        "longest text, in tokens; longer ones are cut (512)", input="text")
    image_size: int | None = flag(None, "count", "Model",
        "side of the square images, in pixels (the model's own)", input="image")
    batchnorm: str = flag("local", "text", "Model",
        "BatchNorm over several processes: statistics of each process's batch, averaged before "
        "evaluation, or of the whole batch (GPU)", choices=("local", "sync"))
    trust_remote_code: bool = flag(False, "bool", "Model",
        "run the code that a Hub repository brings; off unless you turn it on")
    # Data
    dataset: str | None = flag(None, "text", "Data",
        "Hub name, a file (csv, tsv, json, jsonl, parquet), a folder of such files, of images or "
        "of save_to_disk(), or embedded:english, embedded:digits", names=("dataset_name",))
    dataset_config: str | None = flag(None, "text", "Data",
        "configuration of the dataset, where it has several", names=("dataset_config_name",))
    text_column: str | None = flag(None, "text", "Data",
        "column of the text, or two for a pair: premise,hypothesis", input="text")
    image_column: str | None = flag(None, "text", "Data", "column of the image", input="image")
    label_column: str | None = flag(None, "text", "Data", "column of the class")
    train_size: int | str | None = flag(None, "size", "Data",
        "training samples drawn from the data, or all (8000)", names=("max_train_samples",))
    test_size: int | str | None = flag(None, "size", "Data",
        "test samples drawn from the data, or all (2000)", names=("max_eval_samples",))
    test_split: str | None = flag(None, "text", "Data",
        "name of the split to test on, or a share such as 0.2 of the training split to hold out "
        "(the first of test, validation, valid, val, dev that has classes, else 0.2)")
    validation_split: str | None = flag(None, "text", "Data",
        "evaluate each epoch, and choose the best one, on a validation set; the test set is used "
        "once, at the end, on the weights of the best epoch with --save best, else of the last "
        "one. A name takes that whole split. A share such as 0.1 holds out training samples, and "
        "--train_size counts those that are left for training: 9000 and 0.1 draw 1000 more (none: "
        "each epoch is evaluated on the test set)")
    data_seed: int = flag(0, "seed", "Data",
        "draws the subset and the split: the same samples on every rank, for every --seed")
    tail: str = flag("cut", "text", "Data",
        "training samples that do not fill a whole effective batch: cut leaves them out, pad "
        "feeds some samples twice", choices=("cut", "pad"))
    augment: str | None = flag(None, "text", "Data",
        "training images in another version each epoch: mirrored or not, or also shifted by up to "
        "an eighth of the side; drawn from --seed, epoch and sample (none)",
        choices=("none", "flip", "crop_flip"), input="image")
    tiny: bool = flag(False, "bool", "Data",
        "laptop size: small model, embedded data, no network; other flags still win")
    # Training
    per_gpu_batch: int | None = flag(None, "count", "Training",
        "samples per process and forward pass (16)", names=("b", "per_device_train_batch_size"))
    grad_acc: int = flag(1, "count", "Training",
        "forward passes per update", names=("gradient_accumulation_steps",))
    auto_batch: bool = flag(False, "bool", "Training",
        "if memory runs out, continue with half of per_gpu_batch and the same effective batch, by "
        "accumulation; recorded under the requested batch", identity=False)
    epochs: int | None = flag(None, "count", "Training",
        "passes over the training set (3)", names=("num_train_epochs",))
    lr: float | None = flag(None, "positive", "Training",
        "peak learning rate (2e-05)", names=("learning_rate",))
    muon: bool = flag(False, "bool", "Training",
        "Muon for the matrices between embeddings and head, at the learning rate of AdamW, which "
        "trains the rest", identity=IF_SET)
    seed: int = flag(42, "seed", "Training", "weights of the head, order of the samples, dropout")
    precision: str = flag("fp32", "text", "Training",
        "number format of the computation", choices=("fp32", "tf32", "bf16", "fp16"))
    rank_dropout: str = flag("own", "text", "Training",
        "dropout masks of several processes: each its own, or all the same",
        choices=("own", "same"))
    padding: str | None = flag(None, "text", "Training",
        "texts of a batch: auto computes as little padding as model and device allow, with the "
        "same loss and gradient up to rounding; batch pads all to the longest one (auto)",
        choices=("auto", "batch"), input="text")
    eval_batch: int | None = flag(None, "count", "Training",
        "samples per process and forward pass in evaluation (64; on a GPU up to 512)",
        names=("per_device_eval_batch_size",))
    # Distribution
    strategy: str | None = flag(None, "text", "Distribution",
        "how the training is spread (ddp for more than one process, else single); FILE.py:CLASS "
        "is one of your own")
    setup: str | None = flag(None, "text", "Distribution",
        "N_M: N nodes of M processes, checked against what runs; a third part is a free tag "
        "(2_1_P100far)")
    fsdp_shard: str = flag("full", "text", "Distribution",
        "what fsdp splits over the processes: everything, or gradients and optimizer only",
        choices=("full", "grads"))
    fsdp_offload: bool = flag(False, "bool", "Distribution",
        "fsdp keeps its shards in CPU memory (GPU)")
    elastic_batch: str = flag("hold", "text", "Distribution",
        "effective batch when nodes are lost or return (torchrun --nnodes=1:4 --max_restarts=3): "
        "hold it, by accumulation, or scale it with the processes",
        choices=("hold", "scale"))
    balance: str | None = flag(None, "text", "Distribution",
        "shares of the effective batch by rank: measured, by their speed in a second before "
        "training, or given, such as 2,1 (equal shares)", identity=IF_SET)
    compress: str = flag("none", "text", "Slow links",
        "compress what is sent: bf16, fp16, int8, int4 or powersgd[:rank] (rank 1) for ddp, bf16, "
        "int8 or int4 for local_sgd and diloco, fp16 or int8 for hivemind")
    exchange: str = flag("auto", "text", "Slow links",
        "sums of ddp, local_sgd and diloco: by the backend, by direct sends to those who add a "
        "part (two delays) or to all (one delay; both gloo only), or what the measured link makes "
        "fastest; on one node, and with several processes a node that all send, auto is the "
        "backend", choices=("auto", "backend", "direct", "all_to_all"))
    sync_every: int | None = flag(None, "count", "Slow links",
        "updates between two exchanges of local_sgd and diloco (10)")
    sync_first: int | None = flag(None, "natural", "Slow links",
        "updates that local_sgd and diloco make together, as ddp does, before they train apart (0)",
        identity=IF_SET)
    sync_scope: str | None = flag(None, "text", "Slow links",
        "what trains apart between two exchanges: every node, whose processes share gradients at "
        "each update, or every rank (node; rank on one node)", choices=("node", "rank"))
    outer_lr: float | None = flag(None, "positive", "Slow links",
        "diloco's learning rate for the averaged deltas (0.7)")
    outer_momentum: float | None = flag(None, "share", "Slow links",
        "diloco's Nesterov momentum, 0 for none (0.9)")
    fragments: int | None = flag(None, "count", "Slow links",
        "parts of the model that diloco exchanges one after the other, evenly over sync_every "
        "updates (1)")
    overlap: int | None = flag(None, "natural", "Slow links",
        "updates that diloco makes while an exchange is on its way (0: it waits)")
    target_batch: int | None = flag(None, "count", "Slow links",
        "samples of all hivemind peers together that make an update (the set-up's effective batch)")
    local_updates: bool = flag(False, "bool", "Slow links",
        "hivemind peers update by themselves and average their weights every target_batch samples")
    initial_peers: str | None = flag(None, "text", "Slow links",
        "addresses of a hivemind run to join, with commas; a run prints them when it starts (the "
        "variable INITIAL_PEERS)", identity=False)
    # Running
    repeat: int = flag(1, "count", "Running",
        "2 records a second measurement of the same settings, 3 a third (also --run, except under "
        "torchrun)", names=("run",))
    num_workers: int = flag(0, "natural", "Running",
        "processes that load data, per process", names=("dataloader_num_workers",))
    log_every: int = flag(50, "count", "Running",
        "updates between log entries", names=("logging_steps",))
    telemetry_hz: float = flag(1.0, "rate", "Running",
        "telemetry sampling rate in Hz, by a process of its own; 0: off", identity=False)
    hang_after: float = flag(120.0, "seconds", "Running",
        "seconds without progress or an answer after which the run ends, with the stack of every "
        "rank; compiling, evaluating and saving do not count; 0: never; ranks that are stopped "
        "before they have met are found by the launcher of a sweep, by harness.train.torchrun, and "
        "by a rank beside them that runs", identity=False)
    peak_tflops: float | None = flag(None, "positive", "Running",
        "dense peak of one device in this number format, in 10^12 operations per second, for mfu "
        "(a GPU: from a table of the makers' figures; a CPU: as measured)", identity=False)
    comm_probe: str = flag("auto", "text", "Running",
        "measure once, for ddp and fsdp, what the exchange adds to a step, by a few passes with "
        "and without it, and with --torch_compile what that brings: auto or off",
        choices=("auto", "off"), identity=False)
    save: str = flag("last", "text", "Running",
        "checkpoints after each epoch, from which an interrupted run resumes: none, the last, or "
        "the last and the best", choices=("none", "last", "best"), identity=False)
    best_metric: str = flag("accuracy", "text", "Running",
        "what the best epoch is chosen by: accuracy, f1, f1_macro, precision, recall, "
        "top5_accuracy, loss, or a metric of a script of your own (NAME:min if smaller is better)",
        names=("metric_for_best_model",), identity=False)
    output_dir: str = flag("outputs", "text", "Running",
        "folder of the records", names=("o", "out"), identity=False)
    rerun: bool = flag(False, "bool", "Running",
        "run again although finished; the old record is kept aside", identity=False)
    # Flags of transformers' TrainingArguments, passed through: ((name, value), ...), sorted.
    trainer: tuple[tuple[str, Any], ...] = ()

    @property
    def passed(self) -> dict[str, Any]:
        """Flags that are passed through to the Trainer, by name."""
        return dict(self.trainer)
# fmt: on


# Metrics of every run by which the best epoch can be chosen.
BEST_METRICS = ("accuracy", "f1", "f1_macro", "precision", "recall", "top5_accuracy", "loss")
# Settings that are not recorded: where and whether to write, when to give up, and auto_batch.
UNRECORDED = ("output_dir", "rerun", "hang_after", "auto_batch")
SETUP = re.compile(r"([0-9]+)_([0-9]+)(?:_([A-Za-z0-9.-]{1,100}))?")
# Also 12: many YAML readers take 1_2 for a number, and write it so.
LIKE_A_SETUP = re.compile(r"([1-9])([1-9])|([1-9][0-9]*)[^0-9]([1-9][0-9]*)")
# Where the mark of an error's context is the sign that was left open.
LEFT_OPEN = ("while parsing a flow", "while scanning a quoted")


def flag_fields() -> dict[str, Any]:
    """The fields that are flags, by name, in order of definition."""
    return {f.name: f for f in fields(Settings) if "kind" in f.metadata}


@cache
def options_off() -> dict[str, Any]:
    """The options that a record may lack, each with its default."""
    return {n: f.default for n, f in flag_fields().items() if f.metadata["identity"] == IF_SET}


def as_mapping(settings: Settings) -> dict[str, Any]:
    """Settings as settings.json holds them, and as a settings file can restore them."""
    values = {name: getattr(settings, name) for name in flag_fields()}
    return {"script": settings.script, **values, "trainer": settings.passed}


def share_of(split: str) -> float | None:
    """The share that a split stands for, such as 0.2; None if it is the name of a split."""
    try:
        fraction = float(split)
    except ValueError:
        return None
    return fraction if 0 < fraction < 1 else None


def parse_setup(setup: str) -> tuple[int, int, str]:
    """(nodes, processes per node, tag) of a set-up such as 2_1_P100far."""
    match = SETUP.fullmatch(setup)
    if not match and len(setup) > 100:
        raise UserError(
            f"--setup {setup[:40]}...: {len(setup)} characters, 100 are the most of a tag"
        )
    if not match or int(match[1]) < 1 or int(match[2]) < 1:
        meant = LIKE_A_SETUP.fullmatch(setup)
        hint = (
            f"did you mean {'_'.join(filter(None, meant.groups()))}?"
            if meant
            else "for example 1_4"
        )
        raise UserError(
            f"--setup {setup}: expected N_M or N_M_tag (N nodes of M processes), {hint}"
        )
    return int(match[1]), int(match[2]), match[3] or ""


def mistake_in_yaml(error: Any) -> str:
    """What follows the name of a file that yaml cannot read: the line, if it is known, and why. For
    a bracket or quotation mark that is left open, it is the line that opens it.
    """
    if (mark := getattr(error, "problem_mark", None)) is None:
        return f": not readable as YAML: {getattr(error, 'reason', 'unknown why')}"
    opened = error.context_mark
    line = f"line {mark.line + 1}"
    if r"'\t'" in error.problem:
        is_indent = not mark.buffer[mark.pointer - mark.column : mark.pointer].strip()
        return f" {line} {'is indented with' if is_indent else 'has'} a tab: YAML takes spaces"
    if (missing := _missing_space(error)) is not None:
        return missing
    problem = error.problem.replace("'<stream end>'", "the end of the file")
    if str(error.context).startswith(LEFT_OPEN) and opened.line < mark.line:
        comma, before = ", or lacks a comma,", f"{line}: {problem}"
        if re.search("stream end|end of stream", error.problem):
            comma, before = "", "the end of the file"
        sign = opened.buffer[opened.pointer]
        problem = f"the {sign} in this line is not closed{comma} before {before}"
        line = f"line {opened.line + 1}"
    return f" {line}: not readable as YAML: {problem}"


def _missing_space(error: Any) -> str | None:
    """What follows the name of a file in which a line lacks the space after its colon; yaml takes
    such a line for a text, and marks that the next one does not continue it.
    """
    mark = error.problem_mark
    if error.context == "while scanning a simple key":
        number = error.context_mark.line
    elif "mapping values are not allowed" in error.problem and (
        ": " not in mark.buffer[mark.pointer - mark.column : mark.pointer]
    ):
        number = mark.line - 1
    else:
        return None
    lines = mark.buffer.splitlines()
    while number > 0 and not lines[number].partition("#")[0].strip():
        number -= 1
    spaced = with_space(lines[number].strip().removeprefix("- "))
    return f" line {number + 1}: {spaced}" if spaced and number >= 0 else None


def with_space(text: str) -> str | None:
    """How a text such as lr:1 is written as a name and its value; None for any other text."""
    match = re.fullmatch(r"([A-Za-z]\w*):([^\s:/\\].*)", text)
    return f"write a space after the colon: {match[1]}: {match[2]}" if match else None
