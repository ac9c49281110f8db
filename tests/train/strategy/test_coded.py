"""Coded means: one result for all ranks, near the true one, and nothing lost in the long run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from harness.core.command_line import parse
from harness.core.records import COMPLETE
from harness.core.settings import UserError
from harness.train.manifest import write_manifest
from harness.train.strategy.coded import CODECS, Coded, coded_bytes
from harness.train.strategy.compress import _mean_state, memory_file
from harness.train.strategy.direct_allreduce import coded_mean
from tests.support import toys
from tests.support.broken_runs import assert_same_training, broken_off, only_run
from tests.support.exchanges import Arm, drawn, exact, flat, group
from tests.support.manifests import facts_of
from tests.support.ranks import ranks, script
from tests.support.replicas import BY_RANK, SGD, arms, run_arm
from tests.support.settings import launched

SIZE = 10_000  # neither whole blocks nor whole parts
A_NUMBER = {"bf16": 2, "int8": 1 + 4 / 1024, "int4": 1 / 2 + 4 / 256}


def rows_of(count: int, size: int, draw: int = 0) -> torch.Tensor:
    """Each rank's numbers: of very unequal size from block to block, with a block of zeros."""
    generator = torch.Generator().manual_seed(size + draw)
    rows = torch.randn(count, size, generator=generator)
    rows *= 10.0 ** (torch.arange(size) // 1024 % 7 - 3)
    rows[:, 1024:2048] = 0
    return rows


def handed_over() -> list[int]:
    """[bytes], counted up from now on: handed to gloo as messages to others, or in collectives as
    what of them leaves this rank.
    """
    seen = [0]
    world, names = dist.get_world_size(), ("all_to_all_single", "all_gather_single", "isend")
    called = {name: getattr(dist, name) for name in names}

    def exchanged(output: Any, source: torch.Tensor, **more: Any) -> Any:
        seen[0] += source.nbytes * (world - 1) // world
        return called["all_to_all_single"](output, source, **more)

    def gathered(output: Any, source: torch.Tensor, **more: Any) -> Any:
        seen[0] += source.nbytes * (world - 1)
        return called["all_gather_single"](output, source, **more)

    def sent(tensor: torch.Tensor, **more: Any) -> Any:
        seen[0] += tensor.nbytes
        return called["isend"](tensor, **more)

    for name, counted in zip(names, (exchanged, gathered, sent), strict=True):
        setattr(dist, name, counted)
    return seen


WAYS = ("backend", "direct", "all_to_all")
CASES = [(code, way) for code in CODECS for way in WAYS]


def all_means(rounds: int, spoilt: float = 0.0) -> dict[tuple[str, str], dict[str, Any]]:
    rank, seen = group(), handed_over()
    return {case: means(*case, rank, seen, rounds, spoilt) for case in CASES}


def means(
    code: str, way: str, rank: int, seen: list[int], rounds: int, spoilt: float
) -> dict[str, Any]:
    """The means as this rank sees them, what it owes then, and the bytes."""
    seen[0], form = 0, Coded(CODECS[code])
    mean, results = coded_mean(form, way, dist.new_group()), []
    for round_ in range(rounds):
        row = rows_of(dist.get_world_size(), SIZE, round_)[rank].clone()
        if spoilt and rank == 1:
            row[5000] = spoilt
        mean.begin(row, again=round_ < rounds - 1)()
        results.append(row.numpy())
    owed = {name: value.numpy() for name, value in form.state_dict().items()}
    return {"means": np.stack(results), "owed": owed, "seen": seen[0], "sent": form.take_sent()}


def within_rounding(results: list[dict[str, Any]], code: str) -> None:
    """The same on all ranks."""
    count = len(results)
    rows = rows_of(count, SIZE).double()
    true, block = rows.mean(0), CODECS[code].block
    if code == "bf16":  # rounded twice, each time by half of the last of eight bits
        bound = (rows.abs().mean(0) + true.abs()) * 2**-8 * 1.01
    else:  # rounded twice, each time by half a level of the block's largest number
        padded = torch.nn.functional.pad(rows, (0, -SIZE % block)).view(count, -1, block)
        largest = padded.abs().amax(2).mean(0) + padded.mean(0).abs().amax(1) * 1.1
        bound = (largest / (254 if code == "int8" else 14) * 1.02).repeat_interleave(block)[:SIZE]
    for rank in results:
        assert rank["means"].tobytes() == results[0]["means"].tobytes()
    error = (torch.from_numpy(results[0]["means"][0]).double() - true).abs()
    assert bool((error <= bound).all())
    assert bool((error[1024:2048] == 0).all()) and float(error.max()) > 0


def nothing_is_lost(results: list[dict[str, Any]]) -> None:
    """What was given and what is owed are all that there was."""
    count, rounds = len(results), len(results[0]["means"])
    true = sum(rows_of(count, SIZE, r).double().mean(0) for r in range(rounds)).numpy()  # type: ignore[union-attr]
    given = results[0]["means"].astype(np.float64).sum(0)
    owed = sum(rank["owed"]["owed 0"].astype(np.float64) for rank in results)[:SIZE] / count
    if "sum 0" in results[0]["owed"]:
        owed += np.concatenate([rank["owed"]["sum 0"] for rank in results])[:SIZE]
    unit = 10.0 ** (np.arange(SIZE) // 1024 % 7 - 3)  # of each block
    assert (np.abs(given + owed - true) <= 1e-5 * unit).all()
    assert (np.abs(given - true) / unit).max() > 1e-3  # something is owed


def as_many_bytes_as_in_theory(results: list[dict[str, Any]], code: str, way: str) -> None:
    """2(n-1)/n of the row leave a rank, in codes; all of it for each other one by all_to_all."""
    count, rounds = len(results), len(results[0]["means"])
    for rank in results:
        whole_rows = way == "all_to_all" or (count == 2 and way == "direct")
        whole = coded_bytes(SIZE, 1 if whole_rows else count, CODECS[code])
        assert whole == pytest.approx(SIZE * A_NUMBER[code], rel=0.25)
        assert rank["sent"] == rounds * whole
        times = count - 1 if whole_rows else 2 * (count - 1) / count
        assert rank["seen"] == rounds * times * whole


@pytest.mark.process
@pytest.mark.parametrize("count", [2, 3])
def test_a_mean_is_that_of_all_and_what_it_misses_is_owed(count: int) -> None:
    everyone = ranks(count, all_means, 6)
    for code, way in CASES:
        results = [rank[code, way] for rank in everyone]
        within_rounding(results, code)
        nothing_is_lost(results)
        as_many_bytes_as_in_theory(results, code, way)
    for code in CODECS:
        theirs, ours, whole = (everyone[0][code, way] for way in WAYS)
        if count > 2:  # each rank adds a part; two send each other everything, and no sum
            assert ours["means"].tobytes() == theirs["means"].tobytes()
        else:
            assert ours["means"].tobytes() == whole["means"].tobytes()
        assert ("sum 0" in ours["owed"]) == (count > 2) and "sum 0" in theirs["owed"]
        assert "sum 0" not in whole["owed"]


@pytest.mark.process
@pytest.mark.parametrize("spoilt", [float("nan"), -float("inf")])
def test_what_is_not_finite_stays_so_on_all_ranks(spoilt: float) -> None:
    everyone = ranks(2, all_means, 1, spoilt)
    for rank in (rank[case] for rank in everyone for case in CASES):
        (mean,) = rank["means"]
        assert not np.isfinite(mean[5000])
        assert np.isfinite(mean[:4096]).all() and np.isfinite(mean[6144:]).all()


def mean_of_an_older_torch() -> np.ndarray:
    vars(dist).pop("all_gather_single")  # 2.12 has it under its older name
    row = rows_of(2, SIZE)[group()].clone()
    coded_mean(Coded(CODECS["int8"]), "backend", dist.new_group()).begin(row)()
    return row.numpy()


@pytest.mark.process
def test_an_older_torch_gives_the_same_mean() -> None:
    newer = ranks(2, all_means, 1)[0]["int8", "backend"]["means"][0]
    assert all((older == newer).all() for older in ranks(2, mean_of_an_older_torch))


# ---- of gradients, with --strategy ddp ----


def gradients_in_other_buckets(folder: str, compress: str, way: str) -> list[bool]:
    """Eight updates in one bucket, and in several by processes that follow each other."""
    rank, updates = group(), 8
    whole, first = Arm(compress, exchange=way), Arm(compress, exchange=way, small=True)
    expected = [flat(whole.step(drawn(step, rank))) for step in range(updates)]
    came = [flat(first.step(drawn(step, rank))) for step in range(4)]
    first.exchange.save(Path(folder))
    second = Arm(compress, exchange=way, small=True)
    dist.barrier()
    second.exchange.load(Path(folder))
    with second.exchange.rehearsed():  # leaves no trace
        second.step(drawn(99, rank))
    came += [flat(second.step(drawn(step, rank))) for step in range(4, updates)]
    same = [np.array_equal(one, other) for one, other in zip(came, expected, strict=True)]
    true = sum(flat(exact(step)) for step in range(updates))
    coarse = np.abs(sum(expected) - true).max()
    alone = max(np.abs(one - flat(exact(step))).max() for step, one in enumerate(expected))
    # Each update misses something, and the misses do not add up.
    return [*same, bool(0 < coarse < 3 * alone)]


@pytest.mark.process
@pytest.mark.parametrize(("count", "way"), [(2, "direct"), (3, "backend")])
@pytest.mark.parametrize("compress", ["int8", "int4"])
def test_gradients_do_not_depend_on_buckets_and_what_is_owed_outlives_a_process(
    compress: str, count: int, way: str, tmp_path: Path
) -> None:
    for rank in ranks(count, gradients_in_other_buckets, str(tmp_path), compress, way):
        assert rank == [True] * 9
    assert {p.name for p in tmp_path.iterdir()} == {memory_file(compress, r) for r in range(count)}


def test_what_is_owed_stays_when_processes_come_or_go(tmp_path: Path) -> None:
    """As of rows, so of sums, of which each rank has its own part."""
    write_manifest(tmp_path / COMPLETE, facts_of(processes=2))
    rows, sums = torch.randn(2, 512), torch.randn(2, 256)
    for rank in range(2):
        content = {"owed 0": rows[rank], "sum 0": sums[rank]}
        save_file(content, tmp_path / memory_file("int8", rank))
    expected = rows.mean(0) + sums.flatten()
    assert torch.allclose(_mean_state(tmp_path, "int8")["owed 0"], expected)
    (tmp_path / memory_file("int8", 1)).unlink()  # lost with its disk
    expected = rows[0] / 2 + torch.cat([sums[0], torch.zeros(256)])
    results = _mean_state(tmp_path, "int8")
    assert list(results) == ["owed 0"] and torch.allclose(results["owed 0"], expected)
    # Other processes fill rows up to another length.
    form = Coded(CODECS["int4"])
    form.load_state_dict({"owed 0": results["owed 0"]})
    row = torch.zeros(300)
    coded, _ = form.encode(row, 0, 3)
    given = form.decode(coded).view(-1) + form.owed["owed 0"]
    assert torch.allclose(given[:512], expected) and not given[512:].any()


def unlike_a_single_process() -> np.ndarray:
    rank = group()
    arm = Arm("int4")
    came, true = flat(arm.step(drawn(0, rank))), flat(exact(0))
    assert arm.exchange.payload_bytes == 0
    return came - true


@pytest.mark.process
def test_a_process_alone_codes_nothing() -> None:
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    (difference,) = ranks(1, unlike_a_single_process, env=env)
    assert not difference.any()


# ---- of runs ----


@pytest.mark.process
@pytest.mark.parametrize(
    "flags", [["--compress", "int4"], ["--compress", "int8", "--exchange", "direct"]]
)
def test_a_killed_run_goes_on_to_the_bit(flags: list[str], tmp_path: Path) -> None:
    argv = ["--tiny", "--train_size", "128", "--test_size", "65", "--epochs", "2", "--b", "16"]
    argv += ["--full_determinism", "--save_steps", "5", *flags]
    broken_off(2, [*argv, "--o", str(tmp_path / "broken")], 6, "kill", "vit")
    for out, said in (("broken", "resumes from update 5"), ("whole", "")):
        done = script("vit", *argv, "--o", str(tmp_path / out), count=2)
        assert done.code == 0 and said in done.out, done.err
    assert_same_training(only_run(tmp_path / "broken"), only_run(tmp_path / "whole"))


@pytest.mark.process
def test_replicas_lose_nothing_of_what_they_changed(tmp_path: Path) -> None:
    """local_sgd sends changes: the weights are those of whole rows, up to what is still owed."""
    local = [*SGD, "--strategy", "local_sgd", "--sync_every", "2", *BY_RANK]
    commands = [local, *([*local, f"--compress={code}"] for code in ("bf16", "int8", "int4"))]
    commands += [[*local, "--compress=int8", "--exchange=direct"]]
    plain, *coded = ranks(2, arms, str(tmp_path), commands)[0]
    apart = [toys.apart(arm["weights"][-1], plain["weights"][-1]) for arm in coded]
    moved = toys.apart(plain["weights"][-1], plain["weights"][0])
    assert all(far > 0 for far in apart)
    assert apart[0] < 0.02 * moved  # bf16 keeps eight bits of each number
    assert apart[1] < 0.01 * moved and apart[2] < 0.1 * moved and apart[3] < 0.01 * moved


def kept(folder: str, commands: list[list[str]]) -> list[list[int]]:
    """Of each arm: bytes that its record says are kept, those owed, and those of its weights."""
    sizes = []
    for argv in commands:
        trainer, _, _ = run_arm(folder, argv)
        exchange = trainer.exchange
        owed = sum(value.nbytes for value in exchange.coded.owed.values())
        sizes.append([exchange.observed["kept_bytes"], owed, exchange.anchor.nbytes])
    return sizes


@pytest.mark.process
def test_error_feedback_counts_as_kept_memory(tmp_path: Path) -> None:
    """Of three ranks, which fill their rows up to whole blocks of each; of all_to_all no sums."""
    outer = ["--strategy", "diloco", "--sync_every", "2", "--fragments", "2", "--compress", "int4"]
    commands = [
        [*SGD, *flags, "--exchange", way, *BY_RANK]
        for way in WAYS
        for flags in (["--strategy", "local_sgd", "--sync_every", "2", "--compress", "int8"], outer)
    ]
    for rank in ranks(3, kept, str(tmp_path), commands):
        for argv, (said, owed, weights) in zip(commands, rank, strict=True):
            # The anchor and a row; of diloco its momentum and two rows of half of the weights.
            beside = 3 * weights if "diloco" in argv else 2 * weights
            assert said == pytest.approx(beside + owed, abs=8) and owed >= weights, argv


def test_scaled_gradients_owe_in_another_scale() -> None:
    for code in ("int8", "int4"):
        with pytest.raises(UserError, match=f"--compress {code} does not go with --precision fp16"):
            parse("bert", ["--compress", code, "--precision", "fp16"], launched(1, 2))
        argv = ["--strategy", "diloco", "--compress", code, "--precision", "fp16"]
        parse("bert", argv, launched(1, 2))  # weights have no scale
    for code in ("bf16", "int8", "int4"):  # of gradients made together, bf16 owes as well
        argv = ["--strategy", "diloco", "--sync_first", "5", "--compress", code]
        said = f"--compress {code} with --sync_first 5 does not go with --precision fp16"
        with pytest.raises(UserError, match=said):
            parse("bert", [*argv, "--precision", "fp16"], launched(1, 2))
        parse("bert", [*argv, "--precision", "bf16"], launched(1, 2))
    together = ["--strategy", "diloco", "--sync_first", "5", "--precision", "fp16"]
    parse("bert", together, launched(1, 2))  # carries nothing over
