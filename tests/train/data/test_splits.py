"""What is held out is in no other set, the same for every run, and moves no other sample."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from harness.core.rules import resolve
from harness.core.settings import Settings, UserError, share_of
from harness.train.data import sources
from harness.train.data.sources import Source, load
from harness.train.loop.progress import Console, no_better
from harness.train.run.recorder import Recorder
from tests.support.declared import assert_declared
from tests.support.ranks import script
from tests.support.samples import WORDS, check_pairs, columns, rows, settings, texts, write_csv


def numbers(data: Dataset | None) -> set[int]:
    assert data is not None
    ids = [int(text.split()[1]) for text in texts(data)]
    assert len(set(ids)) == len(ids)
    return set(ids)


def sets(source: Source) -> tuple[set[int], set[int], set[int]]:
    return (
        numbers(source.train),
        numbers(source.sets.get("validation")),
        numbers(source.test),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    parts = {"train": (200, 0), "validation": (30, 1000), "test": (40, 2000)}
    splits = {n: Dataset.from_list(rows(count, first)) for n, (count, first) in parts.items()}
    DatasetDict(splits).save_to_disk(tmp_path / "disk")
    return tmp_path / "disk"


# train_size, share -> samples held out: the share of these and the training samples together.
SIZES = [("all", 0.1, 20), ("all", 0.25, 50), (90, 0.1, 10), (150, 0.25, 50), (180, 0.1, 20)]


def declared(names: list[str] | None, labels: list[Any]) -> Dataset:
    feature = Value("string") if names is None else ClassLabel(names=names)
    texts = [f"text {number} of {names}" for number in range(len(labels))]
    features = Features({"text": Value("string"), "label": feature})
    return Dataset.from_dict({"text": texts, "label": labels}, features=features)


def test_classes_that_each_split_numbers_for_itself_are_those_of_their_names(
    tmp_path: Path,
) -> None:
    """As class_encode_column() of a DatasetDict leaves them: c is 2 in one and 1 in the other."""
    train = declared(["a", "b", "c"], [0, 1, 2] * 4)
    DatasetDict({"train": train, "test": declared(["a", "c"], [0, 1, 1])}).save_to_disk(tmp_path)
    source = load(settings(tmp_path))
    assert source.labels == ["a", "b", "c"] and source.classes[1].tolist() == [0, 2, 2]
    # Words beside them go by the same names, and so does what the training set has in words.
    DatasetDict({"train": train, "test": declared(None, ["c", "b"])}).save_to_disk(tmp_path / "w")
    assert load(settings(tmp_path / "w")).classes[1].tolist() == [2, 1]
    words = declared(None, ["c", "a"] * 5)
    DatasetDict({"train": words, "test": declared(["c", "a"], [0, 1])}).save_to_disk(tmp_path / "v")
    source = load(settings(tmp_path / "v"))
    assert source.labels == ["a", "c"] and source.classes[1].tolist() == [1, 0]
    # A class that only the test set has comes after those that the training set declares.
    DatasetDict({"train": train, "test": declared(["z", "a"], [0, 1])}).save_to_disk(tmp_path / "z")
    source = load(settings(tmp_path / "z"))
    assert source.labels == ["a", "b", "c", "z"] and source.classes[1].tolist() == [3, 0]


def test_whole_numbers_beside_declared_classes_are_their_numbers(tmp_path: Path) -> None:
    train = declared(["a", "b"], [0, 1] * 5)
    features = Features({"text": Value("string"), "label": Value("int64")})
    plain = Dataset.from_dict({"text": ["x", "y"], "label": [1, 0]}, features=features)
    DatasetDict({"train": train, "test": plain}).save_to_disk(tmp_path)
    source = load(settings(tmp_path))
    assert source.labels == ["a", "b"] and source.classes[1].tolist() == [1, 0]
    numbers = Dataset.from_dict({"text": list("pqrs"), "label": [0, 1] * 2}, features=features)
    DatasetDict({"train": numbers, "test": declared(["a", "b"], [1, 0])}).save_to_disk(
        tmp_path / "n"
    )
    source = load(settings(tmp_path / "n"))
    assert source.labels == ["0", "1"] and source.classes[1].tolist() == [1, 0]
    # Names that are numbers are meant by numbers, and not their places.
    stars = declared(["1", "2", "3"], [0, 1, 2] * 4)
    DatasetDict({"train": stars, "test": plain}).save_to_disk(tmp_path / "stars")
    with pytest.raises(UserError, match="column label of the test set holds 0, which is none"):
        load(settings(tmp_path / "stars"))
    plain = Dataset.from_dict({"text": ["x", "y"], "label": [1, 3]}, features=features)
    DatasetDict({"train": stars, "test": plain}).save_to_disk(tmp_path / "stars3")
    assert load(settings(tmp_path / "stars3")).classes[1].tolist() == [0, 2]


def test_a_class_that_no_split_declares_is_one_line(tmp_path: Path) -> None:
    train = declared(["a", "b"], [0, 1] * 5)
    DatasetDict({"train": train, "test": declared(None, ["a", "x"])}).save_to_disk(tmp_path)
    match = "column label of the test set holds 'x', which is none of the classes that the training"
    with pytest.raises(UserError, match=match):
        load(settings(tmp_path))


@pytest.mark.parametrize(("size", "share", "held_out"), SIZES)
def test_a_share_is_held_out(size: int | str, share: float, held_out: int, folder: Path) -> None:
    source = load(settings(folder, train_size=size, validation_split=str(share)))
    train, validation, test = sets(source)
    assert len(validation) == held_out and not validation & train
    assert len(train) == (200 - held_out if size == "all" else size)
    assert train | validation <= set(range(200)) and test == set(range(2000, 2040))
    assert len(validation) / (len(train) + len(validation)) == pytest.approx(share)
    facts = source.facts
    assert facts["validation_from"] == f"{share:g} of the training samples"
    assert facts["validation_samples"] == held_out and facts["test_from"] == "split test"
    check_pairs(source)
    assert source.sizes == [len(train), 40, held_out]
    position = dict(zip(source.labels, range(2), strict=True))
    reference = [position[word] for data in source.sets.values() for word in data["label"]]
    assert source.all_labels.tolist() == reference


def test_holding_out_moves_no_training_and_no_test_sample(folder: Path) -> None:
    """Of a given size, the training set is that of a run without validation set."""
    one = settings(folder, train_size=80, test_size=20)
    plain, held = load(one), load(replace(one, validation_split="0.2"))
    assert texts(held.train) == texts(plain.train) and texts(held.test) == texts(plain.test)
    assert "validation" not in plain.sets and "validation_samples" not in plain.facts
    assert len(plain.classes) == 2
    assert held.facts["data_checksum"] != plain.facts["data_checksum"]
    larger = sets(load(replace(one, train_size=150, validation_split="0.2")))
    assert numbers(held.train) < larger[0] and numbers(held.sets["validation"]) < larger[1]


def test_the_split_is_drawn_by_data_seed_alone(folder: Path) -> None:
    one = settings(folder, train_size=90, validation_split="0.1")
    first = load(one)
    again = load(replace(one, seed=7))
    assert sets(again) == sets(first)
    assert again.facts["data_checksum"] == first.facts["data_checksum"]
    assert sets(load(replace(one, data_seed=1)))[1] != sets(first)[1]
    drawn = sorted(numbers(first.sets["validation"]))
    assert drawn != list(range(drawn[0], drawn[0] + 10))  # not cut off at an end


def test_a_split_by_name(folder: Path) -> None:
    source = load(settings(folder, train_size=90, validation_split="validation"))
    assert sets(source)[1:] == (set(range(1000, 1030)), set(range(2000, 2040)))
    assert source.facts["validation_from"] == "split validation"
    assert texts(source.train) == texts(load(settings(folder, train_size=90)).train)


def test_test_and_validation_of_one_split(tmp_path: Path) -> None:
    DatasetDict({"train": Dataset.from_list(rows(100))}).save_to_disk(tmp_path)
    train, validation, test = sets(load(settings(tmp_path, validation_split="0.1")))
    assert (len(train), len(validation), len(test)) == (72, 8, 20)
    assert train | validation | test == set(range(100))
    both = sets(load(settings(tmp_path, test_split="0.3", validation_split="0.1")))
    assert [len(part) for part in both] == [63, 7, 30]
    equal = sets(load(settings(tmp_path, test_split="0.2", validation_split="0.2")))
    assert [len(part) for part in equal] == [64, 16, 20]


def test_a_class_that_only_the_validation_set_has_is_a_class(tmp_path: Path) -> None:
    odd = [{"text": "text 500", "label": "odd"}]
    splits = {"train": rows(20), "validation": [*rows(5, 100), *odd], "test": rows(6, 200)}
    DatasetDict({n: Dataset.from_list(r) for n, r in splits.items()}).save_to_disk(tmp_path)
    source = load(settings(tmp_path, validation_split="validation"))
    assert source.labels == ["bad", "good", "odd"]
    assert source.classes[2].tolist()[-1] == 2
    assert source.facts["classes"] == 3


def refusal(folder: Path, **more: str | int) -> str:
    with pytest.raises(UserError) as ids:
        load(settings(folder, **more))
    return str(ids.value)


def test_what_cannot_be_held_out_is_refused(folder: Path) -> None:
    message = refusal(folder, train_size=190, validation_split="0.1")
    assert "190 and --validation_split 0.1 need 211 samples, the data have 200" in message
    assert "--train_size 180 or all" in message
    load(settings(folder, train_size=180, validation_split="0.1"))
    assert "too few" in refusal(folder, train_size=4, validation_split="0.01")
    assert "the splits are train, validation, test" in refusal(folder, validation_split="dev")
    for more in ({}, {"test_split": "test"}):
        assert "that is the test set" in refusal(folder, validation_split="test", **more)
    swapped = load(settings(folder, validation_split="test", test_split="validation"))
    assert numbers(swapped.test) == set(range(1000, 1030))


def test_an_empty_validation_split(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Dataset.from_list(rows(20))
    # Handed over directly: datasets itself cannot read a file without rows.
    splits = DatasetDict({"train": data, "validation": data.select([]), "test": data})
    monkeypatch.setattr(sources, "_read", lambda settings: splits)
    with pytest.raises(UserError, match="--validation_split validation: that split is empty"):
        load(settings("x", validation_split="validation"))


def test_what_is_a_share() -> None:
    assert [share_of(t) for t in ("0.1", ".25", "1e-2")] == [0.1, 0.25, 0.01]
    assert [share_of(t) for t in ("0", "1", "-0.1", "2", "nan", "validation", "1st")] == [None] * 7
    for wrong in ("0", "1.0", "-0.1", "7", "1st", "train"):
        with pytest.raises(UserError, match=f"--validation_split {wrong}"):
            resolve(Settings(script="bert", validation_split=wrong))


def test_where_the_test_samples_come_from(tmp_path: Path) -> None:
    sizes = {"train": 20, "validation": 5, "test": 6, "extra": 7}
    for name, count in sizes.items():
        write_csv(tmp_path / f"{name}.csv", rows(count, first=100 * count))
    # "extra" is not a name that a folder's files are sorted by: it goes to disk as a split.
    splits = {n: Dataset.from_list(rows(c, first=100 * c)) for n, c in sizes.items()}
    DatasetDict(splits).save_to_disk(tmp_path / "disk")
    for requested, where, train, test in (
        (None, "split test", 20, 6),
        ("validation", "split validation", 20, 5),
        ("extra", "split extra", 20, 7),
        ("0.25", "0.25 of split train", 15, 5),
        (".1", "0.1 of split train", 18, 2),
    ):
        source = load(settings(tmp_path / "disk", test_split=requested))
        result = (source.facts["test_from"], len(source.train), len(source.test))
        assert result == (where, train, test)
        assert not set(texts(source.train)) & set(texts(source.test))
    # A folder with one split under another name than train.
    (tmp_path / "only").mkdir()
    write_csv(tmp_path / "only" / "test.csv", rows(10))
    assert len(load(settings(tmp_path / "only")).train) == 8


@pytest.mark.parametrize("missing", [-1, None, "column"])
def test_a_test_split_without_labels_is_passed_over(missing: Any, tmp_path: Path) -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["bad", "good"])})
    full = columns([{**row, "label": WORDS.index(row["label"])} for row in rows(20)])
    data = Dataset.from_dict(full, features=features)
    hidden = Dataset.from_dict({**full, "label": [None if missing == "column" else missing] * 20},
                               features=features)  # fmt: skip
    hidden = hidden.remove_columns("label") if missing == "column" else hidden
    DatasetDict({"train": data, "test": hidden, "validation": data}).save_to_disk(tmp_path / "a")
    assert load(settings(tmp_path / "a")).facts["test_from"] == "split validation"
    DatasetDict({"train": data, "test": hidden}).save_to_disk(tmp_path / "b")
    facts = load(settings(tmp_path / "b")).facts
    assert (facts["test_from"], facts["unused_test_splits"]) == ("0.2 of split train", ["test"])
    with pytest.raises(UserError, match="label"):  # asked for by name, it is not replaced
        load(settings(tmp_path / "b", test_split="test"))


def test_minus_1_is_a_class_where_training_has_it_or_other_rows_have_another(
    tmp_path: Path,
) -> None:
    signs = [{"text": f"text {i}", "label": (-1, 1)[i >= 1100]} for i in range(1200)]
    for labels in (signs, signs[:1100]):
        test = Dataset.from_list(labels)
        DatasetDict({"train": Dataset.from_list(signs), "test": test}).save_to_disk(tmp_path / "a")
        source = load(settings(tmp_path / "a"))
        assert (source.facts["test_from"], len(source.test)) == ("split test", len(labels))
        assert "unused_test_splits" not in source.facts


def test_the_largest_class_of_what_each_epoch_is_evaluated_on(tmp_path: Path) -> None:
    """A model that knows nothing but this class has its share as accuracy."""
    splits = {
        "train": declared(["a", "b", "c"], [0, 1, 2] * 20),
        "test": declared(["a", "b", "c"], [1, 1, 0]),
        "dev": declared(["a", "b", "c"], [2, 2, 2, 0]),
    }
    DatasetDict(splits).save_to_disk(tmp_path)
    facts = load(settings(tmp_path)).facts
    assert facts["majority_share"] == 2 / 3 and "available_samples" not in facts
    facts = load(settings(tmp_path, validation_split="dev", train_size=30)).facts
    assert facts["majority_share"] == 3 / 4 and facts["available_samples"] == 60
    facts = load(settings(tmp_path, validation_split="0.2", train_size=40)).facts
    assert facts["validation_samples"] == 10 and facts["available_samples"] == 50


def test_a_run_that_ends_no_better_than_the_largest_class() -> None:
    rows = [{"accuracy": 0.9}, {"accuracy": 2 / 3}]
    text = "the accuracy of the last epoch, 0.6667, is no better than naming the largest class for"
    assert text in str(no_better(2 / 3, rows))
    assert no_better(0.66, rows) is no_better(None, rows) is no_better(2 / 3, [{}]) is None
    assert no_better(2 / 3, []) is None


@pytest.mark.process
def test_a_run_warns_of_a_test_split_that_is_not_used(tmp_path: Path) -> None:
    table = [{"text": f"text {i}", "label": i % 2} for i in range(60)]
    hidden = [{**row, "label": -1} for row in table]
    for name, content in (("train", table), ("test", hidden)):
        write_csv(tmp_path / f"{name}.csv", content)
    sizes = ["--train_size", "all", "--test_size", "all", "--epochs", "1"]
    done = script("bert", "--tiny", "--dataset", str(tmp_path), *sizes, cwd=tmp_path)
    said = "warning: split test has no classes, and is not used: the test set is "
    assert done.code == 0 and f"  {said}0.2 of split train\n" in done.out
    (environment,) = tmp_path.glob("outputs/*/*/*/environment.json")
    assert_declared("environment", json.loads(environment.read_text()), environment)


def test_an_empty_split_is_passed_over_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Dataset.from_list(rows(20))
    # Handed over directly: datasets itself cannot read a file without rows.
    splits = DatasetDict({"train": data, "test": data.select([])})
    monkeypatch.setattr(sources, "_read", lambda settings: splits)
    facts = load(settings("x")).facts
    assert (facts["test_from"], facts["empty_test_splits"]) == ("0.2 of split train", ["test"])
    with pytest.raises(UserError, match="--test_size is empty"):
        load(settings("x", test_split="test"))
    splits["train"], splits["test"] = splits["test"], splits["train"]
    with pytest.raises(UserError, match="--train_size is empty"):
        load(settings("x"))


def test_samples_of_training_in_the_test_set_are_counted(tmp_path: Path) -> None:
    """By their input, whatever class they have there."""
    data, beyond = rows(200), rows(20, first=200)
    again = [{**row, "label": "bad"} for row in data[:6]]
    splits = {"train": data, "test": [*again, *beyond], "validation": [*beyond, data[7]]}
    made = {name: Dataset.from_list(content) for name, content in splits.items()}
    DatasetDict(made).save_to_disk(tmp_path)
    facts = load(settings(tmp_path)).facts
    assert facts["test_samples_in_training"] == 6 and facts["test_samples"] == 26
    assert "validation_samples_in_training" not in facts
    facts = load(settings(tmp_path, validation_split="validation")).facts
    counts = [facts[f"{which}_samples_in_training"] for which in ("test", "validation")]
    assert counts == [6, 1]


def test_what_a_run_says_of_its_data() -> None:
    """An empty split was named as one without classes."""
    facts = {
        "train_samples": 90, "left_out_samples": 0, "test_samples": 1200, "classes": 2,
        "dataset": "d", "test_from": "0.2 of split train", "unused_test_splits": ["test", "dev"],
        "empty_test_splits": ["dev"], "test_samples_in_training": 1100,
        "sixteen_bit_images": 1290,
    }  # fmt: skip
    context: Any = SimpleNamespace(data_facts=facts)
    _, *warnings = Console(Recorder(), context)._about_data()
    assert warnings == [
        "warning: split test has no classes, and is not used: the test set is 0.2 of split train",
        "warning: split dev has no rows, and is not used: the test set is 0.2 of split train",
        "warning: 1,100 of 1,200 test samples are also in the training set: they overstate the "
        "quality on new data",
        "warning: 1,290 images have 16 bits, which are divided by 257; pipeline() and Pillow cut "
        "them off at 255: give the trained model images with 8 bits",
    ]
    none = {"unused_test_splits": [], "empty_test_splits": [], "test_samples_in_training": 0,
            "sixteen_bit_images": 0}  # fmt: skip
    context.data_facts = facts | none
    assert len([*Console(Recorder(), context)._about_data()]) == 1
    context.data_facts |= {"available_samples": 96000}
    (line,) = Console(Recorder(), context)._about_data()
    assert line == "90 of 96,000 training samples, 1,200 test samples, 2 classes"
