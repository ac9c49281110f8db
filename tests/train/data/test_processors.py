"""Images are what the processor that is saved beside the weights makes of them, for any of its
arguments.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset, DatasetDict
from PIL import Image
from transformers import AutoImageProcessor

from harness.core.command_line import parse
from harness.core.settings import Settings, UserError
from harness.train.data import sources
from harness.train.data.images import Normalise, _resizer, load_images
from tests.support.broken_runs import only_run
from tests.support.ranks import script
from tests.support.samples import stored
from tests.support.toys import CONFIGS

SQUARE = {"size": {"height": 16, "width": 16}}
# Kinds of processor, and arguments that change what an image becomes.
PROCESSORS: list[tuple[str, dict[str, Any]]] = [
    ("ViT", SQUARE),
    ("ViT", {**SQUARE, "do_normalize": False}),
    ("ViT", {**SQUARE, "do_rescale": False}),
    ("ViT", {**SQUARE, "do_rescale": False, "do_normalize": False}),
    ("ViT", {**SQUARE, "rescale_factor": 1 / 127.5, "image_mean": [1, 0.9, 1], "resample": 0}),
    ("EfficientNet", SQUARE),
    ("EfficientNet", {**SQUARE, "include_top": False}),
    ("EfficientNet", {**SQUARE, "rescale_offset": True, "rescale_factor": 1 / 127.5}),
    ("EfficientNet", {**SQUARE, "do_normalize": False}),
    ("MobileViT", {"size": {"shortest_edge": 20}, "crop_size": {"height": 16, "width": 16}}),
    ("ConvNext", {"size": {"shortest_edge": 16}, "crop_pct": 0.8}),
    ("Bit", {"size": {"shortest_edge": 20}, "crop_size": {"height": 16, "width": 16}}),
    ("Levit", {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}),
    ("PoolFormer", {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}),
    ("CLIP", {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}),
]  # fmt: skip


def saved(folder: Path, kind: str, arguments: dict[str, Any]) -> Settings:
    """A model's folder with this processor."""
    getattr(transformers, f"{kind}ImageProcessorPil")(**arguments).save_pretrained(folder)
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])
    config.save_pretrained(folder)
    return Settings(script="vit", model=str(folder))


def picture(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(3).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


@pytest.mark.parametrize(("kind", "arguments"), PROCESSORS)
def test_images_are_those_of_the_saved_processor(
    tmp_path: Path, kind: str, arguments: dict[str, Any]
) -> None:
    resizer = _resizer(saved(tmp_path / "model", kind, arguments))
    resizer.processor.save_pretrained(tmp_path / "trained")
    own = AutoImageProcessor.from_pretrained(tmp_path / "trained")
    normalise = Normalise(resizer.mean, resizer.deviation)
    for size in ((40, 30), (16, 16), (9, 21)):
        expected = own(picture(*size), return_tensors="pt")["pixel_values"]
        pixels = torch.from_numpy(resizer(stored(picture(*size), "PNG")))[None]
        result = normalise({"pixel_values": pixels})["pixel_values"]
        torch.testing.assert_close(result, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "arguments"), [(k, a) for k, a in PROCESSORS if k != "ViT"])
def test_image_size_is_the_size_of_the_images(
    tmp_path: Path, kind: str, arguments: dict[str, Any]
) -> None:
    resizer = _resizer(replace(saved(tmp_path, kind, arguments), image_size=24))
    assert resizer(stored(picture(40, 30), "PNG")).shape == (3, 24, 24)


def test_a_size_that_a_processor_does_not_make_is_refused(tmp_path: Path) -> None:
    settings = saved(tmp_path, "CLIP", {"size": {"shortest_edge": 16}, "do_center_crop": False})
    with pytest.raises(UserError, match=r"--image_size 24: CLIP.* makes images of 24x36 pixels"):
        _resizer(replace(settings, image_size=24))


@pytest.mark.process
def test_recorded_metrics_are_those_of_the_saved_model(tmp_path: Path) -> None:
    saved(tmp_path / "model", "ViT", {"size": {"height": 8, "width": 8}, "do_normalize": False})
    CONFIGS["vit"].save_pretrained(tmp_path / "model")
    argv = ["--model", str(tmp_path / "model"), "--from_scratch", "--dataset", "embedded:digits"]
    argv += [
        "--train_size",
        "64",
        "--test_size",
        "32",
        "--b",
        "16",
        "--epochs",
        "2",
        "--lr",
        "0.01",
    ]
    done = script("vit", *argv, "--o", str(tmp_path / "runs"))
    assert done.code == 0, done.err
    folder = only_run(tmp_path / "runs")
    checkpoint = max(folder.path.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
    model = transformers.AutoModelForImageClassification.from_pretrained(checkpoint)
    own = AutoImageProcessor.from_pretrained(checkpoint)
    source = sources.load(parse("vit", argv))
    inputs = own([image.convert("RGB") for image in source.test["image"]], return_tensors="pt")
    with torch.no_grad():
        loss = model(**inputs, labels=torch.from_numpy(source.classes[1])).loss
    assert folder.read_epochs()[0][-1]["eval_loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_a_processor_of_one_channel_is_refused(tmp_path: Path) -> None:
    settings = saved(tmp_path, "ViT", {"image_mean": [0.5], "image_std": [0.5]})
    with pytest.raises(UserError, match=r"for images of 1 channel\(s\), and images are read"):
        _resizer(settings)


def test_a_processor_that_makes_no_images_is_refused(tmp_path: Path) -> None:
    settings = saved(tmp_path, "Siglip2", {"patch_size": 16, "max_num_patches": 16})
    with pytest.raises(UserError, match=r"its image processor makes no images"):
        _resizer(settings)


def test_images_of_several_sizes_are_refused(tmp_path: Path) -> None:
    settings = saved(
        tmp_path / "model", "CLIP", {"size": {"shortest_edge": 16}, "do_center_crop": False}
    )
    pictures = [picture(16 + 4 * (number == 9), 16) for number in range(10)]
    columns = {"image": pictures, "label": [0, 1] * 5}
    data = DatasetDict({"train": Dataset.from_dict(columns), "test": Dataset.from_dict(columns)})
    data.cast_column("image", datasets.Image()).save_to_disk(tmp_path / "data")
    more = {"dataset": str(tmp_path / "data"), "train_size": "all", "test_size": "all"}
    with pytest.raises(
        UserError, match=r"sizes \(\(3, 16, 16\), \(3, 16, 20\)\), which make no batch"
    ):
        load_images(replace(settings, **more), 1)


def test_what_is_no_resizing_and_normalisation_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = saved(tmp_path, "ViT", SQUARE)
    kind = transformers.ViTImageProcessorPil
    plain = kind.rescale
    monkeypatch.setattr(kind, "rescale", lambda self, image, scale: plain(self, image, scale) ** 2)
    with pytest.raises(UserError, match="does more to an image than resizing and one normal"):
        _resizer(settings)


def test_a_picture_that_a_processor_cannot_prepare_is_named(tmp_path: Path) -> None:
    resizer = _resizer(saved(tmp_path, "ViT", SQUARE))

    def fails(image: Any) -> Any:
        raise ZeroDivisionError("no height\nmore")

    resizer.resize = fails
    line = "image ramp.png: ViTImageProcessorPil cannot prepare it: ZeroDivisionError: no height$"
    with pytest.raises(UserError, match=line):
        resizer(stored(picture(4, 4), "PNG"))


def test_one_mean_for_all_channels_is_measured(tmp_path: Path) -> None:
    settings = saved(tmp_path, "ViT", {**SQUARE, "image_mean": 0.5, "image_std": 0.25})
    resizer = _resizer(settings)
    normalise = Normalise(resizer.mean, resizer.deviation)
    pixels = torch.from_numpy(resizer(stored(picture(16, 16), "PNG")))[None]
    expected = resizer.processor(picture(16, 16), return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(normalise({"pixel_values": pixels})["pixel_values"], expected)


def test_a_processor_that_keeps_parts_of_a_level_is_refused(tmp_path: Path) -> None:
    """Owlv2 resizes floats; images are kept in bytes here."""
    settings = saved(tmp_path, "Owlv2", SQUARE)
    with pytest.raises(UserError, match="does more to an image than resizing and one normal"):
        _resizer(settings)
