"""The tables in README and docs match the published records; a mistake is one line."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from docs.generate.tables import main, with_tables
from harness.core.settings import UserError

END = "<!-- end of table -->"
TOGETHER = "outputs/published/exchange/sweeps/start_together-tiny"
EXCHANGE = "outputs/published/exchange/sweeps/slow_link_exchange-tiny"


def test_the_tables_match_the_records(root: Path) -> None:
    """Those of every page that `make figures` redraws, and no other file has any."""
    (patterns,) = re.findall(r"for page in (.*); do", (root / "Makefile").read_text())
    pages = [page for pattern in patterns.split() for page in sorted(root.glob(pattern))]
    texts = {page: page.read_text() for page in pages}
    places = {page.name: text.count("<!-- end of ") for page, text in texts.items()}
    expected = {"README.md": 2, "nodes.md": 5, "prediction.md": 1, "reading.md": 9,
                "strategies.md": 35, "sweeps.md": 1}  # fmt: skip
    assert expected.items() <= places.items()
    for page, text in texts.items():
        assert with_tables(text, page.parent) == text, f"make figures: a table of {page} is old"


def test_answers_replace_what_was_there(root: Path, tmp_path: Path) -> None:
    (tmp_path / "outputs").symlink_to(root / "outputs")
    start = f"<!-- answers {TOGETHER}: sync_every=50, sync_first=44 -->\n"
    file = tmp_path / "PAGE.md"
    file.write_text(f"{start}old\n<!-- end of answers -->\n")
    assert main([str(file)]) == 0
    first, what, measure, *_, last = file.read_text().splitlines()
    assert first == start.strip() and last == "<!-- end of answers -->"
    assert what == "- diloco h50 first44 lr1 m0.5 against ddp:"
    assert measure.startswith("  - wall time to accuracy 0.9: 0.58 times as long")


def test_answers_against_another_baseline(root: Path) -> None:
    """Each is the other's inverse."""
    found = []
    for one, other in (("direct", "backend"), ("backend", "direct")):
        case = f"strategy=ddp, exchange={one}; against strategy=ddp, exchange={other}"
        place = f"<!-- answers {EXCHANGE}: {case} -->\n<!-- end of answers -->\n"
        _, what, measure, *_ = with_tables(place, root).splitlines()
        assert what == f"- ddp, exchange {one} against ddp, exchange {other}:"
        found.append(float(re.findall(r"[\d.]+", measure.partition(": ")[2])[0]))
    assert found[0] < 1 and found[0] * found[1] == pytest.approx(1, rel=0.02)


def test_verdicts_replace_the_old_text(root: Path) -> None:
    place = f"<!-- verdicts {EXCHANGE} -->\nold\n<!-- end of verdicts -->\n"
    _, first, *others, _ = with_tables(place, root).splitlines()
    assert len(others) == 2
    assert first.startswith(
        "- Expected of ddp, exchange direct against ddp, exchange backend: wall time to accuracy "
        "0.9 at most 0.5 times as long: holds, 0.40 (0.39 to 0.41); "
    )


def test_every_sweep_file_is_a_row_with_its_question(tmp_path: Path) -> None:
    for name, time in (("far", "not measured; --tiny 9 min"), ("near", "2 h; --tiny 8 min")):
        lines = f"# Question: how {name},\n#    and why?\n# Time:     {time}\nscript: vit\n"
        (tmp_path / f"{name}.yaml").write_text(lines)
    place = "<!-- sweeps . -->\nold\n<!-- end of sweeps -->\n"
    (tmp_path / "bare.yaml").write_text("script: vit\n")
    with pytest.raises(UserError, match=r"bare\.yaml: its header has no question and no time"):
        with_tables(place, tmp_path)
    (tmp_path / "bare.yaml").unlink()
    _, heading, _, *rows, _ = with_tables(place, tmp_path).splitlines()
    assert heading == "| sweep | question | time |"
    assert rows == [
        "| far | how far, and why? | --tiny 9 min |",
        "| near | how near, and why? | 2 h; --tiny 8 min |",
    ]


def test_chosen_columns_replace_what_was_there_and_nothing_else(root: Path, tmp_path: Path) -> None:
    (tmp_path / "outputs").symlink_to(root / "outputs")
    place = f"before\n<!-- table {TOGETHER}: strategy, n -->\n"
    file = tmp_path / "PAGE.md"
    file.write_text(f"{place}old\n{END}\nafter\n{place}{END}\n")
    assert main([str(file)]) == 0
    rows = "\n".join(
        f"| {name} | 10/10 |"
        for name in ("ddp", "diloco h10 lr1 m0.5", "diloco h10 first44 lr1 m0.5",
                     "diloco h50 lr1 m0.5", "diloco h50 first44 lr1 m0.5")
    )  # fmt: skip
    table = f"| strategy | n |\n|---|--:|\n{rows}\n"
    assert file.read_text() == f"{place}{table}{END}\nafter\n{place}{table}{END}\n"
    assert with_tables(file.read_text(), root) == file.read_text()


def test_runs_of_another_folder_are_the_last_row(root: Path) -> None:
    news, words = "outputs/published/sweeps/news", "outputs/published/words"
    start = f"<!-- table {news}: setup, updates, accuracy"
    with_words = f"{start}; and words alone of {words} -->\n{END}\n"
    *rows, last, _ = with_tables(with_words, root).splitlines()
    assert rows[1:] == with_tables(f"{start} -->\n{END}\n", root).splitlines()[1:-1]
    assert last == "| words alone | 240 | 0.8613 ± 0.0030 |"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"<!-- table {TOGETHER}: strategy, nothing -->\n{END}\n", "no column nothing: there are"),
        (f"<!-- table {TOGETHER}: strategy -->\nold\n", "is not closed"),
        (f"<!-- table {TOGETHER} -->\n{END}\n", "no column : there are"),
        (f"<!-- table {TOGETHER}: n -->\n<!-- table {TOGETHER}: n -->\n{END}\n", "is not closed"),
        (
            f"<!-- answers {TOGETHER}: setup=9_9 -->\n<!-- end of answers -->\n",
            "no answer for setup=9_9",
        ),
        (
            f"<!-- answers {TOGETHER}: strategy=diloco; against strategy=ddp, lr=9 -->\n"
            "<!-- end of answers -->\n",
            "no run has strategy=ddp, lr=9",
        ),
        (
            "<!-- verdicts outputs/published/sweeps/prediction-tiny -->\n"
            "<!-- end of verdicts -->\n",
            "expects nothing in numbers",
        ),
        ("<!-- sweeps docs -->\n<!-- end of sweeps -->\n", "docs: no sweep file"),
        (f"<!-- table outputs/nowhere: n -->\n{END}\n", "nowhere"),
        (f"<!-- table {TOGETHER}: n; and words -->\n{END}\n", "expected NAME of FOLDER"),
        (f"<!-- table {TOGETHER}: n; and all of {TOGETHER} -->\n{END}\n", "with runs of one kind"),
    ],
)
def test_a_place_that_is_not_one(text: str, words: str, root: Path) -> None:
    with pytest.raises(UserError, match=words):
        with_tables(text, root)


def test_a_missing_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2 and main([str(tmp_path / "none.md")]) == 2
    usage, missing = capsys.readouterr().err.splitlines()
    assert "usage: " in usage and "none.md cannot be read" in missing


def test_times_on_the_pages_are_those_of_the_records(root: Path) -> None:
    def walls(sweep: str) -> dict[tuple[str, str], list[float]]:
        found: dict[tuple[str, str], list[float]] = {}
        with (root / f"outputs/published/sweeps/{sweep}/runs.csv").open(newline="") as file:
            for run in csv.DictReader(file):
                found.setdefault((run["script"], run["setup"]), []).append(float(run["wall_s"]))
        return found

    demo = {key: sum(times) for key, times in walls("demo-tiny").items()}
    four, vit = f"{sum(demo.values()):.0f} s", f"{demo['vit', '1_1']:.0f} s"
    of_vit = [time for key, times in walls("batch_size-tiny").items() if "vit" in key
              for time in times]  # fmt: skip
    many = f"{sum(of_vit):.0f} s"
    readme, guide = (
        " ".join((root / page).read_text().split()) for page in ("README.md", "docs/guide.md")
    )
    assert len(demo) == 4 and f"the four runs took {four}." in readme
    assert f"the four published runs took {four} of wall" in guide
    assert f"| {four} for its four published runs" in guide
    assert f"this took {vit} on 2 cores." in readme
    assert f"| {vit} and {demo['bert', '1_1']:.0f} s on 2 cores, by" in guide
    assert f"| {demo['bert', '1_2']:.0f} s on 2 cores, by" in guide
    assert len(of_vit) == 18 and f"18 published ViT runs took {many}:" in readme
    assert f"| {many} for its 18 published runs of ViT" in guide


def test_what_saving_takes_is_what_the_records_say(root: Path) -> None:
    shares = [
        float(run["save_time_s"]) / float(run["wall_s"])
        for folder in ("outputs/published", "records/xeon")
        for run in csv.DictReader((root / folder / "sweeps/fsdp/runs.csv").open(newline=""))
    ]
    text = " ".join((root / "docs/measures.md").read_text().split())
    assert len(shares) == 40
    assert f"it was {100 * min(shares):.0f} to {100 * max(shares):.0f} %." in text
