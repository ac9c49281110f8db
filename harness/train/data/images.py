"""Images: decoded and resized once into one array of bytes, augmented and normalised in batches.

The array is mapped into memory, so that the ranks and runs on a machine share it. If a GPU has room
for it, it lies there, and batches are gathered there. Training images may be flipped and shifted
anew in each epoch, on the device. How a sample looks follows from (seed, epoch, number of the
sample) and from nothing else: not from the batch, the rank or the attempt that feeds it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Image
from PIL import Image as PILImage
from torch import nn
from transformers import AutoImageProcessor
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from harness.core.provenance import version_of
from harness.core.records.redact import first_line
from harness.core.schema.environment import DataRecord
from harness.core.settings import Settings, UserError
from harness.train.data import models, probes, sources
from harness.train.data.cache import cached, reserve
from harness.train.data.models import explain
from harness.train.data.samples import Data, as_data, chunks

# Libraries on which prepared pixels depend, besides the processor and its arguments.
LIBRARIES = ("transformers", "pillow", "torchvision", "timm")
SHARE_OF_FREE = 0.25  # of the device's free memory, at most, for images
# An image is shifted by at most its side divided by this: 4 of 32 pixels, as is usual for CIFAR.
SHIFT_DIVISOR = 8
# The shifts and multipliers of splitmix64 (Steele, Lea and Flood 2014), which spread bits.
SPLITMIX_FACTORS = [
    (shift, np.array([factor], np.uint64).view(np.int64).item())
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
]
SHIFT_BITS = (1 << 30) - 1
UNREADABLE = (OSError, ValueError, TypeError, AttributeError, PILImage.DecompressionBombError)
TEST_SIZE = (96, 64)  # width and height of the pictures on which a processor is tried out


def load_images(settings: Settings, world: int) -> Data:
    """The samples of a run whose forward passes take `world` batches of per_gpu_batch."""
    source = sources.load(settings)
    resizer = _resizer(settings)

    def prepare(folder: Path) -> None:
        pixels, done, shapes = None, 0, set[tuple[int, ...]]()
        for resized in _resized(source, resizer):
            shapes |= {image.shape for image in resized}
            if len(shapes) > 1:
                raise UserError(
                    f"--model {settings.model}: its image processor leaves images of several "
                    f"sizes ({', '.join(map(str, sorted(shapes)))}), which make no batch: take "
                    "images of one size"
                )
            if pixels is None:
                file, shape = folder / "pixels.npy", (sum(source.sizes), *resized[0].shape)
                pixels = np.lib.format.open_memmap(file, "w+", np.uint8, shape)
                reserve(file)
            pixels[done : done + len(resized)] = np.stack(resized)
            done += len(resized)
        assert pixels is not None
        pixels.flush()
        np.save(folder / "sixteen_bits.npy", resizer.sixteen_bits)

    key = {
        "images": source.facts["data_checksum"],
        "samples": source.sizes,
        "processor": resizer.recipe,
    }
    folder = cached(key, prepare)
    kind = settings.augment or "none"
    augment = Augment(kind, settings.seed) if kind != "none" else None
    collate = ImageBatches(folder, source.all_labels, len(source.train) if augment else 0)
    on_device = collate.bare = fits(collate.pixels.nbytes, _free_bytes(settings))
    facts: DataRecord = {
        "image_shape": list(collate.pixels.shape[1:]),
        "resized_by": type(resizer.processor).__name__,
        "sixteen_bit_images": int(np.load(folder / "sixteen_bits.npy")),
        "pixels_on": "device" if on_device else "host",
    }
    normalise = Normalise(resizer.mean, resizer.deviation)
    to_device = Pixels(normalise, collate.pixels if on_device else None, augment)
    return as_data(settings, source, world, collate, to_device, resizer.processor, facts)


def _resized(source: sources.Source, resizer: Resizer) -> Iterator[list[np.ndarray]]:
    """The images of all sets, in chunks: decoded on all cores, with the file's name at hand."""
    column = source.inputs[0]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for data in source.sets.values():
            for rows in chunks(data.cast_column(column, Image(decode=False))):
                yield list(pool.map(resizer, rows[column]))


class ImageBatches:
    """The collator: sample numbers -> one batch of bytes, which become floats on the device.

    Samples below `numbered` carry their numbers along; `bare` batches have numbers only, and no
    bytes.
    """

    bare = False

    def __init__(self, folder: Path, labels: np.ndarray, numbered: int = 0) -> None:
        # Mode c, though nothing is written: torch warns about arrays that are read-only.
        self.pixels = np.load(folder / "pixels.npy", mmap_mode="c")
        self.labels, self.numbered = labels, numbered

    def check_model(self, name: str, model: Any) -> None:
        """Refuse a model of transformers that reads images of another size than its processor's."""
        if not type(model).__module__.startswith("transformers.models."):
            return
        shape = self.pixels.shape[1:]
        if text := _cannot_read(model, shape):
            raise UserError(
                f"--model {name} does not read the images that its image processor makes "
                f"({' x '.join(map(str, shape))}): {text}: make its config.json and "
                "preprocessor_config.json agree"
            )

    def __call__(self, samples: np.ndarray) -> dict[str, torch.Tensor]:
        samples = np.asarray(samples)
        batch = {"labels": torch.from_numpy(self.labels[samples])}
        if self.bare:
            batch["places"] = torch.from_numpy(samples)
        else:
            batch["pixel_values"] = torch.from_numpy(self.pixels[samples])
        if samples[0] < self.numbered:  # a training sample, and so are the others
            batch["samples"] = torch.from_numpy(samples)
        return batch


def _cannot_read(model: nn.Module, shape: tuple[int, ...]) -> str:
    """Why a model cannot read images of this shape; empty if it can.

    Tried on a tensor without content, which costs nothing, and with content if that fails, as some
    models look at it.
    """
    text = ""
    for device in ("meta", next(model.parameters()).device):
        try:
            with torch.no_grad():
                images = torch.zeros((1, *shape), device=device)
                probes.twin(model, device)(pixel_values=images)
        except (ValueError, RuntimeError) as error:  # NotImplementedError is one
            text = " ".join(str(error).split())[:200].rstrip(".")
        else:
            return ""
    return text


class Pixels:
    """A batch of bytes, or of sample numbers -> the input of a model, on the batch's device."""

    def __init__(
        self, normalise: Normalise, resident: np.ndarray | None, augment: Augment | None
    ) -> None:
        self.normalise, self.augment = normalise, augment
        self.resident = resident
        self.on_device: torch.Tensor | None = None

    def set_epoch(self, epoch: int) -> None:
        if self.augment is not None:
            self.augment.set_epoch(epoch)

    def __call__(self, inputs: dict[str, Any]) -> dict[str, Any]:
        places, samples = inputs.pop("places", None), inputs.pop("samples", None)
        if places is not None:
            if self.on_device is None:
                assert self.resident is not None
                self.on_device = torch.from_numpy(self.resident).to(places.device)
            inputs["pixel_values"] = self.on_device[places]
        if samples is not None:
            assert self.augment is not None
            inputs["pixel_values"] = self.augment(inputs["pixel_values"], samples)
        return self.normalise(inputs)


class Normalise:
    """Bytes -> floats with the model's mean and deviation, a whole batch on its device."""

    def __init__(self, mean: Any, deviation: Any) -> None:
        self.scale = 1 / (255 * torch.tensor(deviation, dtype=torch.float32))[:, None, None]
        self.shift = -(torch.tensor(mean, dtype=torch.float32) * 255)[:, None, None] * self.scale

    def __call__(self, inputs: dict[str, Any]) -> dict[str, Any]:
        pixels = inputs.get("pixel_values")
        if pixels is not None and pixels.dtype == torch.uint8:
            if self.scale.device != pixels.device:
                self.scale = self.scale.to(pixels.device)
                self.shift = self.shift.to(pixels.device)
            wide = pixels.float()  # its memory is reused: fresh pages cost more than the arithmetic
            inputs["pixel_values"] = torch.addcmul(self.shift, wide, self.scale, out=wide)
        return inputs


def fits(size: int, free: int) -> bool:
    """Whether the images may lie on the device and leave room for model, optimizer and steps."""
    return size <= free * SHARE_OF_FREE


def _free_bytes(settings: Settings) -> int:
    """The free memory of the GPU that trains; the query itself takes some of it."""
    on_gpu = torch.cuda.is_available() and not settings.passed.get("use_cpu")
    return torch.cuda.mem_get_info()[0] if on_gpu else 0


@dataclass
class Resizer:
    """How a model's images are resized and normalised."""

    processor: Any  # saved beside the weights
    resize: Callable[[Any], np.ndarray]  # a PIL image -> channels first, 0 to 255
    mean: Any  # of values from 0 to 1
    deviation: Any
    data: Path  # the folder of the images, if they have one
    sixteen_bits: int = 0  # images of that depth, counted by several threads
    counting: threading.Lock = field(default_factory=threading.Lock)

    @property
    def recipe(self) -> dict[str, Any]:
        """Everything that the pixels depend on."""
        recipe = {k: v for k, v in self.processor.to_dict().items() if k != "_name_or_path"}
        libraries = {name: version_of(name) for name in LIBRARIES}
        return recipe | {"code": models.code_of(self.processor), "versions": libraries}

    def __call__(self, stored: dict[str, Any] | None) -> np.ndarray:
        """The bytes of one image, from its form in the data set."""
        name = self._name(stored)
        try:
            decoded = Image().decode_example(stored)
            image = _eight_bits(decoded).convert("RGB")
        except UNREADABLE as error:
            empty = not stored or not (stored.get("bytes") or stored.get("path"))
            reason = "it is empty: remove its row" if empty else str(error)
            raise UserError(f"image {name} cannot be read: {reason}") from None
        if _has_sixteen_bits(decoded):
            with self.counting:
                self.sixteen_bits += 1
        try:
            return _bytes(self.resize(image))
        except Exception as error:  # whatever a processor of the Hub raises
            raise UserError(
                f"image {name}: {type(self.processor).__name__} cannot prepare it: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error

    def _name(self, stored: dict[str, Any] | None) -> str:
        """The path below the data folder, else the file and its folder, which may be its class."""
        if not stored or not stored.get("path"):
            return "without a name"
        path = Path(stored["path"])
        if path.is_relative_to(self.data):
            return str(path.relative_to(self.data))
        return str(Path(*path.parts[-2:]))


def _bytes(values: np.ndarray) -> np.ndarray:
    rounded: np.ndarray = np.clip(np.rint(values), 0, 255).astype(np.uint8)
    return rounded


def _has_sixteen_bits(image: Any) -> bool:
    return str(image.mode).startswith("I;16")


def _eight_bits(image: Any) -> Any:
    """The image with 8 bits; PIL's own conversion would cut deeper values off at 255."""
    if _has_sixteen_bits(image):
        return PILImage.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"its values have 32 bits (mode {image.mode}): save it with 8 or 16")
    return image


def _resizer(settings: Settings) -> Resizer:
    """The model's own image processor, or plain resizing for an architecture that brings none."""
    entry = models.named(settings)
    if entry is None and not (settings.from_scratch and settings.image_size):
        models.check_kind(settings)
        with explain("model", str(settings.model)):
            processor = AutoImageProcessor.from_pretrained(
                settings.model, trust_remote_code=settings.trust_remote_code
            )
        if settings.image_size is not None:
            _set_size(processor, settings.image_size)
    else:
        side = settings.image_size or models.configuration(settings).image_size
        # 0.5 for both, as in the published ViT, rather than the statistics of another data set.
        processor = ViTImageProcessorPil(
            size={"height": side, "width": side}, image_mean=[0.5] * 3, image_std=[0.5] * 3
        )
    resize = _timm_resize(processor) if hasattr(processor, "data_config") else _resize(processor)
    # Our own processor needs nothing from the Hub, which explain() would ask for an answer.
    with explain("model", str(settings.model)) if entry is None else nullcontext():
        data = Path(str(settings.dataset)).expanduser().resolve()
        resizer = Resizer(processor, resize, *_normalisation(processor), data)
        _check_same(settings, resizer)
    return resizer


def _set_size(processor: Any, side: int) -> None:
    """Make the processor's images this size, cropped in the same proportion as before."""
    size, crop = getattr(processor, "size", None), getattr(processor, "crop_size", None)
    if size is None:  # timm's, which is refused if the size differs
        return
    if getattr(processor, "do_center_crop", False) and crop:
        scale = side / crop["height"]
        processor.size = {name: round(edge * scale) for name, edge in dict(size).items()}
        processor.crop_size = {"height": side, "width": side}
    elif size.get("shortest_edge"):
        processor.size = {"shortest_edge": side}
    else:
        processor.size = {"height": side, "width": side}


def _resize(processor: Any) -> Callable[[Any], np.ndarray]:
    """What a processor does to an image before it changes the range of the values."""
    off = {"do_rescale": False, "do_normalize": False}
    if hasattr(processor, "include_top"):  # EfficientNet's normalises twice with it
        off["include_top"] = False
    return lambda image: np.asarray(processor(image, **off, return_tensors="np")["pixel_values"][0])


def _timm_resize(processor: Any) -> Callable[[Any], np.ndarray]:
    """timm's own transform for evaluation, without its normalisation."""
    import timm

    config = processor.data_config
    transform = timm.data.create_transform(**config, is_training=False, normalize=False)
    return lambda image: np.asarray(transform(image))


def _processed(processor: Any, image: Any) -> np.ndarray:
    """One image as a saved processor hands it to its model."""
    mean = getattr(processor, "image_mean", None)
    if isinstance(mean, (list, tuple)) and len(mean) != 3:
        raise ValueError(
            f"its image processor is for images of {len(mean)} channel(s), and images are read "
            "with three (RGB)"
        )
    pixels = np.asarray(processor(image, return_tensors="pt")["pixel_values"][0], np.float64)
    if pixels.ndim != 3 or len(pixels) != 3:
        raise ValueError(f"its image processor makes no images, but {pixels.shape} values")
    return pixels


def _normalisation(processor: Any) -> tuple[Any, Any]:
    """(mean, deviation) of each channel, in values from 0 to 1.

    Measured on black and white images, because processors have many arguments that change them.
    """
    plain = (
        _processed(processor, PILImage.new("RGB", TEST_SIZE, (level,) * 3)) for level in (0, 255)
    )
    black, white = (image[:, image.shape[1] // 2, image.shape[2] // 2] for image in plain)
    with np.errstate(all="ignore"):
        deviation = 1 / (white - black)
        mean = -black * deviation
    declared: tuple[Any, Any] = (
        getattr(processor, "image_mean", None),
        getattr(processor, "image_std", None),
    )
    measured = mean, deviation
    pairs = zip(declared, measured, strict=True)
    if all(np.shape(d or 0) == (3,) and np.allclose(d, m, 1e-5, 1e-6) for d, m in pairs):
        return declared  # the same, without rounding
    return measured


def _check_same(settings: Settings, resizer: Resizer) -> None:
    """Refuse a processor whose images differ from those that training would see here: with it, the
    saved model would not have the recorded metrics.
    """
    random = np.random.default_rng(0)
    picture = PILImage.fromarray(random.integers(0, 256, (*TEST_SIZE[::-1], 3), np.uint8))
    own, here = _processed(resizer.processor, picture), _bytes(resizer.resize(picture))
    kind = type(resizer.processor).__name__
    if (side := settings.image_size) is not None and here.shape[1:] != (side, side):
        raise UserError(
            f"--image_size {side}: {kind} of {settings.model} makes images of "
            f"{here.shape[1]}x{here.shape[2]} pixels; leave it out or add --from_scratch"
        )
    mean, deviation = (
        np.asarray(v, np.float64)[:, None, None] for v in (resizer.mean, resizer.deviation)
    )
    with np.errstate(all="ignore"):
        levels = np.abs(own - (here / 255 - mean) / deviation) * 255 * np.abs(deviation)
    if not levels.max() < 0.01:  # rounding in float32; a processor may not keep parts of a level
        raise UserError(
            f"--model {settings.model}: its {kind} does more to an image than resizing and one "
            "normalisation, which cannot be reproduced here: take another model, or --from_scratch "
            "with --image_size"
        )


class Augment:
    """crop_flip: images shifted over a black border and mirrored or not; flip: mirrored or not."""

    def __init__(self, kind: str, seed: int) -> None:
        self.crop, self.seed = kind == "crop_flip", seed
        self.key = 0
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        drawn = np.random.SeedSequence([self.seed, epoch, 5]).generate_state(1, np.uint64)
        self.key = drawn.view(np.int64).item()

    def __call__(self, pixels: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
        """Augment bytes (sample, channel, row, column) of the samples with these numbers."""
        height, width = pixels.shape[2:]
        drawn = _hash(_hash(samples) + self.key)
        mirrored = (drawn & 1).bool()[:, None]
        rows, down = _window(height, drawn >> 32 if self.crop else None, pixels)
        columns, right = _window(width, drawn >> 1 if self.crop else None, pixels)
        columns = torch.where(mirrored, columns.flip(1), columns)
        right = torch.where(mirrored, right.flip(1), right)
        # Whole rows first, which are contiguous in memory.
        images = torch.arange(len(pixels), device=pixels.device)[:, None]
        moved = pixels.transpose(1, 2)[images, rows].transpose(1, 2)
        moved = moved.gather(3, columns[:, None, None, :].expand_as(moved))
        if not self.crop:
            return moved
        return moved * (down[:, None, :, None] & right[:, None, None, :])


def _window(
    side: int, drawn: torch.Tensor | None, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each sample, the positions shown along a side, and which are inside the image."""
    places = torch.arange(side, device=like.device).expand(len(like), side)
    if drawn is not None:
        margin = side // SHIFT_DIVISOR
        places = places + ((drawn & SHIFT_BITS) % (2 * margin + 1) - margin)[:, None]
    inside = (places >= 0) & (places < side)
    return places.clamp(0, side - 1), inside


def _hash(numbers: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser: whole numbers -> pseudo-random 64 bits, the same on every device."""
    for shift, factor in SPLITMIX_FACTORS:
        numbers = (numbers ^ _shift_right(numbers, shift)) * factor
    return numbers ^ _shift_right(numbers, 31)


def _shift_right(numbers: torch.Tensor, by: int) -> torch.Tensor:
    """A logical shift, which fills with zeros: torch's own repeats the sign."""
    return (numbers >> by) & ((1 << (64 - by)) - 1)
