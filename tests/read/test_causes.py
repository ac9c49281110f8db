"""Causes and their bounds are closed forms of the parts; what cannot be explained is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.core.records import find_runs
from harness.read.explain import causes
from harness.read.explain.causes import RunContext, bound, lost, of_run, of_scaling, share_lost
from harness.read.explain.explain import Explanation, cause_text, explain, runs_on_one_node
from harness.read.explain.time_breakdown import (
    COMMUNICATION,
    COMPUTE,
    DATA,
    EVALUATION,
    PARTS,
    SAVING,
    STRAGGLERS,
    UNSEPARATED,
    SlowestRank,
    TimeBreakdown,
    _from_ranks,
    mean_breakdown,
)
from harness.read.records.runs import Run
from harness.read.records.selection import read_group
from harness.read.statistics import spread
from tests.support.paired import written as record_of

PUBLISHED = Path(__file__).resolve().parents[2] / "outputs" / "published"
CONTEXT = RunContext(
    strategy="ddp", nodes=1, processes=2, micro_batch=8, baseline_micro_batch=8, eval_batch=64,
    on_cpu=True, emulated=False, cpu_percent=None,
    others_cores=None, throttled=None, payload_bytes=None, rtt_ms=None, bandwidth_mbit=None,
    requested_link=None, compress="none", padding_setting=None,
)  # fmt: skip


def breakdown(
    devices: int = 2, batch: int = 8, parts: dict[str, float | None] | None = None, **more: Any
) -> TimeBreakdown:
    """In powers of two, whose sums and shares are exact."""
    whole: dict[str, float | None] = {**dict.fromkeys(PARTS, 0.0), **(parts or {})}
    step_s = sum(
        whole[name] or 0.0 for name in (COMPUTE, DATA, COMMUNICATION, STRAGGLERS, UNSEPARATED)
    )
    result = TimeBreakdown(
        devices=devices, samples=float(devices * batch), updates=16.0,
        rate=spread([devices * batch / step_s]), step_s=step_s, parts=whole,
        spreads=dict.fromkeys(PARTS), padding=None, evaluation_s=None, slowest=None,
    )  # fmt: skip
    return replace(result, **more)


ONE = breakdown(1, parts={COMPUTE: 0.25, DATA: 0.125, EVALUATION: 0.125})


def test_what_is_lost_is_more_than_a_share_of_the_baseline() -> None:
    run = breakdown(parts={COMPUTE: 0.5, DATA: 0.125, COMMUNICATION: 0.25, EVALUATION: 0.125})
    result = lost(run, ONE)
    assert {n: s for n, s in result.items() if s} == {COMPUTE: 0.25, COMMUNICATION: 0.25}
    assert share_lost(run, ONE) == 0.5
    # Half the batch should take half as long.
    small = breakdown(batch=4, parts={COMPUTE: 0.25, DATA: 0.0625, EVALUATION: 0.0625})
    assert {n: s for n, s in lost(small, ONE).items() if s} == {COMPUTE: 0.125}
    (cause,) = of_scaling(small, ONE, replace(CONTEXT, micro_batch=4))
    assert cause.key == causes.BATCH and cause.lost_s == 0.125
    assert "takes 62.5 ms per sample with" in cause.text and "and 31.2 ms in" in cause.text


def test_unseparated_parts_are_compared_with_all_that_they_may_contain() -> None:
    unknown = dict.fromkeys((COMPUTE, COMMUNICATION, STRAGGLERS))
    run = breakdown(parts={**unknown, UNSEPARATED: 0.75, DATA: 0.125, EVALUATION: 0.125})
    assert {n: s for n, s in lost(run, ONE).items() if s} == {UNSEPARATED: 0.5}
    (cause,) = of_scaling(run, ONE, replace(CONTEXT, strategy="diloco"))
    assert cause.key == UNSEPARATED and "diloco" in cause.text
    # The same the other way round: a baseline on as many devices that does not separate them.
    known = breakdown(parts={COMPUTE: 0.75, COMMUNICATION: 0.5, DATA: 0.125, EVALUATION: 0.125})
    assert {n: s for n, s in lost(known, run).items() if s} == {UNSEPARATED: 0.5}
    text = causes.not_known(run)
    assert text is not None and "computing, communicating, waiting for slower ranks" in text
    assert causes.not_known(ONE) is None


def test_bounds_are_the_rest_of_the_step_or_of_the_run() -> None:
    run = breakdown(
        parts={COMPUTE: 0.5, DATA: 0.25, COMMUNICATION: 0.25, EVALUATION: 1.0, SAVING: 0.5}
    )
    by_key = {cause.key: cause for cause in of_run(run, CONTEXT)}
    assert bound(run, by_key[DATA]) == (16 / 0.75, 1 / 0.75 - 1)
    assert bound(run, by_key[causes.OUTSIDE]) == (16 * 1.0, -0.6)
    assert [cause.key for cause in of_run(run, CONTEXT)] == [causes.OUTSIDE, DATA, COMMUNICATION]


def test_a_small_batch_is_seen_by_other_runs_and_by_evaluation() -> None:
    run = breakdown(parts={COMPUTE: 1.0, COMMUNICATION: 0.5})
    large = breakdown(1, 32, {COMPUTE: 1.0})
    result = next(c for c in of_run(run, CONTEXT, [(32, large)]) if c.key == causes.BATCH)
    assert result.lost_s == 1 - 8 / 32 and "a batch of 32" in result.text
    # Fewer updates exchange less often: a larger batch is spared both.
    assert bound(run, result)[0] == 16 / (1.5 - 0.75 - 0.5)
    # A smaller batch of others, and evaluation that is not much faster, say nothing.
    assert causes.BATCH not in keys(of_run(run, CONTEXT, [(4, breakdown(1, 4, {COMPUTE: 0.1}))]))
    rough = replace(run, evaluation_s=1 / 8 / 3 / 1.5)
    assert causes.BATCH not in keys(of_run(rough, CONTEXT))
    fast = replace(run, evaluation_s=1 / 8 / 3 / 4)
    result = next(c for c in of_run(fast, CONTEXT) if c.key == causes.BATCH)
    assert result.lost_s == pytest.approx(0.75) and "an estimate" in result.text
    assert causes.BATCH not in keys(of_run(fast, replace(CONTEXT, eval_batch=31)))
    assert causes.BATCH not in keys(
        of_run(breakdown(parts={COMPUTE: None, UNSEPARATED: 1.0}), CONTEXT)
    )


def keys(result: list[causes.Cause]) -> list[str]:
    return [cause.key for cause in result]


def test_padding_is_a_part_of_computing() -> None:
    run = breakdown(parts={COMPUTE: 0.5}, padding=0.25)
    (cause,) = of_run(run, replace(CONTEXT, padding_setting="batch"))
    assert (cause.key, cause.lost_s) == (causes.PADDING, 0.125)
    assert "25 % of computing" in cause.text and cause.remedy == "--padding auto"


def test_why_computing_is_slower() -> None:
    run = breakdown(parts={COMPUTE: 0.5, DATA: 0.125, EVALUATION: 0.125})

    def text_of(**more: Any) -> str:
        (cause,) = of_scaling(run, ONE, replace(CONTEXT, **more))
        assert (cause.key, cause.lost_s) == (causes.CORES, 0.25)
        return f"{cause.text}; {cause.remedy}"

    assert "2 processes share cores" in text_of() and "a machine for each" in text_of()
    busy = text_of(cpu_percent=100.0, others_cores=0.75)
    assert "Other programs used about 0.75 cores" in busy and "stopping other programs" in busy
    assert "does not show the reason" in text_of(nodes=2)
    assert "share cores" in text_of(nodes=2, emulated=True)
    assert "throttled in 50 %" in text_of(on_cpu=False, throttled=0.5)


def test_a_small_batch_is_not_told_from_processes_that_share_a_machine() -> None:
    run = breakdown(parts={COMPUTE: 0.5, DATA: 0.125, EVALUATION: 0.125})
    for busy, remedy in ((0.0, causes.LARGER_BATCH), (0.75, "stopping other programs")):
        context = replace(CONTEXT, baseline_micro_batch=16, micro_batch=8, others_cores=busy)
        (cause,) = of_scaling(run, ONE, context)
        assert cause.key == causes.BATCH and cause.remedy.startswith(remedy)
        assert "2 processes share cores" in cause.text
        assert ("Other programs used about 0.75 cores" in cause.text) == (busy > 0)


def test_what_limits_an_exchange() -> None:
    run = breakdown(parts={COMPUTE: 0.5, COMMUNICATION: 0.5})

    def text_of(**more: Any) -> str:
        words, change = causes.communication(run, replace(CONTEXT, **more))
        return f"{words}; {change}"

    # 25 MB over 1000 Mbit/s are 0.2 s, less than half of it; over 500 they are more.
    link = {"nodes": 2, "payload_bytes": 25e6, "rtt_ms": 40.0, "requested_link": "20ms"}
    assert "The delay is the limit" in text_of(**link, bandwidth_mbit=1000.0)
    assert "--exchange" not in text_of(**link, bandwidth_mbit=1000.0)
    for way in ("auto", "direct"):
        text = text_of(**link, bandwidth_mbit=1000.0, other_exchange=way)
        assert f", or --exchange {way}. --compress" in text
    assert "The rate is the limit" in text_of(**link, bandwidth_mbit=500.0)
    assert "--compress" in text_of(**link, bandwidth_mbit=500.0)
    assert "--compress" not in text_of(**link, bandwidth_mbit=500.0, compress="bf16")
    assert "limit" not in text_of(**link)
    assert "25 MB per update" in text_of(**link) and "requested: 20ms" in text_of(**link)


def test_over_a_long_link_evaluating_is_waiting_for_round_trips() -> None:
    """16 updates in two epochs: 0.125 s and 0.25 s an update are 37.5 round trips of 80 ms each."""
    run = breakdown(parts={COMPUTE: 0.25, EVALUATION: 0.125, SAVING: 0.25})

    def told(**more: Any) -> tuple[str, str]:
        found = of_run(run, replace(CONTEXT, epochs=2.0, **more))
        return next((c.text, c.remedy) for c in found if c.key == causes.OUTSIDE)

    text, remedy = told(nodes=2, rtt_ms=80.0)
    assert "37.5 round trips of the link" in text and "--save none, or fewer epochs" in remedy
    for near in ({"nodes": 1, "rtt_ms": None}, {"nodes": 2, "rtt_ms": 0.1}):
        text, remedy = told(**near)
        assert "round trips" not in text and "faster disk" in remedy


def test_ranks_that_take_turns_have_no_slow_one_among_them() -> None:
    run = breakdown(parts={COMPUTE: 0.5, STRAGGLERS: 0.5}, slowest=SlowestRank(1, 0.125, 0.0))
    assert "take turns" in causes.stragglers(run, CONTEXT)[0]
    slow = replace(run, slowest=SlowestRank(1, 0.5, 0.5))
    words, change = causes.stragglers(slow, replace(CONTEXT, nodes=2))
    assert "rank 1 is slower" in words and "waiting for its data" in words and "node 1" in change


def test_a_rank_that_computes_slowly_could_have_fewer_samples() -> None:
    """Passes of 1 and 2 s: in shares of 2 to 1 both take 4/3 s."""
    ranks = [{"compute_s": s, "comm_exposed_s": 2 - s, "comm_wait_s": 2 - s} for s in (1.0, 2.0)]
    parts, slowest = _from_ranks(ranks, 2.0, 1.0)
    assert slowest == SlowestRank(1, 1.0, 0.0, pytest.approx(2 / 3))
    run = replace(breakdown(parts=parts), slowest=slowest)
    text = "--balance measured, for about 1.5 times as many samples/s, or finding out what else"
    assert causes.stragglers(run, replace(CONTEXT, balances=True))[1].startswith(text)
    assert "--balance" not in causes.stragglers(run, CONTEXT)[1]  # it is balanced, or cannot be
    even = replace(run, slowest=replace(slowest, spared_s=0.01))
    assert "--balance" not in causes.stragglers(even, replace(CONTEXT, balances=True))[1]


# Nodes and processes of each, flags, device: what is advised in place of the backend.
OTHER_EXCHANGES = [
    ((2, 1), "--exchange backend", "cpu", "auto"), ((2, 1), "", "cpu", None),
    ((2, 2), "", "cpu", "direct"), ((2, 2), "--strategy local_sgd", "cpu", None),
    ((2, 1), "--exchange backend", "cuda", None), ((2, 1), "--exchange direct", "cpu", None),
    ((2, 1), "--compress powersgd:2", "cpu", None), ((2, 1), "--strategy fsdp", "cpu", None),
    ((1, 2), "", "cpu", None),
]  # fmt: skip


@pytest.mark.parametrize(("world", "flags", "device", "advised"), OTHER_EXCHANGES)
def test_another_exchange_is_advised_where_it_would_be_taken(
    world: tuple[int, int], flags: str, device: str, advised: str | None, tmp_path: Path
) -> None:
    path, facts = tmp_path / "run", {"observed": {"device": device}}
    record_of(path, "vit", flags.split(), world, facts, {})
    run = read_group("RUN", str(path), None)
    assert causes.run_context(run, None).other_exchange == advised


def test_balance_is_advised_where_it_would_be_taken(tmp_path: Path) -> None:
    flags = {
        "": True, "--tail pad": False, "--auto_batch": False, "--balance measured": False,
        "--per_gpu_batch 1": False, "--strategy fsdp": True, "--strategy diloco": False,
    }  # fmt: skip
    restarts = {"variables": {"TORCHELASTIC_MAX_RESTARTS": "3"}}
    normed = {"observed": {"batchnorm_layers": 3}}  # which --balance refuses
    plain = {"observed": {"batchnorm_layers": 0}}
    cases = [*((words, {}, could) for words, could in flags.items()), ("", restarts, False),
             ("", normed, False), ("", plain, True)]  # fmt: skip
    for number, (words, facts, could) in enumerate(cases):
        path = tmp_path / str(number)
        record_of(path, "vit", words.split(), (1, 2), facts, {})
        context = causes.run_context(read_group("RUN", str(path), None), None)
        assert context.balances == could, words


def test_several_runs_are_one_with_a_spread() -> None:
    one, two = (breakdown(parts={COMPUTE: s, DATA: 0.5}) for s in (0.5, 1.5))
    both = mean_breakdown([one, two])
    assert both.parts[COMPUTE] == 1.0 and both.spreads[COMPUTE] == pytest.approx(2**-0.5)
    assert both.step_s == 1.5 and both.rate.n == 2
    unknown = replace(two, parts={**two.parts, COMPUTE: None})
    assert mean_breakdown([one, unknown]).parts[COMPUTE] is None
    slow = [replace(one, slowest=SlowestRank(rank, 0.5, 0.25)) for rank in (1, 1, 0)]
    assert mean_breakdown(slow).slowest == SlowestRank(1, 0.5, 0.25)
    assert mean_breakdown(slow[1:]).slowest is None


@pytest.mark.parametrize(
    ("value", "text"), [(1234, "1,234 s"), (0.0125, "12.5 ms"), (2e-5, "20 µs"), (0, "0 s")]
)
def test_seconds_are_written_in_a_unit_that_fits(value: float, text: str) -> None:
    assert causes.seconds(value) == text


LINK = {"payload_bytes": 25.5e6, "rtt_ms": 40.2, "bandwidth_mbit": 1234.5, "requested_link": "20ms"}


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"nodes": 2, "strategy": "diloco", **LINK},
        {"nodes": 2, **LINK, "bandwidth_mbit": 12.3},
        {"nodes": 2, "compress": "bf16", "on_cpu": False, "throttled": 0.5, **LINK},
        {"micro_batch": 4, "padding_setting": "batch"},
        {"balances": True},
        {"cpu_percent": 98.7, "others_cores": 1.25},
        {"nodes": 2, "sync_first": 44, "strategy": "diloco", **LINK},
    ],
)
@pytest.mark.parametrize("slowest", [None, SlowestRank(1, 0.5, 0.5), SlowestRank(1, 0.5, 0.0, 0.2)])
def test_sentences_are_shorter_than_25_words(
    facts: dict[str, Any], slowest: SlowestRank | None
) -> None:
    context = replace(CONTEXT, **facts)
    known = breakdown(parts=dict.fromkeys(PARTS, 0.1234), padding=0.25, slowest=slowest)
    hidden = dict.fromkeys((COMPUTE, COMMUNICATION, STRAGGLERS))
    unknown = replace(known, parts={**known.parts, **hidden, UNSEPARATED: 0.75})
    seen = set()
    for run in (known, unknown, replace(known, evaluation_s=1e-4)):
        for others in ([], [(32, breakdown(1, 32, {COMPUTE: 0.125}))]):
            for cause in (*of_run(run, context, others), *of_scaling(run, ONE, context)):
                seen.add(cause.key)
                text = f"Largest remaining cost: {cause_text(run, cause)} {causes.not_known(run)}"
                for sentence in text.split(". "):
                    assert len(sentence.split()) < 25, sentence
    assert {DATA, COMMUNICATION, causes.SLOW_RANK, UNSEPARATED, causes.BATCH} <= seen


def published(word: str, near: Sequence[Run] | None = None) -> Explanation:
    """Of records that were made before ranks recorded their steps."""
    return explain(read_group("RUN", str(PUBLISHED / word), None), near=near)


def test_a_batch_of_evaluation_named_as_its_default_is_no_difference() -> None:
    """The run names no --eval_batch, the one on one process names 64: they have one run id's."""
    text = " ".join(published("vit/1_2:epochs=1").sentences)
    assert "The baseline is one process with batch 16" in text and "also differ" not in text


def test_what_is_hidden_may_be_the_main_cause() -> None:
    result = published("vit/1_2:epochs=1", near=[])
    text = " ".join(result.sentences)
    assert result.main is None and "The main cause is not known" in text
    assert "Nothing stands out" not in text and "Main cause" not in text


def test_nodes_are_compared_with_as_many_processes_on_one() -> None:
    several = [run for run in runs_on_one_node(find_runs(PUBLISHED)) if run.devices == 2]
    result = published("vit/2_1_20ms", near=several)
    assert result.main == UNSEPARATED
    assert "277 ± 3.34 samples/s (mean and standard deviation of 3 runs)" in result.sentences[0]
    assert "2 processes on one node with batch 16" in result.sentences[1]
    assert "a round trip of 40." in result.sentences[3]
