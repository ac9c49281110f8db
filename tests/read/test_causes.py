"""Causes and their bounds are closed forms of the parts; what cannot be explained is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.core.records import find_runs
from harness.read.explain import causes
from harness.read.explain.baseline import runs_on_one_node
from harness.read.explain.causes import bound, lost, of_run, of_scaling, share_lost
from harness.read.explain.context import run_context
from harness.read.explain.explain import Explanation, cause_text, explain
from harness.read.explain.time_breakdown import (
    COMMUNICATION,
    COMPUTE,
    DATA,
    EVALUATION,
    FIRST,
    PARTS,
    SAVING,
    STRAGGLERS,
    UNSEPARATED,
    SlowestRank,
    _from_ranks,
    mean_breakdown,
    time_breakdown,
)
from harness.read.records.runs import Run
from harness.read.records.selection import read_group
from tests.support.explained import CONTEXT, ROW, breakdown, written
from tests.support.paired import Verb, imported, text_file
from tests.support.paired import written as record_of
from tests.support.records import lines, with_epochs, with_ranks

OLDER = Path(__file__).parent / "older.jsonl.gz"
PUBLISHED = Path(__file__).resolve().parents[2] / "outputs" / "published"
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
    apart = replace(CONTEXT, on_cpu=False)
    result = next(c for c in of_run(run, apart, [(32, large)]) if c.key == causes.BATCH)
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
        assert cause.remedy.endswith(causes.LARGER_BATCH)  # what the cause names is mended, too


def test_what_processes_cost_each_other_is_no_matter_of_the_batch() -> None:
    """Two take 1 s for 8 samples each; one alone takes 0.5 s, and 1 s for 32."""
    run = breakdown(parts={COMPUTE: 1.0})
    larger, same = (32, breakdown(1, 32, {COMPUTE: 1.0})), (8, breakdown(1, 8, {COMPUTE: 0.5}))
    (cause,) = of_run(run, CONTEXT, [larger, same])
    assert cause.key == causes.BATCH and cause.lost_s == 0.5
    assert "alone takes 62.5 ms per sample with a batch of 8, and 31.2 ms with one" in cause.text
    assert of_run(run, CONTEXT, [larger]) == []  # nothing tells one reason from the other
    far = replace(CONTEXT, nodes=2)
    assert "computing takes 125 ms per sample" in of_run(run, far, [larger, same])[0].text


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
    for far in ({"rtt_ms": 80.0}, {"rtt_ms": 0.1}, {"rtt_ms": None}):
        _, remedy = told(nodes=2, strategy="fsdp", **far)
        assert remedy == "--save none, or fewer epochs: each save gathers the shards over the link"
    assert "faster disk" in told(nodes=1, strategy="fsdp")[1]


def test_evaluation_beyond_the_share_of_the_baseline() -> None:
    """Both take 0.4 s an update to evaluate; two devices could share that of one."""
    run = breakdown(2, 8, {COMPUTE: 0.5, EVALUATION: 0.3, SAVING: 0.1})
    base = breakdown(1, 16, {COMPUTE: 1.0, EVALUATION: 0.3, SAVING: 0.1})
    (cause,) = (c for c in causes.of_scaling(run, base, CONTEXT) if c.key == causes.OUTSIDE)
    takes_s = 0.4 * run.updates
    assert cause.lost_s == pytest.approx(0.2)
    text = cause_text(run, cause)
    assert f"The baseline's share of that is {causes.seconds(takes_s / 2)}. Without what" in text
    left = causes.seconds((run.running_s - 0.2) * run.updates)
    assert f"Without what is beyond it: the run takes at least {left} after startup" in text
    alone = next(c for c in of_run(run, CONTEXT) if c.key == causes.OUTSIDE)
    assert "share of that" not in alone.text and ". Without it: " in cause_text(run, alone)


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
    told = causes.stragglers(run, replace(CONTEXT, shares=(10, 22)))
    assert told[0].startswith("rank 1, with 22 of the 32 samples of an update (--balance): it")
    assert told[1].startswith("shares that fit, as --balance measured finds them, or finding out")
    even = replace(run, slowest=replace(slowest, spared_s=0.01))
    assert "--balance" not in causes.stragglers(even, replace(CONTEXT, balances=True))[1]


# Nodes and processes of each, flags, device: what is advised in place of the backend.
OTHER_EXCHANGES = [
    ((2, 1), "--exchange backend", "cpu", "auto"), ((2, 1), "", "cpu", None),
    ((2, 2), "--exchange backend", "cpu", "auto"), ((2, 2), "", "cpu", None),
    ((2, 2), "--compress int8", "cpu", "direct"), ((2, 2), "--strategy local_sgd", "cpu", None),
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
    assert run_context(run, None).other_exchange == advised


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
        context = run_context(read_group("RUN", str(path), None), None)
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


LINK = {
    "payload_bytes": 25.5e6, "rtt_ms": 40.2, "bandwidth_mbit": 1234.5, "requested_link": "20ms",
    "requested_links": [{"loss": 0.0, "jitter_ms": 0.0}, {"loss": 0.0123, "jitter_ms": 2.25}],
}  # fmt: skip


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


def test_without_records_of_ranks_the_probe_and_the_data_separate_a_step(tmp_path: Path) -> None:
    path = written(tmp_path, "--strategy", "fsdp", comm_share=0.25)
    result = time_breakdown(read_group("x", str(path), None).runs[0])
    assert result.step_s == 2.0 and result.samples == 16
    known = {name: value for name, value in result.parts.items() if value}
    # A quarter of a step is waiting for data and a quarter communicating; the first steps took 2 s.
    assert known == {
        DATA: 0.5, COMMUNICATION: 0.5, UNSEPARATED: 1.0, FIRST: 0.4, EVALUATION: 0.4, SAVING: 0.2,
        "startup and other": 1.0,
    }  # fmt: skip
    assert result.evaluation_s == 2 * 2 / 16


def test_first_steps_may_be_those_of_a_start_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    explained = Verb("explain", capsys)
    said = "Each of the first 3 updates waits for an exchange (--sync_first), which is part of that"
    long: dict[str, Any] = {"row": {"epoch_time_s": 22.0}, "wall_s": 30.0}
    one = written(tmp_path / "one", "--strategy", "local_sgd", **long)
    text = explained.in_one_line(one)
    assert "more than as many later steps" in text and "--sync_first" not in text
    two = written(tmp_path / "two", "--strategy", "local_sgd", "--sync_first", "3", **long)
    assert said in explained.in_one_line(two)


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records that were made before ranks recorded their steps."""
    folder = tmp_path_factory.mktemp("older")
    assert main(["unpack", str(OLDER), "--out", str(folder)]) == 0
    return folder


def of_older(folder: Path, word: str, near: Sequence[Run] | None = None) -> Explanation:
    return explain(read_group("RUN", str(folder / word), None), near=near)


def test_a_batch_of_evaluation_named_as_its_default_is_no_difference(older: Path) -> None:
    """The run names no --eval_batch, the one on one process names 64: they have one run id's."""
    alone = [run for run in runs_on_one_node(find_runs(PUBLISHED)) if run.devices == 1]
    text = " ".join(of_older(older, "vit/1_2:epochs=1", near=alone).sentences)
    assert "The baseline is one process with batch 16" in text and "also differ" not in text


def test_what_is_hidden_may_be_the_main_cause(older: Path) -> None:
    result = of_older(older, "vit/1_2:epochs=1", near=[])
    text = " ".join(result.sentences)
    assert result.main is None and "The main cause is not known" in text
    assert "Nothing stands out" not in text and "Main cause" not in text


def test_nodes_are_compared_with_as_many_processes_on_one(older: Path) -> None:
    several = [run for run in runs_on_one_node(find_runs(older)) if run.devices == 2]
    result = of_older(older, "vit/2_1_20ms", near=several)
    assert result.main == UNSEPARATED
    assert (
        "277.2 ± 3.3 samples/s (harmonic mean and standard deviation of 3 runs)"
        in result.sentences[0]
    )
    assert "2 processes on one node with batch 16" in result.sentences[1]
    assert "a round trip of 40." in result.sentences[3]


@pytest.fixture
def explained(capsys: pytest.CaptureFixture[str]) -> Verb:
    return Verb("explain", capsys)


def test_what_cannot_be_explained_is_refused(tmp_path: Path, explained: Verb) -> None:
    path = written(tmp_path / "a")
    assert "[BASELINE]" in explained.refused(path, path, path)
    assert "there is no such folder" in explained.refused(tmp_path / "none")
    broken = written(tmp_path / "b", outcome="interrupted", reason="SIGTERM")
    assert "no finished run to explain: interrupted (SIGTERM)" in explained.refused(broken)
    short = written(tmp_path / "c", row={"timed_steps": 0, "timed_s": 0.0, "timed_samples": 0})
    assert "no timed steps: measure a longer run" in explained.refused(short)
    other = written(tmp_path / "d", environment={"machine": "b-cpux2"})
    assert "not comparable: machine" in explained.refused(path, other)
    data = written(tmp_path / "e", data={"data_checksum": "bbbb"})
    assert "not comparable: data checksum" in explained.refused(path, data)
    model = written(tmp_path / "f", "--model", "bert-mini")
    assert "not comparable: the model differs" in explained.refused(path, model)


def test_an_imported_run_has_no_steps_to_explain(tmp_path: Path, explained: Verb) -> None:
    out = imported(tmp_path / "records", text_file(tmp_path))
    assert "is imported: its source does not record single steps" in explained.refused(out)


def test_help_and_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--help"]) == 0
    assert "RUN [BASELINE]" in capsys.readouterr().out
    path = written(tmp_path)
    assert main(["explain", str(path), str(path)]) == 0
    shown = capsys.readouterr().out
    assert "Less than 10 % is lost against the baseline." in shown
    assert "Not known from this record: computing, communicating" in shown
    # The heading is wrapped to the width of its column.
    assert "baseline's" in shown and "share, ms" in shown and " - " in shown
    # "under 1 %" counts as a number: its column stands right, and so does the heading.
    assert re.search(r"ms +run +share, ms *$", shown, re.M)


def test_notes(tmp_path: Path) -> None:
    path = written(tmp_path / "a", wall_s=60.0, attempts=2, lost_s=3.0)
    written(tmp_path / "a", outcome="failed", reason="a reason")
    base = written(tmp_path / "b", "--dropout", "0.5")
    run = read_group("RUN", str(path.parent), None)
    text = " ".join(explain(run, read_group("BASELINE", str(base), None)).sentences)
    assert "They also differ in dropout." in text
    assert "took 42 s of 60 s" in text and "Measuring the link" not in text
    linked = written(tmp_path / "d", wall_s=60.0, environment={"link": {"took_s": 10.0}})
    assert (
        "45 s of 60 s: a fixed cost, independent of run length. Measuring the link took 10 s "
        in (" ".join(explain(read_group("RUN", str(linked), None)).sentences))
    )
    assert "1 run(s) were interrupted and resumed: 3 s lost." in text
    unknown = read_group("RUN", str(written(tmp_path / "c", attempts=2, lost_s=None)), None)
    said = " ".join(explain(unknown).sentences)
    assert "1 run(s) were interrupted and resumed: an unknown time lost." in said
    assert "1 run(s) did not finish and are not counted." in text
    assert "Training reaches 1.00 times its samples/s." in text and "inside" not in text
    attempts = [
        {"event": "start", "attempt": n + 1, "from_update": at} for n, at in ((0, 0), (1, 3))
    ]
    lines(path / "attempts.jsonl", attempts)
    with_epochs(path, [{**ROW, "updates": 5}])
    (path / "epochs.jsonl").write_text('{"epoch": 1, "upd\n' + (path / "epochs.jsonl").read_text())
    text = " ".join(explain(read_group("RUN", str(path), None)).sentences)
    assert f"{path}: epoch 1 interrupted inside and continued: its parts are sums" in text
    many = [{"event": "start", "attempt": n + 1, "from_update": 5 * n + 2} for n in range(10)]
    lines(path / "attempts.jsonl", many)
    short = ROW | {"epoch_time_s": 5.0, "timed_s": 4.0}
    with_epochs(path, [{**short, "epoch": n, "updates": 5 * n} for n in range(1, 11)])
    shown = " ".join(explain(read_group("RUN", str(path), None)).sentences)
    assert f"{path}: epochs 1, 2, 3, 4, 5, 6, and 4 more interrupted inside" in shown
    assert "1 torn line(s) of epochs.jsonl are left out; every epoch has a whole one." in text


def test_ranks_that_do_not_know_their_computing(tmp_path: Path) -> None:
    path = written(tmp_path)
    with_ranks(path, {"compute_s": None, "comm_wait_s": 1.0}, {"compute_s": 1.0, "comm_wait_s": 0})
    assert time_breakdown(read_group("x", str(path), None).runs[0]).parts[UNSEPARATED]


def test_a_flag_of_several_values_is_compared(tmp_path: Path) -> None:
    path = written(tmp_path)
    settings = json.loads((path / "settings.json").read_text())
    settings["trainer"] = {"optim_args": ["a", {"b": 1}]}
    (path / "settings.json").write_text(json.dumps(settings))
    run = read_group("RUN", str(path), None)
    assert run.identity["optim_args"] == '["a", {"b": 1}]'
    assert explain(run).sentences


def test_a_run_beside_other_programs_is_compared_with_no_other(tmp_path: Path) -> None:
    for busy, said in ((0.1, "No comparable run on one process"), (0.6, "It ran beside other")):
        folder = written(tmp_path / str(busy), environment={"launch": {"cpu_busy_share": busy}})
        sentences = explain(read_group("RUN", str(folder), None)).sentences
        assert sentences[1].startswith("No comparable run on one process") and said in sentences[1]
        assert ("It ran beside" in sentences[1]) == (busy > 0.5)


def test_others_that_come_during_a_run_count_by_time(tmp_path: Path) -> None:
    """As much of it as 0.6 of the cores in half of the time, or as nobody knows."""
    for shares, seconds, whole in (
        ((0.0, 0.6), (1.0, 1.0), 0.3), ((0.0, 0.6), (3.0, 1.0), 0.15),
        ((None, 0.6), (3.0, 1.0), 0.6), ((None, None), (1.0, 1.0), None),
    ):  # fmt: skip
        folder = written(tmp_path / str(shares) / str(seconds), environment={"cpu_cores": 2})
        rows = [
            {**ROW, "epoch": n + 1, "others_cpu_share": share, "epoch_time_s": s}
            for n, (share, s) in enumerate(zip(shares, seconds, strict=True))
        ]
        group = read_group("RUN", str(with_epochs(folder, rows)), None)
        (run,) = group.runs
        assert run.others_cpu_share == (whole if whole is None else pytest.approx(whole))
        assert run.is_beside_others == (whole is not None and whole > 0.25)
        cores = run_context(group, None).others_cores
        assert cores == (whole if whole is None else pytest.approx(2 * whole))
