"""FLOPs of training, from the shapes of a model, and their share of the devices' peak (MFU).

A multiply-add counts as two. Only matrix multiplications count: linear layers, convolutions and
attention. The backward pass takes twice the forward pass, except in the first layer of an image
model, whose input needs no gradient, and with --lora, where frozen weights need none: there it is
counted. These are the FLOPs that the model takes: recomputation (activation checkpointing) is not
counted, as is usual for MFU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import reduce
from statistics import fmean
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from harness.core.records import total
from harness.core.records.redact import first_line
from harness.core.schema.environment import CalibrationRecord, MeasuredRecord
from harness.core.settings import Settings
from harness.train.context import Context
from harness.train.data import lora, probes
from harness.train.data.models import first_position, is_stock
from harness.train.data.samples import SHAPE, BatchShape
from harness.train.measure.calibration import bf16_gain, calibration
from harness.train.measure.clock import MEASURING
from harness.train.measure.environment import processes_per_gpu
from harness.train.measure.rows import EpochMeasure
from harness.train.session import broadcast, gather

CLOSED, COUNTED = "closed form", "counted"
FORWARD_AND_BACKWARD = 3
NO_INPUT_GRADIENT = 2
LENGTHS = (16, 32, 48)  # of texts, at which a model is counted
CHECK_LENGTH = 64  # at which the polynomial through these three must hold, or at a longer one
SAMPLES = 2  # BatchNorm fails on a single sample whose feature map is one pixel
TERA = 1e12
# Fields of each rank: sums over its timed steps.
SUMS = ("timed_tflop", "timed_tflop_without_padding", "timed_tokens", "timed_padded_tokens")
# Dense peaks in TFLOP/s from data sheets; the doubled figures advertised for sparsity do not apply.
# A part of a device's name, the most specific first -> number format -> peak. bf16 and fp16
# accumulate in fp32, as in training.
PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    # NVIDIA B200 data sheet (2024); H200 and H100 data sheets (2023, 2024)
    ("b200", {"bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75}),
    ("h200 nvl", {"bf16": 835, "fp16": 835, "tf32": 418, "fp32": 60}),
    ("h200", {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67}),
    ("gh200", {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67}),
    ("h100 nvl", {"bf16": 835, "fp16": 835, "tf32": 418, "fp32": 60}),
    ("h100 pcie", {"bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51}),
    ("h100", {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67}),
    ("h800 pcie", {"bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51}),
    ("h800", {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67}),
    ("h20", {"bf16": 148, "fp16": 148, "tf32": 74, "fp32": 44}),
    # NVIDIA A100, A30, A40, A10 data sheets (2020, 2021)
    ("a100", {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}),
    ("a800", {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}),
    ("a30", {"bf16": 165, "fp16": 165, "tf32": 82, "fp32": 10.3}),
    ("a40", {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4}),
    ("a10g", {"bf16": 70, "fp16": 70, "tf32": 35, "fp32": 35}),
    ("a10", {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2}),
    # NVIDIA L40S, L40, L4 data sheets (2022, 2023)
    ("l40s", {"bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6}),
    ("l40", {"bf16": 181, "fp16": 181, "tf32": 90.5, "fp32": 90.5}),
    ("l4", {"bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3}),
    # NVIDIA V100 (2018), T4 (2019), P100 (2016) data sheets: no bf16, no tf32
    ("v100 pcie", {"fp16": 112, "fp32": 14}),
    ("v100", {"fp16": 125, "fp32": 15.7}),
    ("t4", {"fp16": 65, "fp32": 8.1}),
    ("p100 sxm2", {"fp16": 21.2, "fp32": 10.6}),
    ("p100", {"fp16": 18.7, "fp32": 9.3}),
    # NVIDIA Ada and Ampere architecture white papers: GeForce at half rate with fp32 sums
    ("rtx 4090", {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6}),
    ("rtx 4080", {"bf16": 97.5, "fp16": 97.5, "tf32": 48.7, "fp32": 48.7}),
    ("rtx 3090", {"bf16": 71, "fp16": 71, "tf32": 35.6, "fp32": 35.6}),
    ("rtx 3080", {"bf16": 59.5, "fp16": 59.5, "tf32": 29.8, "fp32": 29.8}),
)
# After a part of a name, these words tell of another device.
OTHER_MODELS = ("ti ", "super ", "laptop ", "d ", "mobile ", "max ")


class Uncountable(Exception):
    """Why the FLOPs of a model are unknown."""


@dataclass(frozen=True)
class Work:
    """FLOPs of forward and backward pass for a sample of T tokens: a polynomial in T."""

    fixed: float  # for an image, all of them
    per_token: float = 0.0
    per_pair: float = 0.0  # attention: every token attends to every token
    how: str = CLOSED

    def of(self, tokens: float = 0.0, squares: float | None = None, samples: int = 1) -> float:
        """FLOPs of samples with so many tokens, and so many squares of their lengths, in all."""
        squares = tokens * tokens if squares is None else squares
        return self.fixed * samples + self.per_token * tokens + self.per_pair * squares


def work_of(
    model: nn.Module,
    one_sample: Callable[[], Mapping[str, torch.Tensor]],
    image: tuple[int, int] | None = None,
    longest: int = 0,
) -> Work:
    """The work of a sample: by the closed form if there is one, which is that of an unaltered model
    that trains all its weights, else counted once, on a batch.

    `image` is the size of the images in a batch, which a configuration may not have, `longest` the
    longest text in tokens. Raises Uncountable if neither works.
    """
    config = getattr(model, "config", None)
    kind = str(getattr(config, "model_type", None))
    if kind not in (*TEXTS, *IMAGES) or lora.is_adapted(model) or not is_stock(model):
        return counted(model, one_sample, longest)
    if not all(weight.requires_grad for weight in model.parameters()):
        return counted(model, one_sample, longest)
    if kind in TEXTS:
        return TEXTS[kind](config)
    if kind in IMAGES and image is not None:
        return IMAGES[kind](config, image)
    return counted(model, one_sample, longest)


def _encoder(layers: int, width: int, inner: int, head: int) -> Work:
    """Layers of attention and two linear layers over all tokens; a head over one of them."""
    weights = 4 * width * width + 2 * width * inner  # in the matrices of a layer
    return Work(
        fixed=FORWARD_AND_BACKWARD * 2.0 * head,
        per_token=FORWARD_AND_BACKWARD * 2.0 * layers * weights,
        per_pair=FORWARD_AND_BACKWARD * 4.0 * layers * width,
    )


def _bert(config: Any) -> Work:
    width, classes = config.hidden_size, config.num_labels
    head = width * width + width * classes  # pooler and classifier
    return _encoder(config.num_hidden_layers, width, config.intermediate_size, head)


def _distilbert(config: Any) -> Work:
    head = config.dim * config.dim + config.dim * config.num_labels
    return _encoder(config.n_layers, config.dim, config.hidden_dim, head)


def _vit(config: Any, image: tuple[int, int]) -> Work:
    width = config.hidden_size
    high, wide = image
    patch_high, patch_wide = _pair(config.patch_size)
    patches = (high // patch_high) * (wide // patch_wide)
    encoder = _encoder(
        config.num_hidden_layers, width, config.intermediate_size, width * config.num_labels
    )
    weights = config.num_channels * patch_high * patch_wide * width
    return Work(encoder.of(patches + 1) + NO_INPUT_GRADIENT * 2.0 * weights * patches)


def _pair(size: Any) -> tuple[int, int]:
    return (
        (int(size), int(size)) if isinstance(size, (int, float)) else (int(size[0]), int(size[1]))
    )


TEXTS: dict[str, Callable[[Any], Work]] = {"bert": _bert, "distilbert": _distilbert}
IMAGES: dict[str, Callable[[Any, tuple[int, int]], Work]] = {"vit": _vit}


def counted(
    model: nn.Module, one_sample: Callable[[], Mapping[str, torch.Tensor]], longest: int = 0
) -> Work:
    """Count a model without a closed form: on tensors that have a shape and no content or, where
    the model looks at content, by computing a sample.

    Raises Uncountable if neither works, or if its FLOPs are no polynomial of the length.
    """
    try:
        # Without a mask all tokens count, as in a text that is not padded.
        batch = {name: value for name, value in one_sample().items() if name != "attention_mask"}
        try:
            return _counted(model, batch, longest, "meta")
        except (RuntimeError, NotImplementedError):
            return _counted(model, batch, longest, None)
    except Uncountable:
        raise
    except Exception as error:  # any model of a user may fail here, and training goes on
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise Uncountable(f"counting failed: {reason}") from None


def _counted(
    model: nn.Module, batch: Mapping[str, torch.Tensor], longest: int, device: str | None
) -> Work:
    # Layers are neither dropped nor recomputed in evaluation.
    model = probes.twin(model, device)
    if "input_ids" not in batch:
        return Work(_count(model, batch).both, how=COUNTED)
    counts = {length: _count(model, _of_length(batch, length)) for length in LENGTHS}
    # With content a long text takes time: only the forward pass of one sample is compared.
    forward = _polynomial({length: count.forward for length, count in counts.items()})
    more = _count(model, _of_length(batch, LENGTHS[0]), 2 * SAMPLES, backward=False)
    if abs(more.forward / counts[LENGTHS[0]].forward - 1) > 0.01:
        raise Uncountable("a part of its work is done once for all texts of a batch")
    check = max(longest, CHECK_LENGTH)
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None) or 0
    if positions > 0:  # RoBERTa and its kin begin to count after the padding token
        check = min(check, positions - first_position(model))
    long = _count(model, _of_length(batch, check), 1, backward=False)
    if abs(forward.of(check) / long.forward - 1) > 0.01:
        raise Uncountable("its FLOPs are no polynomial of the length of a text")
    return _polynomial({length: count.both for length, count in counts.items()})


class _Count(NamedTuple):
    """FLOPs of one sample's forward pass, and of forward and backward pass together."""

    forward: float
    both: float


def _convolution_backward(
    gradient: Sequence[int], inputs: Sequence[int], weights: Sequence[int], _bias: Any,
    _stride: Any, _padding: Any, _dilation: Any, transposed: bool, _more: Any, _groups: int,
    wanted: Sequence[bool], **_: Any,
) -> int:  # fmt: skip
    """As many as the forward pass, for the gradient of the inputs and for that of the weights.
    torch's own formula lets all channels of the weights' gradient meet, groups or not.
    """
    forward: int = conv_flop_count([*inputs], [*weights], [*gradient], transposed)
    return forward * (wanted[0] + wanted[1])


def _grouped_mm(rows: Sequence[int], columns: Sequence[int], *_: Any, **__: Any) -> int:
    """Products of several pairs of matrices, as of experts, of which torch has no formula."""
    pairs = rows[0] if len(rows) == len(columns) == 3 else 1  # else the pairs share the rows
    return 2 * pairs * rows[-2] * rows[-1] * columns[-1]


FORMULAS = {
    torch.ops.aten.convolution_backward: _convolution_backward,
    torch.ops.aten._grouped_mm: _grouped_mm,
}


def _count(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    samples: int = SAMPLES,
    backward: bool = True,
) -> _Count:
    device = next(model.parameters()).device
    inputs = {
        name: value[:1].to(device).expand(samples, *value.shape[1:])
        for name, value in batch.items()
    }
    counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    # Fused attention kernels are not counted on every device; plain matrix products are.
    with sdpa_kernel(SDPBackend.MATH), counter:
        loss = model(**inputs)["loss"]
        forward = counter.get_total_flops()
        if backward:
            loss.backward()
    return _Count(forward / samples, counter.get_total_flops() / samples)


def _of_length(batch: Mapping[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    """A text is repeated up to this length, and ends as it did: some models look for its end."""
    resized = dict(batch)
    for name, value in batch.items():
        if value.ndim == 2:
            repeated = value.repeat(1, -(-length // value.shape[1]))[:, : length - 1]
            resized[name] = torch.cat([repeated, value[:, -1:]], dim=1)
    return resized


def _polynomial(counts: Mapping[int, float]) -> Work:
    """The polynomial through three equidistant points."""
    a, b, c = (counts[length] for length in LENGTHS)
    step = LENGTHS[1] - LENGTHS[0]
    per_pair = (a - 2 * b + c) / (2 * step * step)
    per_token = (b - a) / step - per_pair * (LENGTHS[0] + LENGTHS[1])
    fixed = a - per_token * LENGTHS[0] - per_pair * LENGTHS[0] ** 2
    return Work(fixed, per_token, per_pair, COUNTED)


def peak_tflops(device: str, precision: str) -> float | None:
    """The peak of a device, by its name; None if it is not in the table, has no such format or is a
    part of a device (MIG, or a virtual one, as A100-10C).
    """
    name = f" {re.sub(r'[^a-z0-9]+', ' ', device.lower())} "
    if " mig " in name or re.search(r" \d+[abcq](me)? $", name):
        return None
    for part, by_format in PEAKS:
        _, match, after = name.partition(f" {part} ")
        if match and not after.startswith(OTHER_MODELS):
            return by_format.get(precision)
    return None


def peak_of(
    settings: Settings, nodes: Sequence[Mapping[str, Any]] = ()
) -> tuple[float | None, str | None]:
    """The peak of one device in the run's number format, and where it comes from; the mean over
    ranks or, where processors train, over nodes (a collective).
    """
    if settings.peak_tflops is not None:
        return settings.peak_tflops, "flag"
    if nodes or not torch.cuda.is_available():
        peaks, source = [node.get(f"{settings.precision}_tflops") for node in nodes], "calibration"
    else:
        peaks = gather(peak_tflops(torch.cuda.get_device_name(), settings.precision))
        source = "table"
    known = [peak for peak in peaks if peak is not None]
    if not known or len(known) < len(peaks):
        return None, None
    return fmean(known), source


@MEASURING.counted()
def _processors(
    context: Context, model: nn.Module, one_batch: Callable[[], Mapping[str, torch.Tensor]]
) -> list[dict[str, Any]]:
    """The peak of each node's processor, if processors train."""
    if context.args.device.type != "cpu":
        return []
    is_single = context.world.size == 1
    first: CalibrationRecord | None = None
    if context.world.local_rank == 0 or is_single:  # the others wait for it
        known = calibration()
        fp32 = context.settings.precision == "fp32" and (context.is_rank0 or is_single)
        gain = bf16_gain(model, one_batch, known) if fp32 else None
        first = {**known, "bf16_gain": gain}
    return [of_node for of_node in gather(first) if of_node is not None]


def batch_shape(inputs: Mapping[str, Any]) -> BatchShape:
    """The shape of a batch that is not yet copied to a device, so that no GPU is waited for."""
    shape: BatchShape | None = inputs.get(SHAPE)
    if shape is not None:
        return shape
    samples = len(inputs["labels"])
    if (ids := inputs.get("input_ids")) is None:
        return BatchShape(samples)
    texts, longest = ids.shape
    return BatchShape(samples, texts * longest, texts * longest * longest)


class Utilisation(EpochMeasure):
    """Adds up the forward passes that belong to timed steps; the trainer reports each of them."""

    def __init__(
        self,
        context: Context,
        model: nn.Module,
        one_sample: Callable[[], Mapping[str, torch.Tensor]],
        devices: Callable[[], int],
        one_batch: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        self.devices = devices  # how many trained in the epoch that has ended
        self.work: Work | None
        self.missing: str | None  # why the work is not known
        # Rank 0 counts for all ranks: with content, counting takes time, and ranks share their
        # machine. Each peer of hivemind counts for itself, as peers have no process group.
        counts = context.is_rank0 or context.world.size == 1
        own, why = self._work(context, model, one_sample) if counts else (None, None)
        numbers, self.missing = broadcast((own and astuple(own), why))
        self.work = Work(*numbers) if numbers else None
        nodes = _processors(context, model, one_batch)
        self.processor = cast(CalibrationRecord, nodes[0]) if nodes else None
        self.peak, self.peak_from = peak_of(context.settings, nodes)
        self.sharing = processes_per_gpu() or 1.0 if context.args.device.type == "cuda" else 1.0
        self.updates: dict[int, BatchShape] = {}  # of this epoch

    @staticmethod
    @MEASURING.counted()
    def _work(
        context: Context, model: nn.Module, one_sample: Callable[[], Mapping[str, torch.Tensor]]
    ) -> tuple[Work | None, str | None]:
        """The work, or why it is not known."""
        shape = context.data_facts.get("image_shape")
        image = (shape[1], shape[2]) if shape else None
        try:
            longest = context.data_facts.get("max_length") or 0
            return work_of(model, one_sample, image, longest), None
        except Uncountable as error:
            return None, str(error)

    def add(self, update: int, shape: BatchShape) -> None:
        """Add a forward pass of this update, which may have several."""
        before = self.updates.get(update)
        self.updates[update] = shape if before is None else before + shape

    def epoch_begins(self) -> None:
        self.updates = {}

    def rank_fields(self, untimed: int) -> dict[str, Any]:
        timed = list(self.updates.values())[untimed:]
        if not timed:
            return dict.fromkeys(SUMS)
        return sums_of(self.work, reduce(BatchShape.__add__, timed))

    def run_fields(self, ranks: Sequence[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
        sums = {name: total([rank.get(name) for rank in ranks]) for name in SUMS}
        peak = self.peak * self.devices() / self.sharing if self.peak is not None else None
        return rates(sums, row["timed_s"], peak)

    def facts(self) -> MeasuredRecord:
        work = self.work
        return {
            "cpu_calibration": self.processor,
            "flops": {
                "how": work.how if work else None,
                "missing": self.missing,
                "per_sample": work.fixed if work else None,
                "per_token": work.per_token if work else None,
                "per_pair_of_tokens": work.per_pair if work else None,
                "peak_tflops_per_gpu": self.peak,
                "peak_from": self.peak_from,
            },
        }


def sums_of(work: Work | None, shape: BatchShape) -> dict[str, Any]:
    """The fields of a rank for batches of this shape in all."""
    sums: dict[str, Any] = dict.fromkeys(SUMS)
    sums["timed_tokens"], sums["timed_padded_tokens"] = shape.text_tokens, shape.tokens
    if work is None:
        return sums
    samples = shape.samples
    if not work.per_token and not work.per_pair:
        # Samples of equal size: nothing is padded.
        sums["timed_tflop"] = work.of(samples=samples) / TERA
        return sums | {"timed_tflop_without_padding": sums["timed_tflop"]}
    if shape.tokens is not None:
        sums["timed_tflop"] = work.of(shape.tokens, shape.squares, samples) / TERA
    if shape.text_tokens is not None:
        without = work.of(shape.text_tokens, shape.text_squares, samples)
        sums["timed_tflop_without_padding"] = without / TERA
    return sums


def rates(
    sums: Mapping[str, float | None], seconds: float, peak_tflops: float | None
) -> dict[str, float | None]:
    """The fields of the run's row, from the sums over all ranks and the peak of all devices."""
    tflop, without, tokens, padded = (sums[name] for name in SUMS)
    rate = _ratio(tflop, seconds)
    filled = _ratio(tokens, padded)
    return {
        "tflops_per_s": rate,
        "tflops_per_s_without_padding": _ratio(without, seconds),
        "mfu": _ratio(rate, peak_tflops),
        "tokens_per_s": _ratio(tokens, seconds),
        "padding_share": None if filled is None else 1 - filled,
    }


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
