"""Images of every depth keep their brightness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from harness.core.settings import Settings, UserError
from harness.train.data import images, models
from harness.train.data.images import ImageBatches, _resizer, load_images
from tests.support.samples import stored

RAMP = np.linspace(0, 1, 64).reshape(8, 8)


@pytest.fixture(scope="module")
def resizer() -> Any:
    return _resizer(Settings(script="vit", model="vit-nano", image_size=8))


@pytest.mark.parametrize(("kind", "dtype", "top"), [
    ("PNG", np.uint8, 255), ("PNG", np.uint16, 65535), ("TIFF", np.uint16, 65535),
])  # fmt: skip
def test_sixteen_bits_look_like_eight(resizer: Any, kind: str, dtype: Any, top: int) -> None:
    image = Image.fromarray((RAMP * top).round().astype(dtype))
    expected = np.broadcast_to((RAMP * 255).round(), (3, 8, 8))
    assert np.abs(resizer(stored(image, kind)).astype(int) - expected).max() <= 1


def test_a_model_of_our_own_does_not_ask_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network that takes a second, and each rank would ask after the one before it."""
    monkeypatch.setattr(models, "no_network", lambda: pytest.fail("asked the Hub"))
    settings = Settings(script="vit", model="vit-nano", dataset="embedded:digits", train_size=32,
                        test_size=16, per_gpu_batch=2)  # fmt: skip
    assert load_images(settings, 1).labels == [str(digit) for digit in range(10)]


def test_images_with_sixteen_bits_are_counted_once_they_are_prepared_and_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pipeline() gives the model other pixels of them than training did."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    for split, deep in (("train", 3), ("test", 2)):
        for n in range(8):
            folder = tmp_path / "data" / split / str(n % 2)
            folder.mkdir(parents=True, exist_ok=True)
            top, dtype = (65535, np.uint16) if n < deep else (255, np.uint8)
            values = np.roll(RAMP, n + 8 * deep) * top
            Image.fromarray(values.round().astype(dtype)).save(folder / f"{n}.png")
    settings = Settings(
        script="vit", model="vit-nano", image_size=8, per_gpu_batch=2,
        dataset=str(tmp_path / "data"), train_size="all", test_size="all",
    )  # fmt: skip
    for _ in ("prepared", "from the cache"):
        assert load_images(settings, 1).facts["sixteen_bit_images"] == 5


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_values_of_unknown_range_are_refused(resizer: Any, dtype: Any) -> None:
    image = Image.fromarray((RAMP * 9000).astype(dtype))
    with pytest.raises(
        UserError, match=r"image ramp\.tiff cannot be read: its values have 32 bits"
    ):
        resizer(stored(image, "TIFF"))


def test_a_broken_image_is_named_with_its_folders(tmp_path: Path) -> None:
    """Each class folder may have a file of that name."""
    file = tmp_path / "train" / "cat" / "img 0.jpg"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"broken")
    shape = {"model": "vit-nano", "image_size": 8}
    for dataset, named in ((tmp_path, "train/cat/img 0.jpg"), ("elsewhere", "cat/img 0.jpg")):
        resizer = _resizer(Settings(script="vit", dataset=str(dataset), **shape))
        with pytest.raises(UserError, match=f"^image {named} cannot be read"):
            resizer({"bytes": None, "path": str(file)})
    with pytest.raises(UserError, match=r"^image without a name cannot be read"):
        resizer({"bytes": b"broken", "path": None})


def test_an_image_too_large_to_be_one_is_named(
    resizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4)
    image = stored(Image.new("RGB", (8, 8)), "PNG")
    with pytest.raises(UserError, match=r"cannot be read: Image size \(64 pixels\) exceeds limit"):
        resizer(image)


def test_pixels_of_other_libraries_are_prepared_again(
    resizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = resizer.recipe
    monkeypatch.setattr(images, "version_of", lambda name: "0.1" if name == "pillow" else None)
    assert resizer.recipe != before and before["versions"]["pillow"]


@pytest.mark.parametrize(("kind", "refused"), [("ViT", True), ("ResNet", False)])
def test_a_model_of_images_of_another_size_is_refused(
    tmp_path: Path, kind: str, refused: bool
) -> None:
    np.save(tmp_path / "pixels.npy", np.zeros((2, 3, 24, 24), np.uint8))
    batches = ImageBatches(tmp_path, np.array([0, 1]))
    small = {"ViT": {"image_size": 32, "patch_size": 8, "hidden_size": 8, "num_hidden_layers": 1,
                     "num_attention_heads": 2, "intermediate_size": 8},
             "ResNet": {"embedding_size": 8, "hidden_sizes": [8], "depths": [1]}}[kind]  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**small)
    model = getattr(transformers, f"{kind}ForImageClassification")(config)
    if not refused:  # it reads images of any size
        batches.check_model("mine", model)
        batches.check_model("mine", torch.nn.Linear(2, 2))  # its own words tell
        return
    with pytest.raises(
        UserError, match=r"^--model mine does not read .* \(3 x 24 x 24\): Input im"
    ):
        batches.check_model("mine", model)


class Looks(torch.nn.Module):
    """At content, which tensors on meta do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        if pixel_values.shape[-1] > 20:
            raise ValueError("only small ones")
        return self.weight * pixel_values.sum().item()


@pytest.mark.parametrize("side", [8, 24])
def test_a_model_that_looks_at_content_gets_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: int
) -> None:
    np.save(tmp_path / "pixels.npy", np.zeros((2, 3, side, side), np.uint8))
    monkeypatch.setattr(Looks, "__module__", "transformers.models.looks")
    batches = ImageBatches(tmp_path, np.array([0, 1]))
    if side == 8:
        batches.check_model("mine", Looks())
        return
    with pytest.raises(UserError, match=r"\(3 x 24 x 24\): only small ones: make its config"):
        batches.check_model("mine", Looks())


def test_training_on_the_cpu_asks_no_gpu_for_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (7, 9))
    assert images._free_bytes(Settings(script="vit")) == 7
    assert images._free_bytes(Settings(script="vit", trainer=(("use_cpu", True),))) == 0
