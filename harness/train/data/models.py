"""A sequence or image classifier from the Hub, a local folder or the table of architectures."""

from __future__ import annotations

import copy
import hashlib
import inspect
import os
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from huggingface_hub import constants, errors
from huggingface_hub.file_download import repo_folder_name
from safetensors import SafetensorError
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from harness.core.process import causes_of, is_leader, lack_of_memory
from harness.core.provenance import check_model
from harness.core.records import read_json
from harness.core.settings import Settings, UserError
from harness.core.tasks import TASKS, task_of
from harness.core.topology import world_of
from harness.train.data import lora
from harness.train.data.downloads import HTTP_ERROR, check_downloads, no_network

# What can go wrong between here and the Hub, each in one line with the fix.
GATED = "--{kind} {name} is gated: ask for access on its page and set HF_TOKEN"
NO_NETWORK = (
    "--{kind} {name}: no network, not in the cache, and there is no folder of that name here: use "
    "--tiny, a local folder, or, with a filled cache, HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1"
)
OFFLINE = (
    "--{kind} {name} is not in the cache, there is no folder of that name here, and HF_HUB_OFFLINE "
    "forbids asking the Hub: load it once without, or use --tiny or a local folder"
)
MISSING = (
    "--{kind} {name} is neither a local folder nor on the Hub (if it is private, set HF_TOKEN): "
    "check the name"
)
NO_NAME = "--{kind} {name}: there is no folder of that name here, and the Hub allows no such name"
REFUSED = (
    "--{kind} {name}: the Hub answers {status}: check the name, or set HF_TOKEN to that of an "
    "account that may read it"
)
BUSY = (
    "--{kind} {name}: the Hub answers {status} after several tries: try again later, or, with a "
    "filled cache, with HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1"
)
NO_WEIGHTS = "--{kind} {name} is a folder without weights: save them there, or add --from_scratch"
BROKEN_OFF = (
    "--{kind} {name}: the Hub broke off in the middle of an answer: give the same command again, "
    "which continues the download"
)
UNREADABLE = "--{kind} {name} cannot be read: {text}"
MOST_NAMED = 5  # classes in a line
NOT_UTF8 = UNREADABLE + ": save it as UTF-8"
# Parts of the names of dropout rates, and of rates at which layers and paths are skipped.
DROPPING = ("dropout", "_pdrop", "drop_rate", "drop_mlp_rate", "drop_conv")
SKIPPING = ("drop_path", "layerdrop", "drop_connect", "jitter_noise")
FAILURES = (
    DatasetGenerationError, OSError, ValueError, RuntimeError, IndexError, HTTP_ERROR,
    SafetensorError, EOFError, zlib.error, StopIteration,
)  # fmt: skip
BY_CAUSE: tuple[tuple[Any, str], ...] = (
    (UnicodeDecodeError, NOT_UTF8),
    (DatasetNotFoundError, MISSING),
    (SafetensorError, "--{kind} {name}: its weights are damaged ({text}): copy them once more"),
    (StopIteration, "--{kind} {name} cannot be read: it is empty"),  # datasets, of JSON
    (DatasetGenerationError, UNREADABLE),
    (errors.GatedRepoError, GATED),
    (errors.RepositoryNotFoundError, MISSING),
    ((HTTP_ERROR, ConnectionError, errors.OfflineModeIsEnabled), NO_NETWORK),
)
BY_TEXT = (
    (("couldn't connect", "couldn't reach", "offline", "connection"), NO_NETWORK),
    (
        ("cannot be loaded with `safetensors`", "no file named model.safetensors"),
        "--{kind} {name} has no safetensors file: other weights are pickled, and may bring code of "
        "their own: convert them, or add --trust_remote_code",
    ),
    (
        ("trust_remote_code", "remote code"),
        "--{kind} {name} brings code of its own: read it, then add --trust_remote_code",
    ),
    (("is not a local folder", "not a valid model identifier"), MISSING),
    (("corresponds to no data",), "--{kind} {name} is empty: {text}"),
    (
        ("infer the same data file format",),
        "--{kind} {name} has files of several formats: take one",
    ),
    (
        ("scripts are no longer supported",),
        "--{kind} {name} is a loading script; convert it to parquet or csv first",
    ),
    (
        ("config name is missing", "builderconfig"),
        "--{kind} {name}: {text}; name one with --dataset_config",
    ),
)


def auto_class(script: str) -> Any:
    """The class of transformers that builds the models of a task."""
    return getattr(transformers, task_of(script).auto_model)


def class_of(script: str, config: Any) -> Any:
    """The class that makes or loads a model of this configuration, a new one or a saved one."""
    return small_stem_resnet() if has_small_stem(config) else auto_class(script)


def has_small_stem(config: Any) -> bool:
    """Whether a ResNet of transformers has our mark; one with code of its own may use the name."""
    kind, own_code, marked = (
        getattr(config, name, None) for name in ("model_type", "auto_map", "cifar_stem")
    )
    return kind == "resnet" and not own_code and bool(marked)


@cache
def small_stem_resnet() -> Any:
    """A ResNet whose first layer keeps 32-pixel images at their size; that of transformers, which
    cannot load its weights, shrinks them to 8.
    """
    from transformers import ResNetForImageClassification  # most runs do not need its module

    class SmallStemResNetForImageClassification(ResNetForImageClassification):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            stem, width = self.resnet.embedder, config.embedding_size
            stem.embedder.convolution = nn.Conv2d(3, width, kernel_size=3, padding=1, bias=False)
            stem.pooler = nn.Identity()

        @classmethod
        def from_config(cls, config: Any, trust_remote_code: bool = False) -> Any:
            """As the Auto classes have it."""
            return cls._from_config(config)

    return SmallStemResNetForImageClassification


def named(settings: Settings) -> Mapping[str, Any] | None:
    """The entry in the table of architectures, or None for a model of the Hub or a folder."""
    return task_of(settings.script).architectures.get(str(settings.model))


def check_kind(settings: Settings) -> None:
    """Refuse a model that cannot exist, and a folder with a model of another task, whose missing
    tokenizer or image processor would be reported instead.
    """
    check_model(settings)
    saved = read_json(Path(str(settings.model)).expanduser() / "config.json") or {}
    kind = str(saved.get("model_type"))
    if kind not in CONFIG_MAPPING or saved.get("auto_map"):
        return
    fitting = [task for task in TASKS.values() if _builds(task.script, kind)]
    if fitting and task_of(settings.script).input not in {task.input for task in fitting}:
        other = fitting[0]
        raise UserError(
            f"--model {settings.model}: its config.json says {kind}, which reads {other.input}s: "
            f"for {other.script}.py"
        )


def _builds(script: str, kind: str) -> bool:
    return CONFIG_MAPPING[kind] in auto_class(script)._model_mapping


def configuration(settings: Settings, labels: list[str] | None = None) -> Any:
    """The model's configuration, with the classes of the data where they are known."""
    classes: dict[str, Any] = {}
    if labels is not None:
        classes = {
            "id2label": dict(enumerate(labels)),
            "label2id": {n: i for i, n in enumerate(labels)},
        }
    entry = named(settings)
    if entry is not None:
        extra = {k: v for k, v in entry.items() if k != "model_type"}
        config = AutoConfig.for_model(entry["model_type"], **extra, **classes)
    else:
        check_model(settings)
        with explain("model", str(settings.model)):
            config = AutoConfig.from_pretrained(
                settings.model, trust_remote_code=settings.trust_remote_code, **classes
            )
    if labels is not None and config.num_labels != len(labels):  # timm's files say how many anew
        config.id2label, config.label2id = classes["id2label"], classes["label2id"]
    config.dtype = torch.float32  # whatever the weights were saved in
    if getattr(config, "problem_type", None):  # of what the weights were trained for before
        config.problem_type = "single_label_classification"
    config.architectures = config.architectures or []  # transformers walks over them
    if settings.dropout is not None:
        _set_dropout(config, settings.dropout)
    if settings.image_size is not None and hasattr(config, "image_size"):
        if entry is None and not settings.from_scratch and config.image_size != settings.image_size:
            raise UserError(
                f"--image_size {settings.image_size}: the weights of {settings.model} are for "
                f"{config.image_size}; leave it out or add --from_scratch"
            )
        config.image_size = settings.image_size
    return config


def build(settings: Settings, labels: list[str]) -> nn.Module:
    """The model with a head for these classes; with random weights if asked for."""
    config = configuration(settings, labels)
    auto, drawn = class_of(settings.script, config), []
    try:
        if named(settings) is not None or settings.from_scratch:
            model = auto.from_config(config, trust_remote_code=settings.trust_remote_code)
        else:
            with explain("model", str(settings.model)):
                model, loaded = auto.from_pretrained(
                    settings.model,
                    config=config,
                    dtype=torch.float32,
                    ignore_mismatched_sizes=True,  # the head is made for these classes
                    output_loading_info=True,
                    trust_remote_code=settings.trust_remote_code,
                    use_safetensors=None if settings.trust_remote_code else True,
                )
            drawn, saved = _drawn(settings, model, loaded), _classes_of(settings)
            if not drawn:  # the head, too, is that of the checkpoint
                _order_head(model, saved, labels)
            if is_leader():
                _print_head_change(bool(loaded["mismatched_keys"]), bool(drawn), saved, labels)
    except ValueError as error:
        if "Unrecognized configuration class" in str(error):
            kind = task_of(settings.script).input
            raise UserError(
                f"--model {settings.model} ({config.model_type}) is no {kind} classifier: "
                "--list_models names some"
            ) from None
        raise
    _refuse_other_inputs(settings, model)
    checkpointing = settings.passed.get("gradient_checkpointing")
    if checkpointing and not getattr(model, "supports_gradient_checkpointing", True):
        raise UserError(
            f"--gradient_checkpointing: {config.model_type} does not support it; leave it out, or "
            "lower --per_gpu_batch and raise --grad_acc to save memory"
        )
    if settings.lora:
        lora.add(model, settings.lora, drawn)
    return model


def loading(settings: Settings, model: Any, folder: Path, max_length: int | None) -> str:
    """Python code, to be pasted, that loads the trained model from its folder and cuts texts as the
    training did; with --lora the folder has the weights of the plain model.
    """
    config, name = getattr(model, "config", None), type(model).__name__
    usual = auto_class(settings.script)._model_mapping.get(type(config), ())
    classes = tuple(usual) if isinstance(usual, (list, tuple)) else (usual,)
    remote = type(model).__module__.startswith("transformers_modules.")
    if has_small_stem(config):
        load = f"model = small_stem_resnet().from_pretrained({str(folder)!r})"
        return f"from harness.train.data.models import small_stem_resnet; {load}"
    if remote or isinstance(model, classes):
        task = f"{task_of(settings.script).input}-classification"
        more = f", truncation=True, max_length={max_length}" if max_length else ""
        more += ", trust_remote_code=True" if remote else ""
        load = f"classify = pipeline({task!r}, {str(folder)!r}{more})"
        return f"from transformers import pipeline; {load}"
    load = f"load_model(model, {str(folder / 'model.safetensors')!r})"
    made = f"model: a {name}, as {settings.script}.py makes it"
    return f"from safetensors.torch import load_model; {load}  # {made}"


def is_stock(model: nn.Module) -> bool:
    """Whether it has the layers that its class in transformers makes of its configuration, whatever
    adapters are in them: not another head, nor fewer layers.
    """
    made, config = type(model), getattr(model, "config", None)
    if not made.__module__.startswith("transformers.models."):
        return False
    try:
        with torch.device("meta"):
            return _layers(made(copy.deepcopy(config))) == _layers(model)
    except Exception:  # a class that cannot be made without its weights
        return False


def _layers(model: nn.Module) -> list[tuple[str, type, list[torch.Size]]]:
    """Name, class and shapes of each layer, without peft's: a wrapper has the plain one inside."""
    layers = []
    for name, module in model.named_modules():
        inside = any(part.startswith("lora_") for part in name.split("."))
        if not inside and not type(module).__module__.startswith("peft."):
            shapes = [weight.shape for weight in module.parameters(recurse=False)]
            layers.append((name.replace(".base_layer", ""), type(module), shapes))
    return layers


def _refuse_other_inputs(settings: Settings, model: Any) -> None:
    """Refuse classifiers of transformers that give no loss or take another task's input."""
    if not type(model).__module__.startswith("transformers.models."):
        return
    takes = inspect.signature(model.forward).parameters
    needed = task_of(settings.script).model_input
    for refused, why in (
        ("labels" not in takes, "it returns no loss"),
        (needed not in takes, f"it does not take {needed}"),
        ("spatial_shapes" in takes, "it takes patches of its own processor instead of images"),
    ):
        if refused:
            name = f"{settings.model} ({model.config.model_type})"
            raise UserError(f"--model {name} cannot be trained: {why}; choose another model")


def _drawn(settings: Settings, model: Any, loaded: Mapping[str, Collection[Any]]) -> list[str]:
    """The weights that a checkpoint lacks, to which transformers gives random values.

    That is right for the head, and for the pooler on which heads stand and which many pretrained
    checkpoints lack; other missing weights are refused.
    """
    names = [*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])]
    body, head = f"{model.base_model_prefix}.", lora.head_of(model)  # which may lie inside
    lacking = sorted(n for n in names if n.startswith(body) and n not in head and "pooler" not in n)
    if lacking:
        raise UserError(
            f"--model {settings.model}: its weights lack {len(lacking)} tensors of the model, such "
            f"as {lacking[0]}: take a whole checkpoint, or --from_scratch for random weights"
        )
    return names


def _print_head_change(resized: bool, drawn: bool, saved: list[str], labels: list[str]) -> None:
    """Print a line if a checkpoint has a head that was saved for other classes."""
    ours, theirs = (
        ", ".join([*names[:MOST_NAMED], *["..."][: len(names) > MOST_NAMED]])
        for names in (labels, saved)
    )
    if resized:
        print(
            f"the head is new, for {len(labels)} classes ({ours}): the checkpoint has one for "
            f"{len(saved)} ({theirs})"
        )
    elif not drawn and sorted(saved) != sorted(labels):
        print(f"the head of the checkpoint is kept: its classes {theirs} now stand for {ours}")


def _classes_of(settings: Settings) -> list[str]:
    """The names of the classes that the head of a checkpoint was saved with, in its order."""
    return [str(name) for _, name in sorted((configuration(settings).id2label or {}).items())]


def _order_head(model: nn.Module, saved: list[str], labels: list[str]) -> None:
    """Reorder the rows of a head that was saved with the same classes in another order."""
    if saved == labels or sorted(saved) != sorted(labels):
        return
    rows = torch.tensor([saved.index(name) for name in labels])
    heads = [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear) and module.out_features == len(labels)
    ]
    if len(heads) != 1:
        raise UserError(
            f"the model has its classes in another order ({', '.join(saved)}) than the data, and "
            f"{len(heads)} layers of as many outputs: save it with the order {', '.join(labels)}"
        )
    for tensor in (heads[0].weight, heads[0].bias):
        if tensor is not None:
            tensor.data = tensor.data[rows]


def code_of(thing: Any) -> str | None:
    """A checksum of the code that a model brings for its tokenizer or image processor; None for
    code of transformers, whose version is recorded.
    """
    if not type(thing).__module__.startswith("transformers_modules."):
        return None
    files = sorted(Path(inspect.getfile(type(thing))).parent.glob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def first_position(model: nn.Module) -> int:
    """The first position number of a model: RoBERTa and its kin begin after the number of the
    padding token, and so can read fewer tokens than they have positions.
    """
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0


def max_tokens(settings: Settings) -> int | None:
    """The longest text that a model can read; None if its configuration sets no limit."""
    config = configuration(settings)
    positions = getattr(config, "max_position_embeddings", None)
    if not positions or positions < 0 or named(settings) is not None:
        return positions
    with torch.device("meta"):
        model = auto_class(settings.script).from_config(
            config, trust_remote_code=settings.trust_remote_code
        )
    return int(positions) - first_position(model)


def _set_dropout(config: Any, rate: float) -> None:
    """Set every dropout rate of a configuration, whatever the model type calls it; 0 also switches
    off what skips whole layers or paths at random.
    """
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _set_dropout(value, rate)
        if isinstance(value, bool) or not any(
            word in name for word in (DROPPING if rate else DROPPING + SKIPPING)
        ):
            continue
        if isinstance(value, (list, tuple)):
            setattr(config, name, type(value)(rate for _ in value))
        elif value is None or isinstance(value, (int, float)):
            # MPT and LeViT declare a rate as a whole number.
            try:
                setattr(config, name, 0 if isinstance(value, int) and rate == 0 else rate)
            except errors.StrictDataclassFieldValidationError:
                raise UserError(
                    f"--dropout {rate}: {name} of {config.model_type} can only be 0: leave out "
                    "--dropout"
                ) from None


@contextmanager
def explain(kind: str, name: str) -> Iterator[None]:
    """Turn the many exceptions of loading into UserError; other errors pass through."""
    offline = False
    try:
        if from_hub(name):
            repo_folder_name(repo_id=name, repo_type=kind)  # the Hub's own check of names
            offline = no_network()
        yield
        check_hub_files(kind, name)
    except UserError:
        raise
    except errors.HFValidationError:
        raise UserError(NO_NAME.format(kind=kind, name=name)) from None
    except (ImportError, *FAILURES) as e:
        if (lack := lack_of_memory(e)) is not None:
            raise lack from None
        if isinstance(e, ImportError):
            missing = getattr(e, "name", None) or " ".join(str(e).split())[:200]
            raise UserError(f"--{kind} {name} needs a package that is missing: {missing}") from None
        check_hub_files(kind, name)  # a damaged file may raise any of these errors
        causes = causes_of(e)
        text = " ".join(str(causes[-1] if isinstance(e, DatasetGenerationError) else e).split())
        template = _template(name, causes, text.lower())
        if template == NO_NETWORK and constants.HF_HUB_OFFLINE and not offline:
            template = OFFLINE
        status = _status(causes)
        raise UserError(
            template.format(kind=kind, name=name, text=text[:300], status=status)
        ) from e


def _template(name: str, causes: list[BaseException], text: str) -> str:
    """The message: libraries raise OSError and ValueError for most things; the text decides."""
    if any("complete message body" in str(cause) for cause in causes):  # as HTTP libraries say it
        return BROKEN_OFF
    for kinds, template in BY_CAUSE:
        if any(isinstance(cause, kinds) for cause in causes):
            offline = "offline" in text or "couldn't reach" in text
            if template == NO_NETWORK and (status := _status(causes)):
                return BUSY if status == 429 or status >= 500 else REFUSED
            return NO_NETWORK if template == MISSING and offline else template
    if constants.HF_HUB_OFFLINE and from_hub(name) and "can't load" in text:
        return NO_NETWORK  # some say no more than that
    if "no file named model.safetensors" in text and not any(Path(name).rglob("*.bin")):
        return NO_WEIGHTS
    for phrases, template in BY_TEXT:
        if any(phrase in text for phrase in phrases):
            return template
    return UNREADABLE if Path(name).exists() else "--{kind} {name} cannot be loaded: {text}"


def _status(causes: list[BaseException]) -> int:
    """The HTTP status that the Hub returned; 0 if there was no answer."""
    answers = [getattr(cause, "response", None) for cause in causes]
    return next((getattr(answer, "status_code", 0) for answer in answers if answer is not None), 0)


def from_hub(name: str) -> bool:
    """Whether a name is neither that of a local file or folder nor of embedded data."""
    return not name.startswith("embedded:") and not Path(name).expanduser().exists()


def check_hub_files(kind: str, name: str) -> None:
    """Check downloads on the first process of a node, which checks for the others, too."""
    if from_hub(name) and world_of(os.environ).local_rank == 0:
        check_downloads(kind, name)
