"""CSV files are read as the text that they hold, or refused with the line that does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from datasets import Dataset, Image, Value

from harness.core.provenance import check_inputs
from harness.core.settings import UserError
from harness.train.data.sources import _check_header, load
from tests.support.samples import WORDS, check_pairs, rows, settings, write_csv

EXTRA = "values and the header 2: quote texts that contain"


CARD = """---
configs:
- {config_name: one, data_files: train.csv}
- {config_name: other, data_files: train.csv, sep: ";"}
- {config_name: bare, data_files: train.csv, sep: ";", skiprows: 1, names: [n, review, mood]}
---
"""


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("text,text,label\n" + "one,two,x\nthree,four,y\n" * 10)
    with pytest.raises(UserError, match=r"a\.csv has several columns named text: rename all but"):
        load(settings(file))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(" \n")
    with pytest.raises(UserError, match=r"a\.csv cannot be read: it is empty"):
        load(settings(tmp_path / "a.csv"))


def test_semicolons_separate_columns_too(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", [{**row, "text": f"{row['text']}, so"} for row in rows(20)], ";")
    assert sorted(load(settings(tmp_path / "a.csv")).train["text"])[0] == "text 0, so"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([f"words {i},{WORDS[i % 2]}" for i in range(20)], "the first line has 'good'"),
        ([f"words {i},{i % 2}" for i in range(20)], "the first line has '0'"),
    ],
)
def test_a_file_without_header_is_refused(lines: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=f"{said}.*put a line with names, such as text,label"):
        load(settings(tmp_path / "a.csv"))


@pytest.mark.parametrize("sep", [",", ";", "\t", "|"])
def test_separators_and_columns_of_classes_are_found(sep: str, tmp_path: Path) -> None:
    table = [
        {"id": i, "review": f"r {i}, so; or", "mood": ["a", "b", "c"][i % 3]} for i in range(60)
    ]
    write_csv(tmp_path / "a.csv", table, sep)
    source = load(settings(tmp_path / "a.csv"))
    assert (source.inputs, source.labels) == (["review"], ["a", "b", "c"])


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["text {i}, so,{y}"] * 20, f"line 2 has 3 {EXTRA} commas"),  # pandas: an index, silently
        (["text {i}, so,{y}", *["text {i},{y}"] * 19], f"line 2 has 3 {EXTRA} commas"),
        (['"two\nlines {i}",{y}', "", "text {i},{y},,5"], f"line 5 has 4 {EXTRA} commas"),
        (["text {i},{y}"] * 10_000 + ["t,1,5"], f"line 10002 has 3 {EXTRA} commas"),
        (["text {i},{y},"] * 20, "line 2 has 3 .* remove the commas at the ends of lines"),
        (["text {i}|{y}|5"], f"line 2 has 3 {EXTRA} |, and give each column a name"),
    ],
)
def test_rows_longer_than_the_header_are_refused(
    lines: list[str], said: str, tmp_path: Path
) -> None:
    header = "review|sentiment" if "|" in lines[0] else "review,sentiment"
    body = [line.format(i=i, y=WORDS[i % 2]) for i, line in enumerate(lines)]
    (tmp_path / "a.csv").write_text("\n".join([header, *body]) + "\n")
    for dataset in (tmp_path, tmp_path / "a.csv"):
        with pytest.raises(UserError, match=rf"a\.csv cannot be read: {said.replace('|', '[|]')}"):
            load(settings(dataset))


def test_rows_of_a_folder_with_other_files_or_configurations_are_checked(tmp_path: Path) -> None:
    lines = ["review;mood", *(f"{i};r {i};{WORDS[i % 2]}" for i in range(20))]
    (tmp_path / "train.csv").write_text("\n".join(lines))
    (tmp_path / "notes.json").write_text("{}")
    said = rf"train\.csv cannot be read: line 2 has 3 {EXTRA} semicolons"
    with pytest.raises(UserError, match=said):
        load(settings(tmp_path))  # pandas: the first value an index, silently
    (tmp_path / "README.md").write_text(CARD)
    with pytest.raises(UserError, match=said):
        load(settings(tmp_path, dataset_config="other"))
    with pytest.raises(
        UserError, match=r"train\.csv has only one column.*separate columns by commas$"
    ):
        load(settings(tmp_path, dataset_config="one"))
    source = load(settings(tmp_path, dataset_config="bare", text_column="review"))
    assert source.labels == ["bad", "good"] and len(source.all_labels) == 20


def test_csv_files_beside_other_files_are_read_as_text(tmp_path: Path) -> None:
    table = [{"text": f"t {i}", "label": ("01", "1", "NA")[i % 3]} for i in range(60)]
    write_csv(tmp_path / "train.csv", table, ";")
    (tmp_path / "notes.json").write_text("{}")
    assert load(settings(tmp_path)).labels == ["01", "1", "NA"]


def test_the_rows_tell_the_separator_too(tmp_path: Path) -> None:
    header = "review, full, long;mood"
    lines = [f"r {i}{', so' * (i % 3)};{WORDS[i % 2]}" for i in range(20)]
    (tmp_path / "a.csv").write_text("\n".join([header, *lines]))
    source = load(settings(tmp_path / "a.csv"))
    assert (source.inputs, source.labels) == (["review, full, long"], ["bad", "good"])
    # Of two that fit, that which makes more columns.
    lines = [f"r {i}|x,{WORDS[i % 2]},{i}" for i in range(20)]
    (tmp_path / "b.csv").write_text("\n".join(["text|x,label,n", *lines]))
    assert load(settings(tmp_path / "b.csv")).inputs == ["text|x"]


def test_old_line_ends_are_read(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", rows(20))
    text = (tmp_path / "a.csv").read_text().replace("\r\n", "\n").replace("\n", "\r")
    (tmp_path / "a.csv").write_text(text, newline="")
    check_pairs(load(settings(tmp_path / "a.csv")))


@pytest.mark.parametrize(
    ("name", "sep", "known"),
    [("a.csv", "~", "commas, semicolons, tabs or [|]"), ("a.tsv", ",", "tabs")],
)
def test_a_file_of_one_column_is_refused(name: str, sep: str, known: str, tmp_path: Path) -> None:
    write_csv(tmp_path / name, rows(20), sep)
    said = f"{name} has only one column, 'text{sep}label': separate columns by {known}"
    with pytest.raises(UserError, match=f"{said}$"):
        load(settings(tmp_path / name))


@pytest.mark.parametrize(
    ("column", "values", "count"), [("year", ["2019", "2020"], 2), ("mood", ["good"], 1)]
)
def test_where_no_column_has_classes_their_values_are_counted(
    column: str, values: list[str], count: int, tmp_path: Path
) -> None:
    table = [{"review": f"r {i}", column: values[i % len(values)]} for i in range(20)]
    write_csv(tmp_path / "a.csv", [*table, {"review": "r", column: ""}])
    said = f"no column of classes among review, {column} "
    with pytest.raises(UserError) as raised:
        load(settings(tmp_path / "a.csv"))
    assert f"{said}(distinct values: review 21, {column} {count}): name one" in str(raised.value)
    words = Dataset.from_dict({"words": [["a"], ["b"]] * 10})
    words.save_to_disk(tmp_path / "lists")
    with pytest.raises(UserError, match="no column of classes among words: name one"):
        load(settings(tmp_path / "lists"))


@pytest.mark.parametrize("sep", [",", "\t"])
@pytest.mark.parametrize("column", ["first", "last"])
def test_a_stray_quote_that_swallows_rows_is_refused(tmp_path: Path, sep: str, column: str) -> None:
    texts = [f"text {i}" for i in range(40)]
    texts[7], texts[11] = '"so it was', '"and ended'
    rows = [f"{t}{sep}{i % 2}" for i, t in enumerate(texts)]
    head = f"text{sep}label"
    if column == "last":
        rows, head = [sep.join(row.split(sep)[::-1]) for row in rows], f"label{sep}text"
    file = tmp_path / "a.tsv" if sep == "\t" else tmp_path / "a.csv"
    file.write_text("\n".join([head, *rows]) + "\n")
    with pytest.raises(UserError, match=r"begins in line 9 goes on over 5 lines that all look li"):
        load(settings(file))


def test_texts_of_several_lines_are_texts(tmp_path: Path) -> None:
    """Also where each of their lines has a comma: only 0 and 1 stand where the class is."""
    texts = [f"Dear {i}, good\nbye, friend {i}" for i in range(40)]
    write_csv(tmp_path / "a.csv", [{"text": t, "label": i % 2} for i, t in enumerate(texts)])
    found = load(settings(tmp_path / "a.csv"))
    assert sum(found.sizes) == 40 and set(found.train["text"]) <= set(texts)


def test_no_picture_is_decoded_for_a_header(tmp_path: Path) -> None:
    """Beside a metadata.csv, all of them were."""

    class Pictures:
        features: ClassVar[dict[str, Any]] = {"image": Image(), "kind": Value("string")}
        column_names: ClassVar[list[str]] = [*features]

        def __getitem__(self, name: str) -> list[str]:
            assert name != "image"
            return ["cat", "cat", "dog"] if name == "cat" else ["a", "b", "c"]

    data: Any = Pictures()
    (file := tmp_path / "pictures.csv").write_text("image,kind\n")
    _check_header(settings(file), data)
    Pictures.column_names = ["image", "cat"]
    Pictures.features = {"image": Image(), "cat": Value("string")}
    with pytest.raises(UserError, match="the first line has 'cat' where the name of a column"):
        _check_header(settings(file), data)


DATES = ("2026-01-31", "2026-02-01T08:30", "2025-12-24 08:30:15.5Z", "2026-01-31 10:00:00 +01:00")


def test_dates_are_neither_text_nor_classes_unless_named(tmp_path: Path) -> None:
    table = [
        {"id": i, "opened": DATES[i % 4], "message": f"m {i}", "queue": WORDS[i % 2]}
        for i in range(60)
    ]
    write_csv(tmp_path / "a.csv", table)
    source = load(settings(tmp_path / "a.csv"))
    assert (source.inputs, source.facts["label_column"]) == (["message"], "queue")
    assert load(settings(tmp_path / "a.csv", text_column="opened")).inputs == ["opened"]
    by_day = load(settings(tmp_path / "a.csv", label_column="opened", text_column="message"))
    assert by_day.labels == sorted(DATES)
    write_csv(tmp_path / "b.csv", [{k: row[k] for k in ("id", "opened", "queue")} for row in table])
    with pytest.raises(UserError, match=r"b\.csv has no column of text among id, opened, queue"):
        load(settings(tmp_path / "b.csv", label_column="queue"))
    # One value that is no date makes it text again.
    write_csv(tmp_path / "c.csv", [*table, {**table[0], "opened": "2026-13-31"}])
    with pytest.raises(UserError, match=r"several columns of text \(opened, message\)"):
        load(settings(tmp_path / "c.csv", label_column="queue"))


def test_a_named_column_that_cannot_be_the_text_says_why(tmp_path: Path) -> None:
    table = [{"ticket_id": i, "message": f"m {i}", "queue": WORDS[i % 2]} for i in range(60)]
    write_csv(tmp_path / "a.csv", table)
    Dataset.from_list(table).to_parquet(tmp_path / "a.parquet")
    for file in (tmp_path / "a.csv", tmp_path / "a.parquet"):
        said = "--text_column ticket_id: it holds only numbers; the columns are ticket_id, message"
        with pytest.raises(UserError, match=said):
            load(settings(file, text_column="ticket_id"))
        said = "--text_column queue: it is taken for the classes: name another column of them with"
        with pytest.raises(UserError, match=said):
            load(settings(file, text_column="queue"))


def test_columns_that_a_file_lacks_are_refused_ahead_in_the_words_of_the_run(
    tmp_path: Path,
) -> None:
    rows = [{"review": f"m {i}", "sentiment": WORDS[i % 2]} for i in range(60)]
    write_csv(file := tmp_path / "a.csv", rows)
    for wrong in (
        {"label_column": "sentimant"},
        {"label_column": "mood"},
        {"label_column": "sentiment", "text_column": "review,headline"},
        {"label_column": "sentiment", "text_column": "txet"},
    ):
        answers = []
        for check in (check_inputs, load):
            with pytest.raises(UserError) as refused:
                check(settings(file, **wrong))
            answers.append(str(refused.value))
        assert answers[0] == answers[1]
    check_inputs(settings(file, label_column="sentiment", text_column="review"))
    check_inputs(settings(file))
    # Only where nothing resembles the name may the first line be no header.
    with pytest.raises(UserError, match=r"did you mean sentiment\? .* review, sentiment$"):
        check_inputs(settings(file, label_column="sentimant"))
    (tmp_path / "bare.csv").write_text("great phone,good\nbad case,poor\n" * 20)
    known = r"the columns are 'great phone', good \(the first line of bare\.csv, read as the header"
    with pytest.raises(UserError, match=f"--label_column sentiment: {known}"):
        check_inputs(settings(tmp_path / "bare.csv", label_column="sentiment"))


@pytest.mark.parametrize(
    "content",
    [b"", b"\n\ntext,label\na,b\n", b"text,label,\na,b,c\n", b"text\na\n", b"a,a\nb,c\n",
     "täxt,label\na,b\n".encode("latin-1"), "text,label\na,b\n".encode("utf-16"),
     b'text","label\na,b\n'],
)  # fmt: skip
def test_a_header_that_may_be_read_otherwise_is_left_to_the_run(
    content: bytes, tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    check_inputs(settings(tmp_path / "a.csv", label_column="none"))
