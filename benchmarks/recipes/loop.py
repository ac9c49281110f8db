"""A training loop written by hand, on batches that are ready in memory: the limit.

No workers, no checkpoints, no records, no callbacks. With batches "own" these are the batches of
the other arms, each padded to its own longest text; with "ideal" texts of equal length are put
together, so that next to nothing is padded: as many updates on the same samples, but another
training. On several processes it is torch's DDP as it comes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoImageProcessor, AutoTokenizer, get_linear_schedule_with_warmup

from benchmarks.recipes.clock import EpochClock
from benchmarks.recipes.task import TEXT, Task, cuda, labels_of, main, quality, quality_row, world
from harness.train.data.samples import EpochOrder

EVAL_BATCH = 64
LONGEST = 500
Batch = dict[str, torch.Tensor]
Make = Callable[[np.ndarray], Batch]  # numbers of samples -> a batch on the device


def run(task: Task) -> dict[str, Any]:
    rank, processes = world()
    device = _device()
    if processes > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    began_s = time.perf_counter()
    data = task.load()
    labels = labels_of(data)
    train, lengths = (_texts if task.kind == TEXT else _images)(task, data["train"], device)
    test, test_lengths = (_texts if task.kind == TEXT else _images)(task, data["test"], device)
    plan = [epoch[rank::processes] for epoch in _plan(task, len(data["train"]), lengths, processes)]
    order = np.argsort(test_lengths, kind="stable")
    of_each = -(-len(order) // (EVAL_BATCH * processes))  # batches per process, the same for all
    test_plan = np.array_split(order, of_each * processes)[rank::processes]
    ready = {id(n): train(n) for epoch in plan for n in epoch} if task.kind == TEXT else {}
    prepare_s = time.perf_counter() - began_s

    model = task.build(labels).to(device)
    wrapped = DistributedDataParallel(model) if processes > 1 else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=task.lr, weight_decay=0.0, fused=True
    )  # fmt: skip
    schedule = get_linear_schedule_with_warmup(optimizer, 0, sum(len(epoch) for epoch in plan))
    precise: Any = contextlib.nullcontext()
    if task.precision == "bf16":
        precise = torch.autocast(device.type, dtype=torch.bfloat16)
    clock = EpochClock()
    clock.fed.begin(model)
    found = []
    for epoch in plan:
        clock.note("on_epoch_begin")
        wrapped.train()
        for numbers in epoch:
            with precise:
                loss = wrapped(**(ready.get(id(numbers)) or train(numbers))).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            clock.note("on_step_end")
        clock.fed.end()
        clock.note("on_epoch_end")
        found.append(_evaluate(model, precise, (test(numbers) for numbers in test_plan)))
        clock.note("on_evaluate")
    if processes > 1:
        # Delete DDP before the group: as its last owner it would wait, holding Python's lock,
        # for a thread of gloo that needs the lock to release its last tensors.
        del wrapped
        dist.destroy_process_group()
    return {"prepare_s": prepare_s, "quality": found, **clock.result()}


def _device() -> torch.device:
    if not cuda():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cuda", torch.cuda.current_device())


def _plan(task: Task, size: int, lengths: np.ndarray, processes: int) -> list[list[np.ndarray]]:
    """For each epoch its batches; `processes` consecutive ones make an update."""
    orders = EpochOrder(size, task.seed)
    plan = []
    for number in range(task.epochs):
        orders.set_epoch(number)
        order = np.array(list(orders))
        if task.batches == "ideal":
            updates = np.argsort(lengths, kind="stable").reshape(-1, task.batch * processes)
            shuffled = np.random.default_rng([task.seed, number]).permutation(len(updates))
            order = updates[shuffled].ravel()
        plan.append(list(order.reshape(-1, task.batch)))
    return plan


def _texts(task: Task, data: Any, device: torch.device) -> tuple[Make, np.ndarray]:
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    ids = tokenizer(list(data["text"]), truncation=True, max_length=LONGEST)["input_ids"]
    lengths = np.array([len(text) for text in ids])
    labels = torch.tensor(list(data["label"]))

    def make(numbers: np.ndarray) -> Batch:
        longest = lengths[numbers].max()
        padded = torch.full((len(numbers), longest), tokenizer.pad_token_id)
        for row, number in enumerate(numbers):
            padded[row, : lengths[number]] = torch.tensor(ids[number])
        batch = {"input_ids": padded, "labels": labels[torch.from_numpy(numbers)]}
        if (lengths[numbers] < longest).any():  # only padding needs a mask
            batch["attention_mask"] = (padded != tokenizer.pad_token_id).long()
        return {name: value.to(device) for name, value in batch.items()}

    return make, lengths


def _images(task: Task, data: Any, device: torch.device) -> tuple[Make, np.ndarray]:
    """All pictures, decoded and resized: as bytes on a GPU, else ready for the model."""
    processor = AutoImageProcessor.from_pretrained(task.model)
    resized = [
        torch.as_tensor(np.asarray(processor(
            row["image"].convert("RGB"), do_rescale=False, do_normalize=False
        )["pixel_values"][0])).round().to(torch.uint8)
        for row in data
    ]  # fmt: skip
    pixels = torch.stack(resized).to(device)
    mean = 255 * torch.tensor(processor.image_mean, device=device)[:, None, None]
    deviation = 255 * torch.tensor(processor.image_std, device=device)[:, None, None]
    labels = torch.tensor(list(data["label"]), device=device)

    def normalised(some: torch.Tensor) -> torch.Tensor:
        return some.float().sub_(mean).div_(deviation)

    if device.type == "cpu":
        pixels = normalised(pixels)

    def make(numbers: np.ndarray) -> Batch:
        chosen = torch.from_numpy(numbers).to(device)
        some = pixels[chosen]
        ready = some if some.is_floating_point() else normalised(some)
        return {"pixel_values": ready, "labels": labels[chosen]}

    return make, np.zeros(len(data), dtype=int)


@torch.no_grad()
def _evaluate(model: Any, precise: Any, batches: Iterable[Batch]) -> dict[str, float]:
    """Evaluate a part of the test set in each process; return the metrics of the whole set."""
    model.eval()
    logits, labels = [], []
    for batch in batches:
        with precise:
            logits.append(model(**{k: v for k, v in batch.items() if k != "labels"}).logits.float())
        labels.append(batch["labels"])
    own = (torch.cat(logits).cpu(), torch.cat(labels).cpu())
    parts = [own]
    if dist.is_initialized():
        parts = [own] * dist.get_world_size()
        dist.all_gather_object(parts, own)
    scores, true = (torch.cat(column) for column in zip(*parts, strict=True))
    loss = torch.nn.functional.cross_entropy(scores, true).item()
    return quality_row({"loss": loss, **quality(scores.numpy(), true.numpy())})


if __name__ == "__main__":
    main(run)
