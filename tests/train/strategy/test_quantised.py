"""A mean over ranks in bf16 and int8: one result for all, near the true one, of known size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from harness.train.strategy import compress
from tests.support.ranks import ranks

pytestmark = pytest.mark.process


def rows_of(count: int, size: int) -> torch.Tensor:
    """Each rank's numbers: of very unequal size from block to block, with a block of zeros."""
    generator = torch.Generator().manual_seed(size)
    rows = torch.randn(count, size, generator=generator)
    rows *= 10.0 ** (torch.arange(size) // 1024 % 7 - 3)
    rows[:, 1024:2048] = 0
    return rows


def means(size: int, code: str, spoilt: float) -> tuple[np.ndarray, int, dict[str, int]]:
    """The mean as this rank sees it, its bytes, and those handed to the collectives."""
    dist.init_process_group("gloo")
    row = rows_of(dist.get_world_size(), size)[dist.get_rank()].clone()
    if spoilt and dist.get_rank() == 1:
        row[5000] = spoilt
    handed: dict[str, int] = {}
    for name in ("all_to_all_single", "all_gather_single"):

        def counted(output: Any, source: Any, name: str = name, **more: Any) -> Any:
            handed[name] = source.nbytes
            return called[name](output, source, **more)

        called[name] = getattr(dist, name)
        setattr(dist, name, counted)
    compress.quantised_mean(row, compress.CODECS[code])
    sent = compress.coded_bytes(size, dist.get_world_size(), compress.CODECS[code])
    dist.destroy_process_group()
    return row.numpy(), sent, handed


called: dict[str, Any] = {}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("code", ["bf16", "int8"])
def test_the_mean_is_the_same_on_all_ranks_and_within_its_rounding(code: str, count: int) -> None:
    size = 10_000  # neither whole blocks nor whole parts
    results = ranks(count, means, size, code, 0.0)
    rows = rows_of(count, size).double()
    true = rows.mean(0)
    for mean, _, _ in results:
        assert mean.tobytes() == results[0][0].tobytes()
    if code == "bf16":  # rounded twice, each time by half of the last of eight bits
        bound = (rows.abs().mean(0) + true.abs()) * 2**-8 * 1.01
    else:  # rounded twice, each time by half a level of the block's largest number
        padded = torch.nn.functional.pad(rows, (0, -size % 1024)).view(count, -1, 1024)
        largest = padded.abs().amax(2).mean(0) + padded.mean(0).abs().amax(1) * 1.01
        bound = (largest / 254 * 1.01).repeat_interleave(1024)[:size]
    error = (torch.from_numpy(results[0][0]).double() - true).abs()
    assert bool((error <= bound).all())
    assert bool((error[1024:2048] == 0).all()) and float(error.max()) > 0
    # What goes out: a part to each other rank, then one's own part to each of them.
    _, sent, handed = results[0]
    a_number = {"bf16": 2, "int8": 1 + 4 / 1024}[code]
    whole = -(-size // (count * 1024)) * count * 1024
    assert sent == whole * a_number == handed["all_to_all_single"]
    assert handed["all_gather_single"] == sent / count


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("code", ["bf16", "int8"])
def test_what_is_not_finite_stays_so_on_all_ranks(code: str, spoilt: float) -> None:
    for mean, _, _ in ranks(2, means, 10_000, code, spoilt):
        assert not np.isfinite(mean[5000])
        assert np.isfinite(mean[:4096]).all() and np.isfinite(mean[6144:]).all()


def mean_of_an_older_torch(size: int) -> np.ndarray:
    vars(dist).pop("all_gather_single")  # 2.12 has it under its older name
    dist.init_process_group("gloo")
    row = rows_of(dist.get_world_size(), size)[dist.get_rank()].clone()
    compress.quantised_mean(row, compress.CODECS["int8"])
    return row.numpy()


def test_an_older_torch_gives_the_same_mean() -> None:
    (mean, _, _), *_ = ranks(2, means, 10_000, "int8", 0.0)
    assert all((older == mean).all() for older in ranks(2, mean_of_an_older_torch, 10_000))
