"""What can be trained: a task has a script and one entry in TASKS.

A user's own script, copied from a task's script, belongs to the task that it names in its call of
command_line(), and records under its own file name. To add a task, write its script beside
bert.py, with a loader for its data, and enter it here: then the command line, sweeps, imports and
readers know it.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.core.settings import NodeError, UserError, nearest

ROOT = Path(__file__).resolve().parents[2]

# Extension of a data file -> the reader of that format.
DATA_FILES = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
}


@dataclass(frozen=True)
class Task:
    """A kind of training, with the values its script uses if no flag gives others."""

    script: str  # its file is script.py; its records are below output_dir/script
    input: str  # kind of samples, such as "text" or "image"; decides flags, columns and layouts
    model_input: str  # the argument of its models that takes the samples
    summary: str
    auto_model: str  # the class of transformers that builds its models
    defaults: Mapping[str, Any]
    tiny: Mapping[str, Any]  # used instead of `defaults` with --tiny
    architectures: Mapping[str, Mapping[str, Any]]  # by name; they need no download


# Architectures start from random weights. Sizes are those of the published models of the same name;
# nano is this project's own size for --tiny. An entry has the model type in transformers and the
# fields of its configuration that differ from the default of that type.


def _bert(hidden: int, layers: int, heads: int, **more: Any) -> Mapping[str, Any]:
    return {
        "model_type": "bert", "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, **{"intermediate_size": 4 * hidden, **more},
    }  # fmt: skip


def _vit(
    hidden: int, layers: int, heads: int, patch: int, image: int = 224, **more: Any
) -> Mapping[str, Any]:
    return {
        "model_type": "vit", "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "patch_size": patch, "image_size": image,
        **{"intermediate_size": 4 * hidden, **more},
    }  # fmt: skip


def _resnet(layer: str, depths: list[int], hidden: list[int], **more: Any) -> Mapping[str, Any]:
    return {
        "model_type": "resnet", "layer_type": layer, "depths": depths, "hidden_sizes": hidden,
        "embedding_size": 64, **{"image_size": 224, **more},
    }  # fmt: skip


RESNET_18 = ("basic", [2, 2, 2, 2], [64, 128, 256, 512])

TEXT_MODELS: Mapping[str, Mapping[str, Any]] = {
    # Wider initial weights than usual: such a narrow model learns faster from them.
    "bert-nano": _bert(
        64, 2, 2, intermediate_size=128, vocab_size=4096, max_position_embeddings=64,
        initializer_range=0.05,
    ),
    "bert-tiny": _bert(128, 2, 2),
    "bert-mini": _bert(256, 4, 4),
    "bert-small": _bert(512, 4, 8),
    "bert-base": _bert(768, 12, 12),
    "bert-large": _bert(1024, 24, 16),
    "distilbert-base": {"model_type": "distilbert"},
    "modernbert-base": {"model_type": "modernbert"},
}  # fmt: skip

IMAGE_MODELS: Mapping[str, Mapping[str, Any]] = {
    "vit-nano": _vit(64, 3, 4, patch=2, image=8, intermediate_size=128, initializer_range=0.1),
    "vit-tiny-patch16": _vit(192, 12, 3, patch=16),
    "vit-tiny-patch32": _vit(192, 12, 3, patch=32),
    "vit-small-patch16": _vit(384, 12, 6, patch=16),
    "vit-small-patch32": _vit(384, 12, 6, patch=32),
    "vit-base-patch16": _vit(768, 12, 12, patch=16),
    "vit-base-patch32": _vit(768, 12, 12, patch=32),
    "resnet-18": _resnet(*RESNET_18),
    # 3x3 first convolution and no pooling, as is usual for 32-pixel images: fifteen times the
    # work of resnet-18 at that size, and another experiment.
    "resnet-18-cifar": _resnet(*RESNET_18, image_size=32, cifar_stem=True),
    # The image model of MLPerf Tiny: a laptop can train it to convergence on 32-pixel images.
    "resnet-8-cifar": _resnet(
        "basic", [1, 1, 1], [16, 32, 64], embedding_size=16, image_size=32, cifar_stem=True
    ),
    "resnet-34": _resnet("basic", [3, 4, 6, 3], [64, 128, 256, 512]),
    "resnet-50": _resnet("bottleneck", [3, 4, 6, 3], [256, 512, 1024, 2048]),
}


# Data and sizes are those of the published experiments that the sweeps in experiments/ repeat;
# --tiny replaces them by sizes for a laptop.

TASKS = {
    "bert": Task(
        script="bert",
        input="text",
        model_input="input_ids",
        summary="Fine-tune a text classifier and record what it cost.",
        auto_model="AutoModelForSequenceClassification",
        defaults={
            "model": "google-bert/bert-base-uncased", "dataset": "fancyzhx/ag_news",
            "train_size": 8000, "test_size": 2000, "per_gpu_batch": 16, "epochs": 3, "lr": 2e-5,
            "max_length": 512, "padding": "auto",
        },
        tiny={
            "model": "bert-nano", "dataset": "embedded:english", "train_size": "all",
            "test_size": "all", "per_gpu_batch": 32, "epochs": 4, "lr": 3e-3, "max_length": 48,
            "padding": "auto",
        },
        architectures=TEXT_MODELS,
    ),
    "vit": Task(
        script="vit",
        input="image",
        model_input="pixel_values",
        summary="Fine-tune an image classifier and record what it cost.",
        auto_model="AutoModelForImageClassification",
        defaults={
            "model": "google/vit-base-patch16-224-in21k", "dataset": "ethz/food101",
            "train_size": 8000, "test_size": 2000, "per_gpu_batch": 16, "epochs": 3, "lr": 2e-5,
        },
        tiny={
            "model": "vit-nano", "dataset": "embedded:digits", "train_size": "all",
            "test_size": "all", "per_gpu_batch": 32, "epochs": 12, "lr": 1.5e-3,
        },
        architectures=IMAGE_MODELS,
    ),
}  # fmt: skip


def names(joined_by: str = ", ") -> str:
    """The names of the tasks, for messages: bert, vit."""
    return joined_by.join(TASKS)


# Names of folders that lie beside the folders of scripts in an output folder.
TAKEN = ("sweeps", "published")


def running_script(task: str) -> str:
    """The name of the running script: that of its file if it is a copy of the task's script."""
    file = Path(sys.argv[0])
    if file.suffix != ".py" or file.stem == task:
        return task
    if file.stem in (*TASKS, *TAKEN) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", file.stem):
        raise UserError(
            f"{file.name} is a script for {task} and cannot have this name: take letters, digits, "
            f"_, - and ., and none of {', '.join((*TASKS, *TAKEN))}"
        )
    return file.stem


def script_file(script: str) -> Path | None:
    """The file of a script: the running one, or one in the current folder or in the checkout."""
    files = (Path(sys.argv[0]), Path(f"{script}.py"), ROOT / f"{script}.py")
    # os.path: a name that is too long is no file either
    return next((f for f in files if f.name == f"{script}.py" and os.path.isfile(f)), None)


def task_of(script: str) -> Task:
    """The task of a script; UserError for a script without a task."""
    if script in TASKS:
        return TASKS[script]
    file = script_file(script)
    if file is None:
        hint = nearest(script, TASKS, f"no {script}.py in this folder.")
        raise UserError(f"unknown script {script}: {hint} There are {names()}, and copies of them")
    tree = parsed(file)
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args)
    named = (
        call.args[0].value
        for call in calls
        if ast.unparse(call.func).endswith("command_line")
        and isinstance(call.args[0], ast.Constant)
    )
    task = TASKS.get(str(next(named, None)))
    if task is None or not any(getattr(node, "name", "") == "main" for node in tree.body):
        raise UserError(
            f"{file.name} needs a call of command_line() with one of {names()} and a function "
            "main(settings), as bert.py has them"
        )
    return replace(task, script=script)


def parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise NodeError(f"{file.name} is not readable as Python: {error}") from None


def module_from(file: Path) -> Any:
    """The module in a file, which may import modules beside it. If its name is taken by another
    module, it gets another name: a file may be called random.py.
    """
    sys.path.insert(0, str(file.absolute().parent))
    there = getattr(sys.modules.get(file.stem), "__file__", None)
    taken = file.stem in sys.modules and there != str(file)
    name = f"{file.stem}_of_yours" if taken else file.stem
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def task_with_model(name: str) -> Task | None:
    """The task that has this name in its table of architectures; None if there is none."""
    return next((task for task in TASKS.values() if name in task.architectures), None)


def listing(script: str) -> str:
    """The table of architectures as text, for --list_models."""
    lines = [f"Architectures for {script}.py that need no download (random weights):"]
    for name, config in task_of(script).architectures.items():
        facts = ", ".join(f"{k} {v}" for k, v in config.items())
        lines.append(f"  {name:<18} {facts}")
    return "\n".join(lines)
