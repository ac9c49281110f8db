"""DiLoCo's outer steps, in fragments and with overlap, against a calculation by hand."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from transformers import TrainerCallback

from harness.train.strategy import verify
from harness.train.strategy.compress import DdpExchange
from tests.support import toys
from tests.support.ranks import ranks
from tests.support.replicas import (
    BATCH,
    BY_RANK,
    SGD,
    TWO_EPOCHS,
    UPDATES,
    arms,
    follows,
    one_weight,
)

pytestmark = pytest.mark.process

AVERAGED = [*SGD, "--strategy", "diloco", "--outer_lr", "1", "--outer_momentum", "0"]
DILOCO = [*SGD, "--strategy", "diloco", "--outer_lr", "0.7", "--outer_momentum", "0.9"]
OUTER = {"outer_lr": 0.7, "momentum": 0.9}


def test_one_weight_follows_the_closed_form_of_the_outer_loop(tmp_path: Path) -> None:
    results = ranks(2, one_weight, str(tmp_path), [*DILOCO, "--sync_every", "2", *BY_RANK])
    delta = 0.1 * 2 * 2  # of two steps with gradients 1 and 3
    outer = 0.0
    for round_ in range(1, 6):
        buffer = delta * (1 - 0.9**round_) / (1 - 0.9)
        for rank, seen in enumerate(results):
            alone = outer - 0.1 * (1 + 2 * rank)  # the first of the two updates of a round
            assert seen[2 * round_ - 2] == pytest.approx(alone, abs=1e-5)
        outer -= 0.7 * (delta + 0.9 * buffer)
        assert results[0][2 * round_ - 1] == results[1][2 * round_ - 1]
        assert results[0][2 * round_ - 1] == pytest.approx(outer, abs=1e-5)
    # The same, worked out once and written down: after every exchange.
    stored = [-0.532, -1.2908, -2.25372, -3.400348, -4.7123132]
    assert results[0][1::2] == pytest.approx(stored, abs=1e-5)


def test_after_a_start_together_the_outer_loop_begins(tmp_path: Path) -> None:
    more = ["--sync_every", "6", "--fragments", "3", "--overlap", "1", *TWO_EPOCHS, *BY_RANK]
    argv = [*DILOCO, *more, "--sync_first", "7"]
    results = [arm for (arm,) in ranks(2, arms, str(tmp_path), [argv])]
    follows(results, each=1, every=6, fragments=3, overlap=1, first=7, **OUTER)


def test_one_weight_with_overlap_counts_every_inner_step_once(tmp_path: Path) -> None:
    more = ["--sync_every", "4", "--overlap", "2", *BY_RANK]
    results = ranks(2, one_weight, str(tmp_path), [*AVERAGED, *more])
    for rank, seen in enumerate(results):
        own = 1 + 2 * rank
        # Sent after 4 and 8, in force after 6 and 10; the last update averages what is left.
        steps = [own, 2 * own, 3 * own, 4 * own, 5 * own, 8 + 2 * own, 8 + 3 * own, 8 + 4 * own]
        steps += [8 + 5 * own, 20]
        assert seen == pytest.approx([-0.1 * s for s in steps], abs=1e-6)


# Flags, and what they mean to the calculation.
WAYS: dict[str, tuple[list[str], dict[str, int]]] = {
    "plain": (["--sync_every", "6"], {"every": 6}),
    "in fragments": (
        ["--sync_every", "6", "--fragments", "3"], {"every": 6, "fragments": 3}
    ),
    "overlapped": (["--sync_every", "6", "--overlap", "4"], {"every": 6, "overlap": 4}),
    "several on their way": (
        ["--sync_every", "6", "--fragments", "3", "--overlap", "5"],
        {"every": 6, "fragments": 3, "overlap": 5},
    ),
}  # fmt: skip
ROUGH = [
    [*DILOCO, *WAYS[way][0], "--compress", code, *TWO_EPOCHS]
    for way, code in (("plain", "bf16"), ("plain", "int8"), ("several on their way", "int8"))
]


@pytest.mark.parametrize(("count", "per_node"), [(2, 1), (4, 2)])
def test_every_way_weighs_what_was_calculated(count: int, per_node: int, tmp_path: Path) -> None:
    commands = [[*DILOCO, *flags, *TWO_EPOCHS] for flags, _ in WAYS.values()]
    commands += ROUGH if per_node == 1 else ROUGH[2:]
    if per_node == 1:
        results = ranks(count, arms, str(tmp_path), [[*argv, *BY_RANK] for argv in commands])
    else:
        results = ranks(count, arms, str(tmp_path), commands, env={"LOCAL_WORLD_SIZE": "2"})
    exchanges: dict[str, Any] = {}
    for number, (way, (_, means)) in enumerate(WAYS.items()):
        arm = [rank[number] for rank in results]
        follows(arm, per_node, tolerance=5e-6, **OUTER, **means)
        exchanges[way] = arm[0]["observed"]["exchanges"]
    for update in (6, 12, 18, 20):  # where nothing is on its way, all are alike to the last bit
        rows = [rank[0]["weights"][update - 1].tobytes() for rank in results]
        assert rows == rows[:1] * count
    # 20 updates: whole rows after 6, 12, 18 and 20; or a third after 2, 4, ..., and the rest.
    assert list(exchanges.values()) == [4, 12, 4, 12]
    for number, argv in enumerate(commands[len(WAYS) :], len(WAYS)):
        arm = [rank[number] for rank in results]
        means = WAYS["several on their way" if "--overlap" in argv else "plain"][1]
        follows(arm, per_node, tolerance=0.01, **OUTER, **means)
    whole = results[0][0]["weights"][0].size * 4
    inside = UPDATES * whole if per_node == 2 else 0
    for number in range(len(WAYS)):  # each fragment counts as the part that it is
        assert results[0][number]["bytes"] == inside + 4 * whole


def test_at_every_h_updates_it_hands_over_one_hth_of_the_bytes_of_ddp(tmp_path: Path) -> None:
    commands = [[*DILOCO, "--sync_every", str(every), *BY_RANK] for every in (1, 5, 10)]
    results = ranks(2, counted, str(tmp_path), [SGD, *commands])
    for ddp, *others in results:
        assert [ddp / other for other in others] == [1, 5, 10]


def counted(folder: str, commands: list[list[str]]) -> list[int]:
    """What DDP hands over, by its own hook's count, and what diloco says and hands over."""
    handed = [0]

    def attach(self: Any, model: Any, optimizer: Any) -> None:
        def hook(state, bucket):  # type: ignore[no-untyped-def]
            handed[0] += bucket.buffer().nbytes
            return allreduce_hook(None, bucket)

        model.register_comm_hook(None, hook)

    # It would refuse to record a hook that nobody has asked for.
    verify.observe_hook = lambda *_: {}  # type: ignore[assignment]
    DdpExchange.attach = attach  # type: ignore[method-assign]
    arms(folder, commands[:1])
    results = [handed[0]]
    whole = dist.all_reduce

    def counting(tensor: torch.Tensor, *more: Any, group: Any = None, **others: Any) -> Any:
        handed[0] += tensor.nbytes if group is not None else 0
        return whole(tensor, *more, group=group, **others)

    dist.all_reduce = counting
    for argv in commands[1:]:
        handed[0] = 0
        (arm,) = arms(folder, [argv])
        assert arm["bytes"] == handed[0]
        results.append(handed[0])
    return results


class Waits(TrainerCallback):
    """Rank 1 makes its eighth update only when rank 0 has made its tenth."""

    def __init__(self, sign: Path) -> None:
        self.sign, self.came = sign, False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.process_index == 1 and state.global_step == 7:
            until = time.monotonic() + 60
            while not self.sign.exists() and time.monotonic() < until:
                time.sleep(0.01)
            self.came = self.sign.exists()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.process_index == 0 and state.global_step == 10:
            self.sign.touch()


def ahead(folder: str, ways: list[list[str]]) -> list[bool]:
    results = []
    for number, argv in enumerate(ways):
        waits = Waits(Path(folder, f"sign-{number}"))
        data, test = toys.Points(BATCH * UPDATES * 2), toys.Points(9, 1)
        toys.trained(folder, toys.Net(), data, test, *argv, callbacks=[waits])
        results.append(waits.came)
    return results


def test_with_overlap_nobody_waits_for_what_is_on_its_way(tmp_path: Path) -> None:
    """What is sent after update 8 is awaited after update 11, and not before."""
    streamed = [*DILOCO, "--sync_every", "4", "--overlap", "3", *BY_RANK]
    _, second = ranks(2, ahead, str(tmp_path), [streamed, [*streamed, "--compress", "int8"]])
    assert second == [True, True]
