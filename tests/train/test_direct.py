"""Messages between ranks over gloo: whole, in order, and none taken for another."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.train import session
from harness.train.direct import BLOCK, LENGTH, Messages
from tests.support.ranks import ranks

pytestmark = pytest.mark.process

SIZES = (0, 1, BLOCK - LENGTH - 1, BLOCK - LENGTH, BLOCK - LENGTH + 1, 3 * BLOCK, 10**6)


def say(rank: int, size: int) -> bytes:
    return bytes([rank + 1]) * (size + rank)


def messages_of_all_sizes() -> bool:
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    messages = Messages(dist.group.WORLD)
    for size in SIZES:
        assert messages.exchange(say(rank, size)) == [say(of, size) for of in range(count)]
    # One rank has much to say, the others nothing; and collectives pass between.
    assert messages.exchange(b"x" * 10_000 * rank)[1] == b"x" * 10_000
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [count] * 3
    for shape in ((2, 3), (0, 3), (), (BLOCK, 5)):  # a message, nothing, a message, and more
        for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.bool):
            own = torch.full(shape, rank).to(dtype)
            for of, row in enumerate(messages.rows(own)):
                expected = torch.full(shape, of).to(dtype)
                assert row.dtype == dtype and row.shape == own.shape and row.equal(expected)
    dist.destroy_process_group()
    return True


def test_messages_are_whole_and_in_the_order_of_ranks() -> None:
    assert ranks(3, messages_of_all_sizes) == [True] * 3


def values_of_a_late_rank() -> list[Any]:
    """Rank 0 is late at every other message."""
    seen = []
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for n in range(20):
        if rank == 0 and n % 2:
            time.sleep(0.01)
        seen.append(session.gather([rank, n, 0.1 + n]))
    session.barrier()
    dist.destroy_process_group()
    return seen


def test_a_late_rank_is_waited_for() -> None:
    expected = [[[rank, n, 0.1 + n] for rank in range(2)] for n in range(20)]
    assert ranks(2, values_of_a_late_rank) == [expected] * 2


def test_what_json_does_not_hold_is_refused() -> None:
    assert ranks(2, sends_an_object) == [True] * 2


def sends_an_object() -> bool:
    dist.init_process_group("gloo")
    with pytest.raises(TypeError, match="not JSON serializable"):
        session.gather(object())
    dist.destroy_process_group()
    return True
