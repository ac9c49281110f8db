"""Augmented pixels follow from (seed, epoch, sample), and are what padding and cutting give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from harness.core.command_line import parse
from harness.core.identity import run_id
from harness.core.settings import UserError
from harness.train.data.images import Augment, ImageBatches, Normalise, Pixels, fits, load_images
from tests.support.ranks import ranks
from tests.support.toys import CPU

SIDE, MARGIN = 16, 2


def images(count: int, seed: int = 0) -> torch.Tensor:
    draw = np.random.default_rng(seed)
    return torch.from_numpy(draw.integers(1, 256, (count, 3, SIDE, SIDE), dtype=np.uint8))


def versions(image: torch.Tensor, margin: int) -> dict[tuple[int, int, bool], bytes]:
    """All that can become of an image, one by one: padded, cut out, mirrored."""
    padded = torch.zeros(3, SIDE + 2 * margin, SIDE + 2 * margin, dtype=torch.uint8)
    padded[:, margin : margin + SIDE, margin : margin + SIDE] = image
    result = {}
    for down in range(2 * margin + 1):
        for right in range(2 * margin + 1):
            cut = padded[:, down : down + SIDE, right : right + SIDE]
            result[down, right, False] = cut.numpy().tobytes()
            result[down, right, True] = cut.flip(2).numpy().tobytes()
    return result


@pytest.mark.parametrize(("kind", "margin"), [("flip", 0), ("crop_flip", MARGIN)])
def test_each_version_is_one_of_a_padded_image_and_all_are_drawn_alike(
    kind: str, margin: int
) -> None:
    image, count = images(1), 4000
    made = Augment(kind, seed=3)(image.expand(count, -1, -1, -1), torch.arange(count))
    names = {pixels: name for name, pixels in versions(image[0], margin).items()}
    drawn = [names[one.numpy().tobytes()] for one in made]
    kinds = 2 * (2 * margin + 1) ** 2
    seen = np.unique([str(name) for name in drawn], return_counts=True)[1]
    assert len(seen) == kinds
    # Chi-squared over all versions: its mean is kinds - 1, its variance twice that.
    chi = float(((seen - count / kinds) ** 2).sum() / (count / kinds))
    assert chi < kinds - 1 + 5 * (2 * (kinds - 1)) ** 0.5


def test_a_version_follows_from_seed_epoch_and_sample() -> None:
    one, pixels, samples = Augment("crop_flip", seed=1), images(64), torch.arange(64)
    first = one(pixels, samples)
    order = torch.randperm(64)
    assert torch.equal(one(pixels[order], samples[order]), first[order])  # not from the batch
    assert torch.equal(torch.cat([one(pixels[i::2], samples[i::2]) for i in (0, 1)]),
                       torch.cat([first[0::2], first[1::2]]))  # fmt: skip
    one.set_epoch(1)
    second = one(pixels, samples)
    assert (second != first).flatten(1).any(1).sum() > 50
    one.set_epoch(0)
    assert torch.equal(one(pixels, samples), first)
    assert not torch.equal(Augment("crop_flip", seed=2)(pixels, samples), first)
    # Epoch 1 of seed 1 is not epoch 0 of seed 2, nor are samples of one the next ones of another.
    assert not torch.equal(Augment("crop_flip", seed=2)(pixels, samples), second)


ARGV = ["--tiny", "--train_size", "64", "--test_size", "20", "--augment", "crop_flip"]


class Begun(TrainerCallback):
    def __init__(self, epochs: list[int]) -> None:
        self.epochs = epochs

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.epochs.append(state.epoch)


def fed(folder: str, batch: int, acc: int) -> dict[str, Any]:
    """What the model is given in two epochs: (epoch, sample) -> pixels; and in evaluation."""
    from harness.train.data.cache import in_turn
    from harness.train.data.models import build
    from harness.train.loop.trainer import ExactTrainer
    from harness.train.measure.metrics import BatchMetrics
    from harness.train.run.start import start

    argv = [*ARGV, "--b", str(batch), "--grad_acc", str(acc), "--epochs", "2", "--save", "none"]
    run = start(parse("vit", [*argv, "--eval_batch", "7", "--o", folder]))
    assert run is not None
    with in_turn(run.context.world):
        data = load_images(run.context.settings, run.context.data_parallel_size)
    trained: dict[tuple[int, int], bytes] = {}
    tested: list[bytes] = []
    begun: list[int] = []

    def look(inputs: dict[str, Any]) -> dict[str, Any]:
        numbers = inputs.get("samples")
        values = data.to_device(inputs)
        pixels = [one.numpy().tobytes() for one in values["pixel_values"]]
        if not begun:
            pass  # ddp tries one sample on a copy of the model before it wraps it
        elif numbers is None:
            tested.extend(pixels)
        else:
            assert trainer.model.training
            keys = [(trainer.order.epoch, n) for n in numbers.tolist()]
            trained.update(zip(keys, pixels, strict=True))
        assert set(values) == {"pixel_values", "labels"}
        return values

    look.set_epoch = data.to_device.set_epoch  # type: ignore[attr-defined]
    trainer = ExactTrainer(
        context=run.context, model=build(run.context.settings, data.labels), args=run.context.args,
        train_dataset=data.train,
        eval_dataset=data.test, data_collator=data.collate, to_device=look,
        compute_metrics=BatchMetrics(10),
    )  # fmt: skip
    trainer.add_callback(Begun(begun))
    trainer.train()
    return {"trained": trained, "tested": tested}


@pytest.mark.process
def test_the_same_samples_look_the_same_however_they_are_split(tmp_path: Path) -> None:
    whole: dict[str, Any] = {}
    for count, batch, acc in ((1, 16, 1), (1, 4, 4), (2, 8, 1), (2, 4, 2)):
        on_ranks = ranks(count, fed, str(tmp_path / f"{count}{batch}{acc}"), batch, acc, env=CPU)
        trained = {key: pixels for result in on_ranks for key, pixels in result["trained"].items()}
        assert len(trained) == sum(len(result["trained"]) for result in on_ranks) == 2 * 64
        whole = whole or trained
        assert trained == whole
        plain = load_images(parse("vit", [*ARGV[:-2], "--b", "16"]), 1)
        test: Any = plain.test
        as_they_are = plain.to_device(plain.collate(test.__getitems__(list(range(20)))))
        reference = {one.numpy().tobytes() for one in as_they_are["pixel_values"]}
        assert {pixels for result in on_ranks for pixels in result["tested"]} == reference
    assert sum(whole[0, n] != whole[1, n] for n in range(64)) > 40


def test_images_that_lie_on_the_device_are_those_of_the_host(tmp_path: Path) -> None:
    """Gathered by place, here on the CPU; no GPU is needed to see that they are the same."""
    pixels, labels = images(32).numpy(), np.arange(32)
    np.save(tmp_path / "pixels.npy", pixels)
    normalise, samples = Normalise([0.5] * 3, [0.5] * 3), np.array([3, 30, 3, 0])
    host = ImageBatches(tmp_path, labels, numbered=20)
    there = ImageBatches(tmp_path, labels, numbered=20)
    there.bare = True
    assert "pixel_values" not in there(samples)
    for kind in ("none", "crop_flip"):
        augment = Augment(kind, 1) if kind != "none" else None
        if augment is None:
            host.numbered = there.numbered = 0
        values = Pixels(normalise, None, augment)(host(samples))
        same = Pixels(normalise, pixels, augment)(there(samples))
        assert values.keys() == same.keys() == {"pixel_values", "labels"}
        assert torch.equal(values["pixel_values"], same["pixel_values"])
        host.numbered = there.numbered = 20


def test_images_take_a_quarter_of_the_free_memory_at_most() -> None:
    assert fits(25, 100) and not fits(26, 100)
    assert not fits(1, 0)  # no GPU


def test_pixels_are_mapped_and_not_read(tmp_path: Path) -> None:
    """Ranks and runs share them: no rank has a copy of its own."""
    np.save(tmp_path / "pixels.npy", images(8).numpy())
    batches = ImageBatches(tmp_path, np.arange(8))
    assert isinstance(batches.pixels, np.memmap)


def test_a_run_without_augmentation_keeps_its_name() -> None:
    plain = parse("vit", ["--tiny"])
    assert run_id(parse("vit", ["--tiny", "--augment", "none"])) == run_id(plain)
    names = {run_id(parse("vit", ["--tiny", "--augment", k])) for k in ("flip", "crop_flip")}
    assert len(names | {run_id(plain)}) == 3
    with pytest.raises(UserError, match="augment"):
        parse("bert", ["--tiny", "--augment", "flip"])
