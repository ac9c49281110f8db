"""What may be compared, and what two sides then differ by; intervals were worked out by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.core.records import SCHEMA
from harness.core.settings import UserError
from harness.read.compare import compare as compare_module
from harness.read.compare.compare import compare, more_seeds
from harness.read.records.selection import command_for_seeds, read_group
from harness.read.statistics import Noise
from tests.support.paired import TEXT, Verb, imported, pair, pairs, text_file, timed
from tests.support.records import with_epochs


@pytest.fixture
def compared(capsys: pytest.CaptureFixture[str]) -> Verb:
    return Verb("compare", capsys)


def test_a_planted_difference(tmp_path: Path, compared: Verb) -> None:
    # Pairs differ by 0.1, 0.11, 0.12: 11 points, sd 1, 11 -+ 2.48.
    one = pairs(tmp_path / "a", [0.49, 0.50, 0.51])
    other = pairs(tmp_path / "b", [0.59, 0.61, 0.63], "--lr", "0.01")
    text = compared.in_one_line(one, other)
    assert "(3 finished runs, seeds 1, 2, 3, a-cpux2)" in text
    assert "training settings that differ: lr (A 0.003, B 0.01) speed: comparable" in text
    assert "other programs: not recorded during 3 of 3 runs of B: counted as none" in text
    assert (
        "accuracy: B has 11.00 points more than A, 95 % interval +8.52 to +13.48, "
        "3 seeds paired by seed: more than the noise of seeds" in text
    )
    assert (
        "accuracy 0.5000 ± 0.0100 0.6100 ± 0.0200 +11.00 points +8.52 to +13.48 more than" in text
    )
    assert "samples/s: B is equal to A" in text
    assert compared.in_one_line(other, one).count("11.00 points less than A,") == 1


def test_differences_within_the_noise_are_named(tmp_path: Path, compared: Verb) -> None:
    one = pairs(tmp_path / "a", [0.49, 0.5, 0.51])
    other = pairs(tmp_path / "b", [0.52, 0.5, 0.49], "--lr", "0.01", first=7)
    text = compared.in_one_line(one, other)
    assert "3 and 3 values, not paired: within the noise of seeds" in text
    assert "accuracy: B has 0.33 points more than A," in text


def test_identical_runs_are_equal(tmp_path: Path, compared: Verb) -> None:
    one = pairs(tmp_path / "a", [0.4, 0.5, 0.6])
    other = pairs(tmp_path / "b", [0.4, 0.5, 0.6])
    for sides in ((one, other), (one, one)):
        text = compared.in_one_line(*sides)
        assert "training settings that differ: none" in text
        assert "accuracy: B is equal to A, 3 seeds paired by seed" in text
        assert "+0.00 points +0.00 to +0.00 equal" in text
        assert "epoch time: B is equal to A" in text and "1.000 times 1.000 to 1.000 equal" in text
        assert "more than the noise" not in text


def test_a_zero_value_has_no_ratio(tmp_path: Path, compared: Verb) -> None:
    one = pairs(tmp_path / "a", [0.4, 0.5], energy_j=0.0)
    other = pairs(tmp_path / "b", [0.4, 0.5], energy_j=3.0)
    said = compared.in_one_line(one, other)
    assert "energy: B has 3.0 J more than A, 95 % interval +3.0 to +3.0" in said
    fields = {row["name"]: row for row in json.loads(compared(one, other, "--json"))["measures"]}
    assert fields["energy_j"]["ratio"] is None and fields["energy_j"]["difference"]["value"] == 3.0
    assert fields["epoch_time_s"]["ratio"]["value"] == 1.0
    assert fields["epoch_time_s"]["difference"] is None


def test_a_row_does_not_contradict_itself(tmp_path: Path, compared: Verb) -> None:
    """Where rates spread, harmonic and geometric means differ: no difference of theirs is shown."""
    for name, rates in (("a", (100.0, 400.0)), ("b", (150.0, 270.0))):
        for seed, rate in enumerate(rates, 1):
            pair(tmp_path / name, seed, rate=rate)
    said = compared.in_one_line(tmp_path / "a", tmp_path / "b")
    # The ratio of harmonic means is 1.206. Logarithms of ratios 0.4055 and -0.3930: sd 0.5646, half
    # of the interval 12.706 * 0.5646 / 2 ** 0.5 = 5.073.
    needed = "too uncertain to tell (more quiet runs are needed)"
    assert "samples/s 160.0 ± 212.1 192.9 ± 84.9 1.006 times too wide too uncertain" in said
    text = "B has 1.006 times that of A, no usable interval from 2 runs, 2 runs paired by seed"
    assert f"samples/s: {text}: {needed}" in said
    rows = json.loads(compared(tmp_path / "a", tmp_path / "b", "--json"))["measures"]
    (rate,) = [row for row in rows if row["name"] == "train_samples_per_s"]
    assert (round(rate["ratio"]["low"], 3), rate["judgement"]) == (0.006, needed)


def test_one_seed_says_nothing_of_noise_and_how_to_measure_it(
    tmp_path: Path, compared: Verb
) -> None:
    one, other = pair(tmp_path / "a", 1), pair(tmp_path / "b", 1, accuracy=0.9)
    text = compared.in_one_line(one, other)
    assert "accuracy: B has 10.00 points more than A; with one value on a side its" in text
    assert (
        "A has 1 seed: noise is unknown; more: for seed in 2 3; do OMP_NUM_THREADS=1 torchrun "
        f"--standalone --nproc_per_node=2 bert.py --tiny --lr 1e-3 --output_dir {tmp_path / 'a'} "
        "--seed $seed; done" in text
    )


def test_one_seed_in_common_says_nothing_of_noise_and_how_to_make_pairs(
    tmp_path: Path, compared: Verb
) -> None:
    one, other = tmp_path / "a", tmp_path / "b"
    for folder, accuracies in ((one, {2: 0.95, 4: 0.9, 5: 0.93}), (other, {4: 0.9, 42: 0.8})):
        for seed, accuracy in accuracies.items():
            pair(folder, seed, accuracy=accuracy)
    text = compared.in_one_line(one, other)
    assert "+0.00 points - noise is unknown" in text and "points - equal" not in text
    assert "accuracy: B is equal to A; with one pair of the same seed its noise is unknown" in text
    # B alone measures two seeds that A has already, so that there are three pairs.
    assert "A shares" not in text and "A has" not in text
    assert "B shares 1 seed with A: noise is unknown; more: for seed in 2 5; do OMP" in text
    pair(other, 2, outcome="oom")  # it was tried
    text = compared.in_one_line(one, other)
    assert "A shares 1 seed with B: noise is unknown; more: for seed in 42; do" in text
    assert "B shares 1 seed with A: noise is unknown; more: for seed in 5; do" in text
    for seed in (5, 43):
        pair(other, seed, accuracy=0.9)
    said = compared.in_one_line(one, other)
    assert "A shares 2 seeds with B: a wide interval; more: for seed in 42; do" in said
    assert "B shares" not in said


def test_repeats_of_one_seed_tell_of_time_but_not_of_quality(
    tmp_path: Path, compared: Verb
) -> None:
    for name, accuracy, rates in (("a", 0.8, (100.0, 102.0)), ("b", 0.9, (110.0, 113.22))):
        for repeat, rate in enumerate(rates, start=1):
            pair(tmp_path / name, 1, "--repeat", str(repeat), accuracy=accuracy, rate=rate)
    text = compared.in_one_line(tmp_path / "a", tmp_path / "b")
    # Ratios 1.1 and 1.11: logarithms 0.09531 and 0.10436, sd 0.0064, t of 1 degree 12.706, so that
    # the ratio is from 1.0432 to 1.1704.
    assert "samples/s: B has 1.105 times that of A, 95 % interval 1.043 to 1.170" in text
    assert "samples/s 101.0 ± 1.4 111.6 ± 2.3 1.105 times 1.043 to 1.170 more than the" in text
    assert "10.00 points more than A; with one value on a side its noise" in text
    assert "A has 1 seed: noise is unknown" in text


def test_time_to_a_target_and_misses(tmp_path: Path, compared: Verb) -> None:
    def epochs(*quality: float) -> list[dict[str, Any]]:
        rows = enumerate(quality, 1)
        return [{"epoch": n, "accuracy": q, "epoch_time_s": 10.0} for n, q in rows]

    for seed in (1, 2):
        with_epochs(pair(tmp_path / "a", seed), epochs(0.5, 0.6, 0.9))
        more = {"updates": 30, "environment": {"effective_batch": 128}}
        with_epochs(pair(tmp_path / "b", seed, **more), epochs(0.5, 0.6 + seed / 10))
    text = compared.in_one_line(tmp_path / "a", tmp_path / "b", "--target", "accuracy=0.7")
    # Another training, and yet both go to the same place.
    assert "quality: not comparable" in text and "time to accuracy 0.7: comparable" in text
    assert "training time to accuracy 0.7 (s)" in text
    assert "training time to accuracy 0.7: B has 0.667 times that of A" in text
    text = compared.in_one_line(tmp_path / "a", tmp_path / "b", "--target=accuracy=0.75")
    assert "the target is reached by 2 of 2 runs of A and 1 of 2 of B" in text
    assert "1 of 2 reach it" in text
    assert "time to" not in compared.in_one_line(tmp_path / "a", tmp_path / "b")
    text = compared.refused(tmp_path / "a", tmp_path / "b", "--target", "acuracy=0.7")
    assert "--target acuracy: no epoch of these runs has it: did you mean accuracy?" in text


def test_what_took_another_amount_of_work_is_left_out(tmp_path: Path, compared: Verb) -> None:
    one = pairs(tmp_path / "a", [0.8, 0.9], energy_j=50.0, joules_per_sample=0.025)
    other = pairs(tmp_path / "b", [0.8, 0.9], samples=4000, energy_j=90.0, joules_per_sample=0.02)
    text = compared.in_one_line(one, other)
    for name in ("epoch time", "energy"):
        assert f"{name} is left out: samples trained on differ (A 2,000, B 4,000)" in text
    assert "energy per sample: B has 0.800 times that of A" in text


UNLIKE: list[tuple[dict[str, Any], list[str], str, str, str]] = [
    # How B differs, its flags, the reason, and whether speed and quality may be compared.
    ({"updates": 30}, [], "updates: A has 60, B has 30 (not the same training)",
     "comparable", "not comparable"),
    ({"environment": {"effective_batch": 128}}, [], "effective batch: A has 64, B has 128 (not the "
     "same training: in a sweep, `hold: effective_batch` gives all runs the same, and `baseline: ",
     "comparable", "not comparable"),
    ({"data": {"data_checksum": "bbbb"}}, [], "data checksum: A has aaaa, B has bbbb",
     "not comparable", "not comparable"),
    ({"data": {"data_checksum": None}}, [], "data checksum: A has aaaa, B has an unknown one",
     "not comparable", "not comparable"),
    ({}, ["--precision", "bf16"], "number format: A has fp32, B has bf16", "not comparable",
     "not comparable"),
    ({"data": {"test_samples": 400}}, [],
     "test set: A has 500 samples of split test, B has 400 samples of split test", "comparable",
     "not comparable"),
    ({"data": {"validation_samples": 50, "validation_from": "train"}}, [],
     "B has 500 samples of split test, validation on 50 of train", "comparable", "not comparable"),
    ({"environment": {"machine": "b-gpux8"}}, [], "machine: A has a-cpux2, B has b-gpux8",
     "not comparable", "comparable"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "flags", "why", "speed", "quality"), UNLIKE)
def test_what_is_not_comparable(
    change: dict[str, Any], flags: list[str], why: str, speed: str, quality: str,
    tmp_path: Path, compared: Verb,
) -> None:  # fmt: skip
    one = pairs(tmp_path / "a", [0.7, 0.8])
    other = pairs(tmp_path / "b", [0.8, 0.9], *flags, **change)
    nothing = speed == quality == "not comparable"
    text = compared.in_one_line(one, other, code=2 if nothing else 0)
    assert f"speed: {speed}" in text and f"quality: {quality}" in text and why in text
    assert ("samples/s: B" in text) == (speed == "comparable")
    assert ("accuracy: B" in text) == (quality == "comparable")


def processor(bf16_tflops: float | None, **more: Any) -> dict[str, Any]:
    known = {"fp32_tflops": 0.1, "bf16_tflops": bf16_tflops, "threads": 1, **more}
    return {"cpu_calibration": known, "observed": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("there", "precision", "speed"),
    [
        (processor(0.22), "bf16", "not comparable"),
        (processor(0.22), "fp32", "comparable"),  # as fast in the format that they used
        (processor(0.40), "bf16", "comparable"),
        (processor(None), "bf16", "comparable"),  # not measured beside other programs
        (processor(0.22, threads=2), "bf16", "comparable"),
        (processor(0.22, threads=None), "bf16", "comparable"),  # damaged, and yet read
        ({"observed": {"device": "cpu"}}, "bf16", "comparable"),
    ],
)
def test_one_processor_on_two_days(
    there: dict[str, Any], precision: str, speed: str, tmp_path: Path, compared: Verb
) -> None:
    flags = ["--precision", precision]
    one = pairs(tmp_path / "a", [0.7, 0.8], *flags, environment=processor(0.48))
    other = pairs(tmp_path / "b", [0.7, 0.8], *flags, environment=there)
    text = compared.in_one_line(one, other)
    assert f"speed: {speed}" in text and "quality: comparable" in text
    why = "processor: before training it did 0.48 TFLOP/s in bf16 for A and 0.22 for B"
    assert (why in text) == (speed == "not comparable")


@pytest.mark.parametrize(("first_s", "said"), [
    ((0.0, 9000.0), "measured 2 h 30 min apart, not in turn: the machine may have changed"),
    ((0.0, 600.0), None),  # soon after
])  # fmt: skip
def test_sides_that_did_not_take_turns_are_noted(
    first_s: tuple[float, float], said: str | None, tmp_path: Path, compared: Verb
) -> None:
    sides = [pairs(tmp_path / name, [0.7, 0.8]) for name in "ab"]
    for side, begin_s in zip(sides, first_s, strict=True):
        for file in Path(side).rglob("settings.json"):
            start = {"event": "start", "attempt": 1, "unix": 1e9 + begin_s}
            (file.parent / "attempts.jsonl").write_text(json.dumps(start) + "\n")
    text = compared.in_one_line(*sides)
    assert "speed: comparable" in text and ("apart, not in turn" in text) == bool(said)
    assert said is None or f"note: {said}" in text


def test_gpus_of_one_kind_are_one_machine(tmp_path: Path, compared: Verb) -> None:
    facts = {"machine": "a100x1", "gpus": ["A100"]}
    one = pairs(tmp_path / "a", [0.7, 0.8], environment=facts)
    other = pairs(tmp_path / "b", [0.7, 0.8], environment={**facts, "machine": "a100x4"})
    assert "speed: comparable" in compared.in_one_line(one, other)


def test_other_versions_are_noted(tmp_path: Path, compared: Verb) -> None:
    one = pairs(tmp_path / "a", [0.7, 0.8])
    versions = {"versions": {"torch": "2.14.0", "transformers": "5.23.0"}}
    text = compared.in_one_line(one, pairs(tmp_path / "b", [0.7, 0.8], environment=versions))
    assert "note: versions: A has torch 2.13.0, transformers 5.23.0, B has torch 2.14.0" in text


def test_failed_and_unfinished_runs(tmp_path: Path, compared: Verb) -> None:
    one = pairs(tmp_path / "a", [0.7, 0.8])
    bad = pair(tmp_path / "b", 1, outcome="oom", reason="no room")
    text = compared.in_one_line(one, bad, code=2)
    assert "quality: not comparable B has no finished run(s) and 1 oom: no room" in text
    (bad / "summary.json").unlink()
    assert "B has no finished run(s) and 1 unfinished" in compared.in_one_line(one, bad, code=2)
    pairs(tmp_path / "b", [0.7, 0.9], first=2)
    # Those that finished are compared, with a note.
    text = compared.in_one_line(one, tmp_path / "b")
    assert "note: B has 2 finished run(s) and 1 unfinished" in text
    assert "(2 finished runs of 3, seeds 2, 3, a-cpux2)" in text


def test_other_definitions(tmp_path: Path, compared: Verb) -> None:
    one = pairs(tmp_path / "a", [0.7, 0.8])
    new = pair(tmp_path / "b", 1, schema=SCHEMA + 1)
    assert f"schema {SCHEMA + 1}, this reads {SCHEMA}" in compared.refused(one, new)


def test_a_side_of_several_kinds_is_none(tmp_path: Path, compared: Verb) -> None:
    folder = pairs(tmp_path / "a", [0.7, 0.8])
    pairs(folder, [0.7, 0.8], "--lr", "0.01")
    text = compared.refused(folder, folder)
    differ = "its runs differ in lr (0.003, 0.01): name one kind, for example"
    assert f"{differ} python -m harness compare {folder}:lr=0.0" in text
    assert "lr (A 0.003, B 0.01)" in compared.in_one_line(
        f"{folder}:lr=3e-3", f"{folder}:lr=1e-2,seed=1"
    )
    assert "is on both sides" in compared.refused(f"{folder}:lr=3e-3", f"{folder}:lr=3e-3,seed=2")
    assert "no run with lr=2; there is 0.003, 0.01" in compared.refused(f"{folder}:lr=2", folder)
    assert "no run with lr=x; there" in compared.refused(f"{folder}:lr=x", folder)
    assert "its runs have no colour; they have" in compared.refused(f"{folder}:colour=1", folder)


def test_the_kind_that_an_error_names_is_like_the_other_side(
    tmp_path: Path, compared: Verb, capsys: pytest.CaptureFixture[str]
) -> None:
    several = pairs(tmp_path / "a", [0.7, 0.8, 0.9])  # the kind of most runs
    pairs(several, [0.7], "--lr", "0.01")
    one = pairs(tmp_path / "b", [0.7], "--lr", "0.01")
    differ = "its runs differ in lr (0.003, 0.01): name one kind, for example python -m harness"
    fits, explained = f"{several}:lr=0.01", Verb("explain", capsys)
    aimed = ["--target", "accuracy=0.9"]
    for verb, name, given, command in (
        (compared, "A", [several, one, *aimed], [fits, one, *aimed]),
        (compared, "B", [one, several], [one, fits]),
        (explained, "BASELINE", [one, several], [one, fits]),
        (explained, "RUN", [several, one], [fits, one]),
        (explained, "RUN", [several], [f"{several}:lr=0.003"]),
    ):
        text = verb.refused(*given)
        pasted = " ".join(map(str, command))
        assert text.endswith(f"{name}, {several}: {differ} {verb.name} {pasted}\n")
    assert f"{several}:lr=0.003 " in compared.refused(several, tmp_path / "none")


def test_mistakes(tmp_path: Path, compared: Verb, capsys: pytest.CaptureFixture[str]) -> None:
    folder = pairs(tmp_path / "a", [0.7, 0.8])
    (tmp_path / "empty").mkdir()
    for arguments, text in (
        ([folder], "missing B; usage: python -m harness compare A B"),
        ([folder, tmp_path / "none"], "none: there is no such folder"),
        ([folder, tmp_path / "empty"], "empty: there is no record of a run below it"),
        ([folder, f"{folder}:lr="], "expected FOLDER:NAME=VALUE"),
        ([folder, folder, "--anyway"], "unknown flag --anyway"),
        ([folder, folder, "--target", "high"], "--target high: expected METRIC=VALUE"),
        (
            [folder, folder, "--target", "f1=-1"],
            "--target f1=-1: f1 lies between 0 and 1, not at -1",
        ),
        ([folder, folder, "--target"], "--target needs a value"),
    ):
        assert text in compared.refused(*arguments)
    assert main(["compare"]) == 2 and main(["compare", "--help"]) == 0
    assert capsys.readouterr().out.count("usage: python -m harness compare A B") == 1


def test_imported_and_measured_runs_are_not_compared(tmp_path: Path, compared: Verb) -> None:
    theirs = [
        text_file(tmp_path),
        text_file(tmp_path, TEXT.replace("120.5", "121.5"), "1_1_2e-05_16.txt"),
    ]
    imported(tmp_path / "out", *theirs)
    ours = pairs(tmp_path / "a", [0.7, 0.8])
    text = compared.in_one_line(ours, tmp_path / "out" / "bert" / "1_1", code=2)
    assert "machine: A has a-cpux2, B has imported:callback-text" in text
    assert "definition of the metrics: A has this project's, B has callback-text's" in text
    # Two of one source are, as far as their files go, and what neither knows is noted.
    sides = (tmp_path / "out" / "bert" / name for name in ("1_1", "2_1_P100far"))
    text = compared.in_one_line(*sides)
    assert "note: data checksum is not in the records: taken to be the same" in text
    assert "epoch time: B has 0.996 times that of A; with one value on a side" in text
    assert "A has 1 seed: noise is unknown; only its source can measure more" in text


def test_published_records(root: Path) -> None:
    sweep = root / "records" / "xeon" / "sweeps" / "propagation-tiny"
    near, far = (f"{sweep}:script=vit,setup=2_1,link={link}" for link in ("none", "20ms"))
    comparison = compare(read_group("A", near, None), read_group("B", far, None))
    rows = {row.measure.name: row for row in comparison.rows}
    # A link changes no digit of what is learnt, and takes time.
    assert rows["accuracy"].estimate is not None and rows["accuracy"].estimate.value == 0
    rate = rows["train_samples_per_s"]
    assert rate.estimate is not None and rate.estimate.paired
    assert rate.judged == Noise.BEYOND
    assert 0.05 < (rate.estimate.value or 0) < 0.2
    assert not comparison.verdicts["speed"].reasons and not comparison.verdicts["quality"].reasons


def test_the_command_in_the_docs_compares_published_records(
    root: Path, compared: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = re.sub(r"\\\n\s*", "", (root / "docs" / "reading.md").read_text())
    (sweep,) = re.findall(r"^SWEEP=(.*)$", text, re.MULTILINE)
    (command,) = re.findall(r"^python -m harness (compare .*\$SWEEP.*)$", text, re.MULTILINE)
    monkeypatch.chdir(root)
    shown = compared.in_one_line(*command.replace("$SWEEP", sweep).split()[1:])
    for number in ("0.09 points more", "-1.34 to +1.53", "0.157 times that of A", "0.119 to 0.207"):
        assert number in shown, shown


def test_commands_for_more_seeds(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = root / "records" / "xeon" / "sweeps" / "propagation-tiny"
    far = read_group("A", f"{sweep}:script=vit,setup=2_1,link=20ms/100mbit", None)
    assert command_for_seeds(far, (1, 3)) == (
        "for seed in 1 3; do OMP_NUM_THREADS=1 python -m harness nodes 2 --link 20ms/100mbit -- "
        "torchrun vit.py --tiny --per_gpu_batch 16 --epochs 1 --setup 2_1_20ms-100mbit "
        "--exchange backend --output_dir outputs --seed $seed; done"
    )
    near = read_group("B", f"{sweep}:script=vit,setup=2_1,link=1ms/100mbit", None)
    monkeypatch.setattr(compare_module, "SEEDS", 99)
    ending = "done (into outputs, not beside published records: compare all of yours)"
    assert all(line.endswith(ending) for line in more_seeds(compare(far, near)))
    monkeypatch.setattr(compare_module, "is_published", lambda _: False)
    ending = "(this selection shows them once `seeds` in the sweep's file lists them)"
    assert all(line.endswith(ending) for line in more_seeds(compare(far, near)))


@pytest.mark.parametrize(
    ("flags", "facts", "start"),
    [
        ((), {"processes_per_node": 1}, "python bert.py"),
        ((), {"nodes": 3}, "torchrun --nnodes=3 --node_rank=RANK_OF_THIS_NODE "
         "--master_addr=ADDRESS_OF_NODE_0 --nproc_per_node=2 bert.py"),
        ((), {"nodes": 2, "launch": {"launcher": "netns", "link": None}},
         "python -m harness nodes 2 -- torchrun --nproc_per_node=2 bert.py"),
        ((), {"command": "bert.py --seed=4 --tiny"}, "--nproc_per_node=2 bert.py --tiny --o"),
    ],
)  # fmt: skip
def test_commands_of_every_start(
    flags: tuple[str, ...], facts: dict[str, Any], start: str, tmp_path: Path
) -> None:
    pair(tmp_path / "a", 1, *flags, environment=facts)
    assert start in (command_for_seeds(read_group("A", str(tmp_path / "a"), None), (2, 3)) or "")


@pytest.mark.parametrize(("device", "refused"), [("cpu", True), ("cuda:0", False)])
def test_a_process_with_every_core_is_not_compared_with_those_that_have_one(
    device: str, refused: bool, tmp_path: Path, compared: Verb
) -> None:
    """Of plain commands: torchrun gives each process one thread."""
    one, other = (
        pairs(tmp_path / str(n), [0.5, 0.6],
              environment={"threads": n, "observed": {"device": device}})
        for n in (1, 2)
    )  # fmt: skip
    text = compared.in_one_line(one, other)
    assert ("threads per process: A has 1, B has 2 (a sweep gives all runs as many" in text) == (
        refused
    )
    assert "quality: comparable" in text and ("speed: comparable" in text) == (not refused)
    assert "training settings that differ: none" in text  # threads are none


def test_a_script_that_only_calls_logcallback_may_take_no_seed(
    tmp_path: Path, compared: Verb
) -> None:
    for name in ("a", "b"):
        file = pair(tmp_path / name, 1) / "settings.json"
        settings = json.loads(file.read_text())
        file.write_text(json.dumps({k: v for k, v in settings.items() if k != "script"}))
    said = compared(tmp_path / "a", tmp_path / "b")
    assert "A has 1 seed: noise is unknown; run its script with other seeds" in said


def test_an_error_names_the_side(tmp_path: Path) -> None:
    folder = pairs(tmp_path / "a", [0.7])
    pairs(folder, [0.7], "--epochs", "9")
    with pytest.raises(UserError, match=r"^B, .* differ in epochs"):
        read_group("B", str(folder), None)


def test_what_explains_a_difference_of_processes_is_named(
    root: Path, tmp_path: Path, compared: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The side of more processes first, whichever it is here; and it can be typed."""
    monkeypatch.chdir(root)
    kind = "outputs/published:script=vit,epochs=12,lr=0.0015,per_gpu_batch=32,setup="
    command = f"explain {kind}1_2 {kind}1_1"
    for sides in (("1_1", "1_2"), ("1_2", "1_1")):
        text = compared.in_one_line(*(f"{kind}{side}" for side in sides))
        assert text.endswith(f" next: python -m harness {command}")
    assert main(command.split()) == 0
    for side in "ab":
        pair(tmp_path / side, 1)
    assert "next: " not in compared(tmp_path / "a", tmp_path / "b")
    one, same, other = (
        timed(tmp_path / name, 16, 1, count, "--model", model).parents[2]
        for name, count, model in (("one", 1, "x"), ("same", 2, "x"), ("other", 2, "y"))
    )
    assert f"explain {same} {one}" in compared(one, same)
    assert "next: " not in compared(one, other)
