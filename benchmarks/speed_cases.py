"""What benchmarks/speed.py trains: models, sizes, and the arms that take turns. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

TEXT, IMAGE = "text", "image"


@dataclass(frozen=True)
class Case:
    kind: str
    model: str  # of harness/core/tasks.py
    train: int
    test: int
    batch: int
    epochs: int = 3  # the first one is not timed
    lr: float = 1e-4
    precision: str = "fp32"
    image_size: int | None = None  # side of the model's input
    jpeg_px: int | None = None  # pictures are files of this size; else they are stored as they come
    changed: dict[str, Any] = field(default_factory=dict)  # of the model's configuration


# On a CPU: real sizes at the small end. The last two have pictures to decode, and a model so fast
# that it waits for them.
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
DECODED = Case(
    IMAGE, "vit-tiny-patch32", 256, 64, 16, image_size=224, jpeg_px=224,
    changed={**SMALL, "intermediate_size": 64},
)  # fmt: skip
CPU_CASES = {
    "text": Case(TEXT, "bert-mini", 192, 64, 16),
    "cifar": Case(IMAGE, "vit-tiny-patch16", 64, 32, 16, image_size=224),
    "jpeg": DECODED,
    "jpeg512": replace(DECODED, jpeg_px=512),
}
# On a GPU: the sizes that people train, batches that fill one, and as few samples as a short visit
# allows. A step of BERT-base on 64 texts of AG News has less work than it takes to launch it.
_BERT = Case(TEXT, "bert-base", 5888, 1536, 256, precision="bf16", lr=2e-5)
_VIT = Case(
    IMAGE, "vit-base-patch16", 2048, 512, 128, precision="bf16", lr=2e-5,
    image_size=224, jpeg_px=224,
)  # fmt: skip
GPU_CASES = {
    "bert-base": _BERT,
    "vit-base-patch16": _VIT,
    "bert-base-1024": replace(_BERT, train=16384, batch=1024),
    "distilbert-base": replace(_BERT, model="distilbert-base"),
    "modernbert-base": replace(_BERT, model="modernbert-base"),
    "resnet-18-cifar": Case(
        IMAGE, "resnet-18-cifar", 4096, 1024, 256, precision="bf16", lr=1e-3, image_size=32
    ),
    "vit-base-patch32": replace(_VIT, model="vit-base-patch32"),
    "resnet-50": replace(_VIT, model="resnet-50", lr=1e-3),
}
NANO = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
QUICK_CASES = {
    "text": Case(TEXT, "bert-nano", 64, 32, 16, epochs=2, lr=1e-3,
                 changed={**NANO, "max_position_embeddings": 512}),
    "jpeg": Case(IMAGE, "vit-nano", 64, 32, 16, epochs=2, lr=1e-3, image_size=16, jpeg_px=48,
                 changed={**NANO, "patch_size": 8, "num_attention_heads": 2}),
}  # fmt: skip


@dataclass(frozen=True)
class Arm:
    recipe: str  # module of benchmarks/recipes
    says: str
    changed: dict[str, Any] = field(default_factory=dict)  # of the task
    flags: tuple[str, ...] = ()  # of our command line
    exact: bool = True  # the same batches as ours, so the same losses but for rounding
    stock: bool = False  # transformers' own Trainer


ARMS = {
    "seed": Arm("seed", "(a) the first recipe of this project, no workers", stock=True),
    "seed2": Arm("seed", "(a) with 2 workers a process", {"workers": 2}, stock=True),
    "examples": Arm("examples", "(b) transformers' example scripts", stock=True),
    "loop": Arm("loop", "(c) a loop by hand, the same batches ready in memory"),
    "ideal": Arm("loop", "(c) the same, texts of one length in a batch: the limit",
                 {"batches": "ideal"}, exact=False),
    "bf16": Arm("ours", "bert.py or vit.py with --precision bf16, where the others are in fp32",
                {"precision": "bf16"}, exact=False),
    "compiled": Arm("ours", "bert.py or vit.py with --torch_compile; the first epoch compiles",
                    flags=("--torch_compile",), exact=False),
    "ours": Arm("ours", "bert.py or vit.py"),
}  # fmt: skip


def arms_of(case: Case, asked: list[str]) -> list[str]:
    """The arms that exist for this case: `ideal` for texts, as pictures are all of one length; bf16
    for cases on a CPU; compiled for those on a GPU (in bf16), where compiling makes sense.
    """
    gpu = case.precision == "bf16"
    there = {"ideal": case.kind == TEXT, "bf16": not gpu, "compiled": gpu}
    return [name for name in asked if there.get(name, True)]


def is_exact(case: Case, arm: str, processes: int) -> bool:
    """Whether this arm's losses should equal ours; docs/traps.md, 0, says which do not."""
    multiplied = processes > 1 and ARMS[arm].stock and not case.model.startswith("vit")
    return ARMS[arm].exact and not multiplied


def task_of(case: Case, arm: str, folder: Path, out: Path, flags: list[str]) -> dict[str, Any]:
    """The fields of a Task (benchmarks/recipes/task.py) for a case and an arm."""
    return {
        "kind": case.kind, "model": str(folder / "model"), "data": str(folder / "data"),
        "out": str(out), "batch": case.batch, "epochs": case.epochs, "lr": case.lr,
        "precision": case.precision, **ARMS[arm].changed,
        "flags": (*ARMS[arm].flags, *flags) if ARMS[arm].recipe == "ours" else (),
    }  # fmt: skip
