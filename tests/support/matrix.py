"""One small training of every architecture in five ways, and what each leaves in its record.

All architectures go through the same processes: one alone and two ranks. Models and tokenizers are
saved to a folder and loaded from there, as those of a user are.
"""

from __future__ import annotations

import io
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from torch import nn
from transformers import AutoImageProcessor, AutoTokenizer

from harness.core.command_line import parse
from harness.core.records import RunFolder
from harness.core.settings import UserError
from harness.train.data import embedded, models, sources
from harness.train.data.cache import in_turn
from harness.train.data.images import load_images
from harness.train.data.texts import load_texts
from harness.train.loop.trainer import ExactTrainer
from harness.train.measure import flops
from harness.train.measure.metrics import BatchMetrics
from harness.train.run.start import quiet, start
from logcallback import LogCallback
from tests.support import architectures
from tests.support.ranks import ROOT, ranks

PAGE = ROOT / "docs" / "models.md"
ALONE = {
    "padded": ["--b", "8", "--padding", "batch"],
    "auto": ["--b", "8"],
    "accumulated": ["--b", "4", "--grad_acc", "2"],
}
TOGETHER = {"ddp": ["--b", "4"], "fsdp": ["--b", "4", "--strategy", "fsdp"]}
COMMON = [
    "--train_size", "24", "--test_size", "12", "--epochs", "1", "--optim", "sgd", "--lr", "0.01",
    "--dropout", "0", "--telemetry_hz", "0", "--comm_probe", "off", "--max_length", "32",
]  # fmt: skip
FIELDS = ("train_loss", "grad_norm", "eval_loss")
LARGEST = 2_000_000  # weights of a model
LEFT_PADDED = ("xlnet",)  # as their own tokenizers are


WORDS = (2, 14)  # the least and the most of a text


def write_texts(folder: Path) -> list[str]:
    """Training and test texts of unequal lengths in four classes."""
    usual = Counter(" ".join(embedded.english()["train"]["text"][:200]).lower().split())
    words = [word for word, _ in usual.most_common(60) if word.isalpha()]
    random, written = np.random.default_rng(0), []
    folder.mkdir(parents=True)
    for split, count in (("train", 24), ("test", 12)):
        sizes = random.permutation(np.resize(np.arange(WORDS[0], WORDS[1] + 1), count))
        texts = [" ".join(random.choice(words, size)) for size in sizes]
        lines = [f"{text},class {number % 4}" for number, text in enumerate(texts)]
        (folder / f"{split}.csv").write_text("\n".join(["text,label", *lines]))
        written += texts
    return written


def prepare(root: Path, script: str, names: Sequence[str]) -> dict[str, str]:
    """A folder with random weights for each architecture; why not, for those without."""
    failed = {}
    if script == "bert":
        texts = write_texts(root / "texts")
        embedded.train_tokenizer(texts, root / "tokenizer", architectures.VOCABULARY)
    for name in names:
        folder = root / script / name
        try:
            torch.manual_seed(0)
            config = architectures.small(name, num_labels=4 if script == "bert" else 10)
            config.architectures = []
            auto = models.auto_class(script)
            with torch.device("meta"):
                weights = sum(w.numel() for w in auto.from_config(config).parameters())
            if weights > LARGEST:
                raise MemoryError(f"{weights:,} weights at the least here")
            model = auto.from_config(config)
            spread(model)
            model.save_pretrained(folder)
        except Exception as error:
            text = " ".join(str(error).split())
            failed[name] = text if isinstance(error, MemoryError) else NEEDS.get(name, text)
            continue
        if script == "bert":
            side = "left" if name in LEFT_PADDED else "right"
            inputs = ["input_ids", "attention_mask"]
            tokenizer = AutoTokenizer.from_pretrained(
                root / "tokenizer", padding_side=side, model_input_names=inputs
            )
            tokenizer.save_pretrained(folder)
        else:
            side = architectures.side_of(config)
            transformers.ViTImageProcessorPil(size={"height": side, "width": side}).save_pretrained(
                folder
            )
    return failed


def spread(model: nn.Module) -> None:
    """Weights so large that scores depend on the input: fresh ones make them nearly constant."""
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and "embed" not in name:
            nn.init.normal_(weight, std=0.5 / weight[0].numel() ** 0.5)


def trained(root: str, script: str, names: Sequence[str], arms: dict[str, list[str]]) -> Any:
    """The rows of all runs, by architecture and arm; a text where a run failed."""
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        once = first_answer(flops.work_of if arms is ALONE else uncounted)
        results[name] = {}
        for arm, argv in arms.items():
            with patch.object(flops, "work_of", once):
                results[name][arm] = attempt(Path(root), script, name, arm, argv)
    return results


def first_answer(count: Callable[..., flops.Work]) -> Callable[..., flops.Work]:
    """The FLOPs of an architecture are counted in the first of its runs alone."""
    answers: list[Any] = []

    def answer(*args: Any) -> flops.Work:
        if not answers:
            try:
                answers.append(count(*args))
            except flops.Uncountable as error:
                answers.append(error)
        (known,) = answers
        if isinstance(known, flops.Uncountable):
            raise known
        return known  # type: ignore[no-any-return]

    return answer


def uncounted(*args: Any) -> Any:
    raise flops.Uncountable("counted in another run")


def attempt(root: Path, script: str, name: str, arm: str, more: list[str]) -> Any:
    data = ["--dataset", str(root / "texts") if script == "bert" else "embedded:digits"]
    save = ["--save", "last" if arm == "padded" else "none"]
    argv = ["--model", str(root / script / name), *data, *COMMON, *more, *save]
    if script == "vit":
        argv = [w for w in argv if w not in ("--padding", "batch", "--max_length", "32")]
    output = root / "runs" / script / name / arm
    try:
        with ExitStack() as stack, redirect_stdout(io.StringIO()):
            return train(stack, script, [*argv, "--o", str(output)])
    except UserError as error:
        return f"refused: {error}".replace(str(root / script / name), name)
    except Exception:
        return traceback.format_exc()


def train(stack: ExitStack, script: str, argv: list[str]) -> dict[str, Any]:
    """As the scripts do, but for the end of the process group, which the next run needs."""
    run = start(parse(script, argv))
    assert run is not None
    stack.callback(run.unlock)
    load = load_texts if script == "bert" else load_images
    with in_turn(run.context.world):
        data = load(run.context.settings, run.context.data_parallel_size)
    context = run.resume(data.facts)
    with in_turn(context.world):
        model = models.build(context.settings, data.labels)
    frozen = freeze_statistics(model)
    trainer = ExactTrainer(
        context=context, model=model, args=context.args, train_dataset=data.train,
        eval_dataset=data.test, data_collator=data.collate, to_device=data.to_device,
        processing_class=data.processing, compute_metrics=BatchMetrics(len(data.labels)),
        callbacks=[LogCallback(context)],
    )  # fmt: skip
    run.train(trainer)
    if not context.is_rank0:
        return {}
    ((row,), _) = context.folder.read_epochs()
    environment = context.folder.read_environment() or {}
    observed = environment["observed"]
    result = {
        **{field: row[field] for field in FIELDS},
        "updates": row["updates"],
        "batchnorm": frozen,
        "unused": observed.get("find_unused_parameters"),
        "padding": observed.get("padding"),
        "padding_reason": observed.get("padding_reason"),
        "reads_padding": observed.get("reads_padding"),
        "flops": environment["flops"]["how"],
        "flops_missing": environment["flops"]["missing"],
    }
    if script == "bert":
        result["tokens"] = sorted({*np.diff(data.collate.offsets).tolist()})
    if context.settings.save == "last":
        reads = observed.get("reads_padding")
        at_once = 1 if reads and reads["eval_batch"] is None else None  # as it was evaluated
        result["saved"] = loss_of_checkpoint(script, argv, context.folder, at_once)
    return result


def freeze_statistics(model: nn.Module) -> bool:
    """Those of a batch depend on how it is split, by design (--batchnorm); all else must not."""
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for layer in layers:
        layer.eval()
        layer.train = lambda mode=True, layer=layer: layer
    return bool(layers)


def loss_of_checkpoint(
    script: str, argv: list[str], folder: RunFolder, at_once: int | None
) -> float:
    """The test loss of the saved model, with what was saved beside it, by plain transformers."""
    (checkpoint,) = folder.path.glob("checkpoint-*")
    model = models.auto_class(script).from_pretrained(checkpoint, dtype=torch.float32).eval()
    source = sources.load(parse(script, argv))
    samples = list(source.test[source.inputs[0]])
    prepared: Callable[[list[Any]], Any]
    if script == "bert":
        read = AutoTokenizer.from_pretrained(checkpoint)
        prepared = partial(read, truncation=True, max_length=32, padding=True, return_tensors="pt")
    else:
        samples = [image.convert("RGB") for image in samples]
        prepared = partial(AutoImageProcessor.from_pretrained(checkpoint), return_tensors="pt")
    size = at_once or len(samples)
    batches = [samples[begin : begin + size] for begin in range(0, len(samples), size)]
    with torch.no_grad():
        logits = torch.cat([model(**prepared(batch)).logits for batch in batches])
    return float(nn.functional.cross_entropy(logits, torch.from_numpy(source.classes[1])))


def measure(chosen: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """For each task and architecture its rows by arm, or why it cannot be built."""
    root = Path(tempfile.mkdtemp(prefix="matrix-"))
    try:
        (results,) = ranks(1, alone, str(root), chosen)
        (together, *_) = ranks(2, both, str(root), chosen, results)
    finally:
        shutil.rmtree(root)
    for script, of in together.items():
        for name, arms in of.items():
            results[script][name] |= arms
    return results


def alone(root: str, chosen: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    quiet(bars=False)
    results = {}
    for script, names in chosen.items():
        failed = prepare(Path(root), script, names)
        ready = [name for name in names if name not in failed]
        results[script] = {name: {"failed": why} for name, why in failed.items()}
        results[script] |= trained(root, script, ready, ALONE)
    return results


def both(root: str, chosen: dict[str, list[str]], known: dict[str, Any]) -> dict[str, Any]:
    """Only what one process can train: a rank that fails alone would leave the other waiting."""
    return {
        script: trained(
            root, script, [n for n in names if isinstance(known[script][n].get("padded"), dict)],
            TOGETHER,
        )
        for script, names in chosen.items()
    }  # fmt: skip


TOLERANCE = 1e-5
READ_PADDING = (
    "canine", "convbert", "fnet", "funnel", "nystromformer", "t5gemma", "yoso",
)  # fmt: skip
# What is not the same in every way, or cannot be trained: the ways, and why.
EXCEPTIONS: dict[tuple[str, str], tuple[tuple[str, ...], str]] = {
    **{
        ("bert", name): (
            ("accumulated", "ddp", "fsdp"),
            "its scores depend on padding, and so on how a batch is split",
        )
        for name in READ_PADDING
    },
    ("bert", "reformer"): (
        ("ddp", "fsdp"),
        "its reversible layers run again in the backward pass: ddp sees gradients twice, and fsdp "
        "does not gather the weights",
    ),
    ("bert", "squeezebert"): (
        ("fsdp",),
        "it calls forward() of its layers, past the hooks with which fsdp gathers their weights",
    ),
    ("vit", "imagegpt"): (("padded",), "it reads numbers of colours, not pixels"),
    ("vit", "pp_lcnet"): (("padded",), "it returns no loss"),
    ("vit", "siglip2"): (("padded",), "it reads patches of its own processor, not pixels"),
}
NEEDS = {  # beside transformers
    "dinat": "needs natten", "layoutlmv2": "needs detectron2", "timm_wrapper": "needs timm",
}  # fmt: skip
HEAD = """# Models

- [Texts](#texts)
- [Images](#images)

Every architecture of transformers' mappings for sequence and image classification that can be
built small trains with the same numbers however it is fed, except where the last column says
otherwise; not tried are also those with more than 2,000,000 weights at their smallest here.
Each has random weights, is saved to a folder and loaded as yours are, and makes three updates
in five ways: padded, with `--padding auto`, accumulated, with ddp and with fsdp on two ranks.
Loss, gradient norm and test loss are those of the padded run to 1e-5, and so is the test loss
of the saved checkpoint with the tokenizer or image processor beside it, run by plain
transformers. The texts have 2 to 14 words. Dropout is off, and statistics of BatchNorm are frozen
(`--batchnorm` says what they do). `make models` trains them all and writes this page; `make test`
trains eight of them again, and the slow tests about forty.

- **batches**: how `--padding auto` feeds texts on a CPU: `packed` and `runs` in one row without
  padding, `parts` at most four of similar length, `batch` padded to the longest, where scores
  depend on padding or this cannot be tried.
- **unused**: whether ddp looks for parameters without a gradient, which takes time in each update.
- **FLOPs**: by a closed form, counted, or why they are not known.
- **not the same**: the ways that do not work, and why. All others do.
"""


def wrong(arms: dict[str, Any]) -> tuple[str, ...]:
    """The ways whose numbers are not those of the padded run, or that failed."""
    whole = arms["padded"]
    if not isinstance(whole, dict):
        return ("padded",)
    names = [arm for arm, row in arms.items() if not isinstance(row, dict) or _differs(row, whole)]
    if abs(whole["saved"] - whole["eval_loss"]) > TOLERANCE * whole["eval_loss"]:
        names.append("saved")
    return tuple(names)


def _differs(row: dict[str, Any], whole: dict[str, Any]) -> bool:
    return row["updates"] != 3 or any(
        not abs(row[name] - whole[name]) <= TOLERANCE * abs(whole[name]) for name in FIELDS
    )


def line(script: str, name: str, arms: dict[str, Any]) -> str:
    """The row of an architecture in the page."""
    if "failed" in arms:
        return f"| {name} | - | - | - | not tried: {arms['failed']} |"
    ways, why = EXCEPTIONS.get((script, name), ((), ""))
    failed = f"{', '.join(ways)}: {why}" if ways else ""
    if "padded" in ways:
        return f"| {name} | - | - | - | {why} |"
    auto, ddp = arms["auto"], arms["ddp"]
    unused = "-" if not isinstance(ddp, dict) else "yes" if ddp["unused"] else "no"
    flops_text = auto["flops"] or auto["flops_missing"]
    return f"| {name} | {auto['padding'] or '-'} | {unused} | {flops_text} | {failed} |"


def page(results: dict[str, dict[str, Any]]) -> str:
    text = HEAD
    for script, of in results.items():
        title = {"bert": "Texts", "vit": "Images"}[script]
        rows = "\n".join(line(script, name, of[name]) for name in sorted(of))
        heading = (
            "| architecture | batches | unused | FLOPs | not the same |\n|---|---|---|---|---|"
        )
        text += f"\n## {title}\n\n{heading}\n{rows}\n"
    return text
