"""From a name to samples: whatever form the data have, and the same ones for every run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from PIL import Image

from harness.core.settings import UserError
from harness.core.tasks import TASKS
from harness.train.data import sources
from harness.train.data.sources import Source, _blank, load
from tests.support.declared import assert_declared
from tests.support.ranks import script
from tests.support.samples import WORDS, check_pairs, rows, settings, texts, write_csv


def write_tsv(file: Path, table: list[dict[str, Any]]) -> None:
    write_csv(file, table, "\t")


def write_json(file: Path, table: list[dict[str, Any]]) -> None:
    file.write_text("\n".join(map(json.dumps, table)))


def write_parquet(file: Path, table: list[dict[str, Any]]) -> None:
    Dataset.from_list(table).to_parquet(file)


FORMATS: dict[str, Callable[[Path, list[dict[str, Any]]], None]] = {
    "csv": write_csv,
    "json": write_json,
    "jsonl": write_json,
    "parquet": write_parquet,
}


@pytest.mark.parametrize("suffix", FORMATS)
def test_folder_of_files(suffix: str, tmp_path: Path) -> None:
    FORMATS[suffix](tmp_path / f"train.{suffix}", rows(30))
    FORMATS[suffix](tmp_path / f"test.{suffix}", rows(8, first=30))
    source = load(settings(tmp_path))
    assert texts(source.train) == [f"text {i}" for i in range(30)]
    assert texts(source.test) == [f"text {i}" for i in range(30, 38)]
    assert (source.inputs, source.labels) == (["text"], ["bad", "good"])
    check_pairs(source)
    facts = source.facts
    assert facts.pop("dataset") == str(tmp_path).replace(str(Path.home()), "~")
    assert len(facts.pop("data_checksum")) == 16
    assert facts == {
        "test_samples_in_training": 0,
        "test_from": "split test", "input_columns": ["text"], "label_column": "label",
        "classes": 2, "majority_share": 0.5, "test_samples": 8,
    }  # fmt: skip


@pytest.mark.parametrize("suffix", [*FORMATS, "tsv"])
def test_single_file_is_split(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"anything.{suffix}"
    {**FORMATS, "tsv": write_tsv}[suffix](file, rows(30))
    source = load(settings(file))
    assert (len(source.train), len(source.test)) == (24, 6)
    assert {*texts(source.train), *texts(source.test)} == {row["text"] for row in rows(30)}
    assert source.facts["test_from"] == "0.2 of split train"
    check_pairs(source)


def test_folders_of_save_to_disk(tmp_path: Path) -> None:
    train, test = Dataset.from_list(rows(20)), Dataset.from_list(rows(6, first=20))
    DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "both")
    train.save_to_disk(tmp_path / "one")
    both, one = load(settings(tmp_path / "both")), load(settings(tmp_path / "one"))
    assert (len(both.train), len(both.test), both.facts["test_from"]) == (
        20,
        6,
        "split test",
    )
    assert (len(one.train), len(one.test)) == (16, 4)
    check_pairs(both)
    check_pairs(one)


def test_folder_of_images(tmp_path: Path) -> None:
    for split, count in (("train", 6), ("test", 2)):
        for shade, name in enumerate(WORDS):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (4, 4), (shade * 200, i, 0)).save(folder / f"{i}.png")
    source = load(settings(tmp_path, script="vit"))
    assert (source.inputs, source.labels) == (["image"], ["bad", "good"])
    assert (len(source.train), len(source.test)) == (12, 4)
    for image, label in zip(source.train["image"], source.classes[0], strict=True):
        assert (image.getpixel((0, 0))[0] == 0) == (source.labels[label] == "good")


LABELS: dict[str, tuple[list[Any], Any, list[str]]] = {
    "ClassLabel": ([1, 0], ClassLabel(names=["bad", "good"]), ["bad", "good"]),
    # A class without a sample keeps its place: the model has an output for it.
    "unused class": ([2, 0], ClassLabel(names=["bad", "so", "good"]), ["bad", "so", "good"]),
    "string": (["good", "bad"], Value("string"), ["bad", "good"]),
    "int": ([7, -3], Value("int64"), ["-3", "7"]),
    "int8": ([1, 0], Value("int8"), ["0", "1"]),
    "bool": ([True, False], Value("bool"), ["False", "True"]),
    "whole floats": ([1.0, 0.0], Value("float64"), ["0", "1"]),
}


@pytest.mark.parametrize("kind", LABELS)
def test_labels_of_all_kinds(kind: str, tmp_path: Path) -> None:
    values, feature, names = LABELS[kind]
    table = {"text": [f"text {i}" for i in range(20)], "label": [values[i % 2] for i in range(20)]}
    data = Dataset.from_dict(table, features=Features({"text": Value("string"), "label": feature}))
    DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path)
    source = load(settings(tmp_path))
    assert source.labels == names
    assert source.classes[0].tolist() == [len(names) - 1, 0] * 10 == source.classes[1].tolist()


def test_columns_are_found_or_named(tmp_path: Path) -> None:
    table = [{"id": f"n{i}", "sentence": f"s {i}", "other": f"o {i}", "y": i % 3, "target": i % 2}
             for i in range(20)]  # fmt: skip
    write_csv(tmp_path / "train.csv", table)
    source = load(settings(tmp_path))
    assert (source.inputs, source.facts["label_column"]) == (["sentence"], "target")
    pair = load(settings(tmp_path, text_column="sentence,other", label_column="y"))
    assert (pair.inputs, pair.labels) == (["sentence", "other"], ["0", "1", "2"])
    assert pair.facts["data_checksum"] != source.facts["data_checksum"]


def test_a_column_of_two_words_is_the_class(tmp_path: Path) -> None:
    table = [{"review": f"r {i}", "sentiment": WORDS[i % 2], "stars": i % 5} for i in range(20)]
    write_csv(tmp_path / "one.csv", table)
    source = load(settings(tmp_path / "one.csv"))
    assert (source.inputs, source.labels) == (["review"], ["bad", "good"])
    write_csv(
        tmp_path / "two.csv", [{**row, "spam": WORDS[i // 10]} for i, row in enumerate(table)]
    )
    with pytest.raises(UserError, match=r"several columns of classes \(sentiment, spam\)"):
        load(settings(tmp_path / "two.csv"))


def test_what_is_no_column_of_classes_or_text(tmp_path: Path) -> None:
    table = [{"text": f"t {i % 40}", "score": 0.5 * (i % 7)} for i in range(80)]
    write_csv(tmp_path / "a.csv", table)
    with pytest.raises(UserError, match=r"column score holds 0\.5, which is no class \(a word or"):
        load(settings(tmp_path / "a.csv", label_column="score"))
    with pytest.raises(UserError, match="no column of text among text, score, where text is taken"):
        load(settings(tmp_path / "a.csv", label_column="text"))
    red = tmp_path / "pictures" / "red"
    red.mkdir(parents=True)
    for n in range(3):
        Image.new("RGB", (8, 8), (n, 0, 0)).save(red / f"{n}.png")
    with pytest.raises(UserError, match="its pictures have no classes: name the folder above"):
        load(settings(red, script="vit"))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_column_of_few_small_numbers_is_the_class(kind: str, tmp_path: Path) -> None:
    others: dict[str, Callable[[int], Any]] = {
        "id": lambda i: i, "year": lambda i: 2019 + i % 4, "age": lambda i: 18 + i % 40,
        "score": lambda i: i % 101, "half": lambda i: i % 5 / 2, "part": lambda i: i % 12,
    }  # fmt: skip
    table = [{"review": f"r {i}", **{n: f(i) for n, f in others.items()}} for i in range(300)]
    file = tmp_path / f"a.{kind}"
    FORMATS[kind](file, table)
    with pytest.raises(UserError, match=r"no column of classes among review, id.*year 4, age 40"):
        load(settings(file))
    for values in ((0, 1), (-1, 1), (1, 2, 3, 4, 5)):
        rated = [{**row, "stars": values[i % len(values)]} for i, row in enumerate(table)]
        FORMATS[kind](file, rated)
        source = load(settings(file))
        assert source.facts["label_column"] == "stars" and source.inputs == ["review"]
        assert source.labels == [*map(str, values)]
    FORMATS[kind](
        file, [{**row, "useful": i % 2, "tone": WORDS[i % 2]} for i, row in enumerate(rated)]
    )
    several = r"several columns of classes \(stars, useful, tone\): name one with --label_column"
    with pytest.raises(UserError, match=several):
        load(settings(file))


def test_a_column_called_category_is_no_class_beside_another(tmp_path: Path) -> None:
    """In reviews it is what was bought."""
    table = [
        {"review": f"r {i}", "category": WORDS[i % 3 == 0], "sentiment": WORDS[i % 2]}
        for i in range(60)
    ]
    write_csv(tmp_path / "a.csv", table)
    with pytest.raises(UserError, match=r"several columns of classes \(category, sentiment\)"):
        load(settings(tmp_path / "a.csv"))
    alone = [{"text": row["review"], "category": str(i % 25)} for i, row in enumerate(table)]
    write_csv(tmp_path / "b.csv", alone)
    assert load(settings(tmp_path / "b.csv")).facts["label_column"] == "category"


def test_beside_pictures_a_column_of_words_or_numbers_is_the_class(tmp_path: Path) -> None:
    picture = Image.new("RGB", (8, 8))
    for values in (WORDS, [3, 4]):
        made = {"image": [picture] * 40, "digit": [values[i % 2] for i in range(40)]}
        Dataset.from_dict(made).cast_column("image", datasets.Image()).save_to_disk(tmp_path)
        source = load(settings(tmp_path, script="vit"))
        assert source.facts["label_column"] == "digit" and source.inputs == ["image"]


def test_lists_of_classes_are_refused(tmp_path: Path) -> None:
    several = [{"text": f"text {i}", "label": [i % 2, 2]} for i in range(20)]
    write_json(tmp_path / "train.jsonl", several)
    for flags in ({}, {"label_column": "label"}):
        with pytest.raises(UserError) as refused:
            load(settings(tmp_path, **flags))
        assert str(refused.value) == (
            "column label holds lists (several classes for a sample), not one class for each "
            "sample: name another with --label_column"
        )


def test_labels_of_two_types_are_refused(tmp_path: Path) -> None:
    words = Dataset.from_list(rows(20))
    numbers = words.remove_columns("label").add_column("label", [0, 1] * 10)
    for name, data in (("train", words), ("test", numbers)):
        data.save_to_disk(tmp_path / name)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match="column label holds numbers in one split and text"):
        load(settings(tmp_path))


def test_texts_for_a_script_of_images_name_the_other_one(tmp_path: Path) -> None:
    write_csv(tmp_path / "train.csv", rows(20))
    with pytest.raises(UserError, match=r"name it with --label_column; text is text, for bert\.py"):
        load(settings(tmp_path, script="vit"))


def test_a_size_that_nobody_has_typed_is_called_the_default(tmp_path: Path) -> None:
    write_csv(tmp_path / "train.csv", rows(20))
    usual = TASKS["bert"].defaults["train_size"]
    with pytest.raises(UserError, match=rf"--train_size {usual} \(the default\): the data have 16"):
        load(settings(tmp_path, train_size=usual))
    with pytest.raises(UserError, match=r"--train_size 17: the data have 16 samples"):
        load(settings(tmp_path, train_size=17))


def test_several_splits_and_no_train(tmp_path: Path) -> None:
    data = Dataset.from_list(rows(20))
    DatasetDict({"one": data, "two": data}).save_to_disk(tmp_path)
    with pytest.raises(UserError, match="no split called train, only one, two"):
        load(settings(tmp_path))


def drawn(source: Source) -> tuple[list[str], list[str], str]:
    return texts(source.train), texts(source.test), source.facts["data_checksum"]


@pytest.mark.parametrize("own_test_split", [True, False])
def test_the_subset_is_drawn_by_data_seed_alone(own_test_split: bool, tmp_path: Path) -> None:
    write_csv(tmp_path / "train.csv", rows(200))
    if own_test_split:
        write_csv(tmp_path / "test.csv", rows(60, first=200))
    one = settings(tmp_path, train_size=50, test_size=20)
    train, test, checksum = drawn(load(one))
    assert (len(set(train)), len(set(test))) == (50, 20) and not set(train) & set(test)
    assert train != sorted(train, key=lambda t: int(t.split()[1]))  # drawn, not cut off
    for seed in (1, 2, 43):
        assert drawn(load(replace(one, seed=seed))) == (train, test, checksum)
    others = [drawn(load(replace(one, data_seed=seed))) for seed in (1, 2)]
    assert len({tuple(result[0]) for result in others} | {tuple(train)}) == 3
    assert len({tuple(result[1]) for result in others} | {tuple(test)}) == 3
    assert len({result[2] for result in others} | {checksum}) == 3
    for result in others:
        assert not set(result[0]) & set(result[1])
    # A larger subset holds the smaller one: sizes are compared on the same data.
    larger = texts(load(replace(one, train_size=80)).train)
    assert larger[:50] == train
    check_pairs(load(one))


def test_the_checksum_is_that_of_the_content(tmp_path: Path) -> None:
    def of(name: str, table: list[dict[str, Any]]) -> str:
        (tmp_path / name).mkdir()
        write_parquet(tmp_path / name / "train.parquet", table)
        return str(load(settings(tmp_path / name)).facts["data_checksum"])

    table = rows(40)
    first = of("a", table)
    assert of("b", table) == first  # not of the name or the place
    word = [{**row, "text": row["text"] + "!"} if i == 7 else row for i, row in enumerate(table)]
    label = [{**row, "label": "bad"} if i == 8 else row for i, row in enumerate(table)]
    assert len({first, of("c", word), of("d", label), of("e", table[::-1])}) == 4


def test_no_sample_of_a_large_set_may_change_unseen() -> None:
    table = Dataset.from_list(rows(5000))
    labels = np.arange(5000) % 2
    whole, _ = sources.checksum([(table, labels)], ["text"])
    for row in (1, 2501, 4999):
        edited = list(table["text"])
        edited[row] += "!"
        data = Dataset.from_dict({"text": edited})
        assert sources.checksum([(data, labels)], ["text"])[0] != whole


def test_embedded_data_have_the_same_form() -> None:
    source = load(settings("embedded:digits", script="vit", train_size=100, test_size=50))
    assert (source.inputs, source.labels) == (["image"], [str(i) for i in range(10)])
    assert (len(source.train), len(source.test)) == (100, 50)
    assert set(sources.EMBEDDED) == {"embedded:english", "embedded:digits"}
    assert datasets.Image() == source.train.features["image"]


def test_labels_are_text_exactly_as_written(tmp_path: Path) -> None:
    labels = ["01", "1", "001", "NA", "None", "null", "nan"]
    table = [{"text": f"{labels[i % 7]}", "label": labels[i % 7]} for i in range(70)]
    write_csv(tmp_path / "a.csv", table)
    source = load(settings(tmp_path / "a.csv", label_column="label", text_column="text"))
    assert source.labels == sorted(labels)
    assert {*source.train["text"]} | {*source.test["text"]} == {*labels}
    (tmp_path / "folder").mkdir()
    write_csv(tmp_path / "folder" / "train.csv", table)
    assert load(settings(tmp_path / "folder", text_column="text")).labels == sorted(labels)


def test_classes_that_differ_in_case_or_blanks_alone_are_told(tmp_path: Path) -> None:
    labels = ["Good", "good ", "good", "bad", "BAD", "other"]
    table = [{"text": f"t {i}", "label": labels[i % 6]} for i in range(61)]
    write_csv(tmp_path / "a.csv", table)
    source = load(settings(tmp_path / "a.csv", text_column="text"))
    assert len(source.labels) == 6
    alike = ["'BAD' (10), 'bad' (10)", "'Good' (11), 'good' (10), 'good ' (10)"]
    assert source.facts["alike_classes"] == alike


def test_numbers_that_are_written_in_two_ways_are_told(tmp_path: Path) -> None:
    labels = ["1", "2", "1.0", "01"]
    write_csv(tmp_path / "a.csv", [{"text": f"t {i}", "label": labels[i % 4]} for i in range(40)])
    facts = load(settings(tmp_path / "a.csv", text_column="text", label_column="label")).facts
    assert facts["alike_classes"] == ["'01' (10), '1' (10), '1.0' (10)"]


def test_a_test_set_without_a_class_of_training_is_refused(tmp_path: Path) -> None:
    for name, kinds in (("train", ("1", "2")), ("test", ("1.0", "2.0"))):
        table = [{"text": f"t {i}", "label": kinds[i % 2]} for i in range(40)]
        write_csv(tmp_path / f"{name}.csv", table)
    with pytest.raises(UserError, match=r"no class of the test set, such as '1\.0', occurs"):
        load(settings(tmp_path))


@pytest.mark.parametrize("odd", ["①", "+-1", "٣", "9" * 5000])
def test_digits_that_are_no_whole_number_are_text(odd: str, tmp_path: Path) -> None:
    write_csv(
        tmp_path / "a.csv", [{"text": f"t {i}", "label": ("0", odd)[i % 2]} for i in range(9)]
    )
    assert load(settings(tmp_path / "a.csv", label_column="label")).labels == sorted(["0", odd])


@pytest.mark.process
def test_a_run_warns_of_classes_that_are_alike(tmp_path: Path) -> None:
    labels = ["[b]Good", "[b]good"]
    table = [{"text": f"t {i}", "label": labels[i % 2]} for i in range(60)]
    write_csv(tmp_path / "train.csv", table)
    odd = [{"text": "  ", "label": "NEW"}, *({"text": f"s {i}", "label": "slip"} for i in (1, 2))]
    write_csv(tmp_path / "test.csv", [*table[:20], odd[0]])
    write_csv(tmp_path / "train.csv", [*(table * 8), odd[1]])
    sizes = ["--train_size", "all", "--test_size", "all", "--epochs", "1"]
    done = script("bert", "--tiny", "--dataset", str(tmp_path), *sizes, cwd=tmp_path)
    said = "warning: classes that differ in case, blanks or as 1, 1.0 alone (samples): "
    assert done.code == 0 and f"  {said}'[b]Good' (250), '[b]good' (250)\n" in done.out
    assert "  warning: classes with very few samples: 'NEW' (1); 'slip' (1)\n" in done.out
    new = "warning: classes without a training sample (test, validation samples): 'NEW' (1)"
    assert f"  {new}\n" in done.out
    blank = "warning: samples whose text is empty or blanks alone (a header not counted): "
    assert f"  {blank}1 of 21 rows of split test: 21\n" in done.out
    (environment,) = tmp_path.glob("outputs/*/*/*/environment.json")
    assert_declared("environment", json.loads(environment.read_text()))


def test_numbers_keep_their_order(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", [{"text": f"t {i}", "label": i % 12} for i in range(60)])
    assert load(settings(tmp_path / "a.csv")).labels == [str(n) for n in range(12)]


def test_a_class_for_each_sample_is_refused(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", [{"text": f"t {i}", "label": f"l {i}"} for i in range(20)])
    with pytest.raises(UserError, match=r"column label: 20 values \(class\) in 20 samples"):
        load(settings(tmp_path / "a.csv"))


def test_missing_classes_are_counted_and_placed(tmp_path: Path) -> None:
    table = [{"text": f"t {i}", "label": "" if i in (3, 7) else i % 2} for i in range(20)]
    write_csv(tmp_path / "train.csv", table)
    write_csv(tmp_path / "test.csv", rows(10, first=50))
    said = r"column label has no class \(empty\) in 2 of 20 rows of split train: 4, 8 "
    said += r"\(a header not counted\): remove these rows or give them a class$"
    for size in ("all", 19):  # of a subset, too, the rows are those of the file
        with pytest.raises(UserError, match=f"^{said}"):
            load(settings(tmp_path, train_size=size))
    write_csv(tmp_path / "test.csv", [{"text": f"t {i}", "label": i % 2 or ""} for i in range(10)])
    both = r"of split train: 4, 8; 5 of 10 rows of split test: 1, 3, 5, 7, 9 \(a header"
    with pytest.raises(UserError, match=both):
        load(settings(tmp_path))
    write_csv(tmp_path / "test.csv", [{"text": f"t {i}", "label": i % 2 or ""} for i in range(30)])
    with pytest.raises(UserError, match=r"15 of 30 rows of split test: 1, 3, .*, 19, \.\.\. \(a h"):
        load(settings(tmp_path))


def test_missing_texts_are_counted_and_placed(tmp_path: Path) -> None:
    table = [{"text": "" if i in (3, 7) else f"t {i}", "label": i % 2} for i in range(20)]
    write_csv(tmp_path / "train.csv", table)
    write_csv(tmp_path / "test.csv", [{"text": f"u {i}", "label": i % 2} for i in range(10)])
    said = r"column text has no text \(empty\) in 2 of 20 rows of split train: 4, 8 "
    said += r"\(a header not counted\): remove these rows or give them a text$"
    with pytest.raises(UserError, match=f"^{said}"):
        load(settings(tmp_path))


def test_all_missing_values_are_reported_together(tmp_path: Path) -> None:
    table = [{"a": f"t {i}", "b": f"u {i}", "label": i % 2} for i in range(20)]
    for row, column in ((3, "label"), (5, "a"), (7, "b"), (8, "b")):
        table[row][column] = ""
    write_csv(tmp_path / "a.csv", table)
    said = (
        r"column label has no class \(empty\) in 1 of 20 rows of split train: 4; "
        r"column a has no text \(empty\) in 1 of 20 rows of split train: 6; "
        r"column b has no text \(empty\) in 2 of 20 rows of split train: 8, 9 "
        r"\(a header not counted\): remove these rows or give them a class and a text"
    )
    with pytest.raises(UserError, match=f"^{said}$"):
        load(settings(tmp_path / "a.csv", text_column="a,b"))


def test_texts_of_blanks_are_counted_and_placed(tmp_path: Path) -> None:
    """A pair has a text where one of both has."""
    table = [{"a": f"t {i}", "b": " ", "label": i % 2} for i in range(20)]
    table[3]["a"], table[7]["a"] = "\t ", "\u00a0"
    write_csv(tmp_path / "a.csv", table)
    said = ["2 of 20 rows of split train: 4, 8"]
    for columns in ("a", "a,b"):
        facts = load(settings(tmp_path / "a.csv", text_column=columns, train_size="all")).facts
        assert facts["blank_texts"] == said
    table[3]["a"] = table[7]["a"] = "t"
    write_csv(tmp_path / "a.csv", table)
    assert "blank_texts" not in load(settings(tmp_path / "a.csv", text_column="a,b")).facts
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"t {i}" * (i != 2), "label": i % 2}) + "\n" for i in range(20))
    )
    source = load(settings(tmp_path / "a.jsonl", train_size="all", test_size="all"))
    assert source.facts["blank_texts"] == ["1 of 20 rows of split train: 3"]


def test_a_number_is_no_blank_text() -> None:
    """As a split that is not trained on may have them in the column of texts."""
    texts = datasets.Dataset.from_dict({"text": ["a", " "]})
    numbers = datasets.Dataset.from_dict({"text": [0, None, 7]})
    splits = datasets.DatasetDict({"train": texts, "more": numbers})
    told = ["1 of 2 rows of split train: 2", "1 of 3 rows of split more: 2"]
    assert _blank(splits, {"train": texts}, ["text"]) == told


def test_a_folder_of_images_with_metadata(tmp_path: Path) -> None:
    table = [{"file_name": f"{i}.png", "kind": WORDS[i % 2]} for i in range(20)]
    write_csv(tmp_path / "metadata.csv", table)
    for row in table:
        Image.new("RGB", (4, 4)).save(tmp_path / row["file_name"])
    source = load(settings(tmp_path, script="vit", label_column="kind"))
    assert (source.inputs, source.labels) == (["image"], ["bad", "good"])


def test_a_broken_line_of_json_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    lines = [json.dumps(row) for row in rows(20)]
    file.write_text("\n".join([*lines[:6], "", '{"text": "oops', *lines[6:]]))
    with pytest.raises(UserError, match=r"a\.jsonl cannot be read: line 8 is not JSON: "):
        load(settings(file))


def test_labels_of_several_kinds_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    kinds = [{"text": f"text {i}", "label": [0, "0"][i % 2]} for i in range(20)]
    file.write_text("\n".join(map(json.dumps, kinds)))
    with pytest.raises(UserError, match="column label holds values of several kinds, such as num"):
        load(settings(file))
