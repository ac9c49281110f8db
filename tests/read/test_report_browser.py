"""The report in a real browser: no complaint, nothing wider than its window or on top of another,
tables that are sorted and filtered as one expects.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from harness.read.report.report import make_report
from tests.support.browser import Page, browser, chromium

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(chromium() is None, reason="needs Chromium: apt install chromium"),
]
DRAWINGS = "[...document.querySelectorAll('svg.figure')]"
EVERYTHING = "document.querySelectorAll('details').forEach(part => part.open = true)"
BOX = "(e => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom] })"

Box = tuple[float, float, float, float]


@pytest.fixture(scope="module")
def report_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = Path(__file__).resolve().parents[2]

    @cache
    def made(sweep: str) -> Path:
        (folder,) = root.glob(f"outputs/published/**/sweeps/{sweep}-tiny")
        return make_report(folder, tmp_path_factory.mktemp(sweep))[0]

    return made


@pytest.fixture(scope="module")
def together(report_of: Callable[[str], Path]) -> Path:
    return report_of("start_together")


@pytest.fixture(scope="module")
def links(report_of: Callable[[str], Path]) -> Path:
    """The largest: set-ups, links, strategies, two of everything."""
    return report_of("slow_links")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


def boxes(page: Page, elements: str) -> list[Box]:
    """Of the elements that are shown."""
    found = page.value(f"{elements}.filter(e => e.checkVisibility()).map({BOX})")
    return [tuple(each) for each in found]


def overlap(one: Box, other: Box) -> float:
    """As a share of the smaller one."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    areas = [(b[2] - b[0]) * (b[3] - b[1]) for b in (one, other)]
    return max(width, 0) * max(height, 0) / max(min(areas), 1e-9)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 900, 1400])
def test_nothing_is_wider_than_the_window_or_on_top_of_another(
    width: int, dark: bool, together: Path, page: Page
) -> None:
    page.open(together, width, dark)
    for open_first in ("", EVERYTHING):
        page.value(open_first)
        whole = page.value("document.documentElement.scrollWidth")
        assert whole == page.value("document.documentElement.clientWidth") <= width
        # What is wider than its place scrolls in it; all else ends before the window does.
        plain = "[...document.body.querySelectorAll('*')].filter(e => !e.closest('.wide *, pre *'))"
        assert max(right for _, _, right, _ in boxes(page, plain)) <= width
        blocks = (
            "[...document.querySelectorAll('h2, h3, h4, p, li, .wide, figcaption, dt, dd, form')]"
        )
        inner = f"{blocks}.filter(e => !e.querySelector('li') && !e.parentElement.closest('form'))"
        shown = boxes(page, inner)
        assert len(shown) > 30
        for one, other in itertools.combinations(shown, 2):
            assert overlap(one, other) < 0.01, (one, other)
    assert page.complaints() == []
    ground = "rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)"
    assert page.value("getComputedStyle(document.body).backgroundColor") == ground
    patch = "document.querySelector('svg.figure [id$=patch_1] path')"
    assert page.value(f"getComputedStyle({patch}).fill") == ground  # figures follow the page


@pytest.mark.parametrize("width", [320, 400, 760])
def test_a_figure_can_be_read_in_a_narrow_window(width: int, together: Path, page: Page) -> None:
    """Its letters keep their size; the figure scrolls in its place, the page does not."""
    page.open(together, width)
    page.value(EVERYTHING)
    figures = f"{DRAWINGS}.map(s => s.parentElement)"
    hidden = page.value(f"{figures}.map(place => place.scrollWidth - place.clientWidth)")
    assert len(hidden) >= 5 and (max(hidden) > 100) == (width < 600)
    texts = "[...document.querySelectorAll('svg.figure text')]"
    assert min(page.value(f"{texts}.map(t => t.getBoundingClientRect().height)")) >= 8
    assert page.value("document.documentElement.scrollWidth") <= width
    assert "sideways" in page.value(
        "getComputedStyle(document.querySelector('figcaption'), '::after').content"
    )


@pytest.mark.parametrize("sweep", ["start_together", "slow_links", "prediction"])
def test_every_figure_is_whole_and_its_words_are_apart(
    sweep: str, report_of: Callable[[str], Path], page: Page
) -> None:
    report = report_of(sweep)
    names = sorted(file.stem for file in report.parent.glob("*/figures/*.svg"))
    assert len(names) >= 5 and not any(name.endswith("-dark") for name in names)
    page.open(report, 1400)
    page.value(EVERYTHING)
    shown = page.value(f"{DRAWINGS}.map(s => s.parentElement.parentElement.id)")
    assert sorted(shown) == sorted(f"{sweep}_tiny-{name}-figure" for name in names)
    labels = page.value(f"{DRAWINGS}.map(s => s.getAttribute('aria-label').length)")
    assert min(labels) > 40
    for name in shown:
        drawing = f"document.querySelector('#{name} svg')"
        ((left, top, right, bottom),) = boxes(page, f"[{drawing}]")
        assert bottom - top > 100 and right - left > 300
        texts = boxes(page, f"[...{drawing}.querySelectorAll('text')]")
        assert len(texts) >= 5
        for x, y, end, foot in texts:
            assert left - 1 <= x and end <= right + 1 and top - 1 <= y and foot <= bottom + 1, name
        for one, other in itertools.combinations(texts, 2):
            assert overlap(one, other) < 0.2, (name, one, other)


def test_answers_come_first_then_their_figure_and_the_rest_is_folded(
    together: Path, page: Page
) -> None:
    page.open(together, 1400)
    section = "document.querySelector('section.sweep')"
    heading, lead, *rest = page.value(f"[...{section}.children].map(e => e.tagName)")
    assert (heading, lead) == ("H2", "DIV") and {*rest} == {"DETAILS"}
    opening = page.value(f"[...{section}.querySelectorAll('.lead h3')].map(e => e.innerText)")
    assert opening[:2] == ["Hypothesis", "Answer"]
    items = page.value(f"[...{section}.querySelectorAll('.lead li')].map(e => e.innerText)")
    verdicts = [item for item in items if item.startswith("Expected of ")]
    assert len(verdicts) == 6 and items[:6] == verdicts
    assert "accuracy at least 0.9 is reached first, by wall time, by strategy" in items[6]
    answer = items[7].split("\n")
    assert answer[0].endswith("against ddp:") and answer[-1].endswith("runs each.")
    assert answer[1].startswith("wall time to accuracy 0.9: ")
    ((_, _, right, foot),) = boxes(page, "[document.querySelector('.lead li')]")
    figures = "[...document.querySelectorAll('section.sweep figure')]"
    ((x, y, *_),) = boxes(page, figures)  # both times to its target, and what they are worth
    assert (x > right or y > foot) and y < 900  # beside or below it, within the first window
    shown = page.value(f"{figures}.slice(0, 1).map(figure => figure.id)")
    assert shown == ["start_together_tiny-time_to_accuracy-figure"]
    assert boxes(page, "[...document.querySelectorAll('table')]") == []
    page.value("document.getElementById('unfold').click()")
    # Results, by node, and the sweep's own table.
    assert len(boxes(page, "[...document.querySelectorAll('table')]")) == 3
    assert len(boxes(page, figures)) >= 5
    page.value("document.getElementById('unfold').click()")
    assert boxes(page, "[...document.querySelectorAll('table')]") == []


def test_points_say_what_they_are(together: Path, page: Page) -> None:
    page.open(together, 1400)
    page.value(EVERYTHING)
    point = "document.querySelector('#start_together_tiny-frontier-figure [data-tip]')"
    page.value(f"{point}.scrollIntoView({{block: 'center'}})")
    ((left, top, right, bottom),) = boxes(page, f"[{point}]")
    assert page.value("document.getElementById('tip').hidden") is True
    page.move((left + right) / 2, (top + bottom) / 2)
    assert page.value("document.getElementById('tip').hidden") is False
    told = page.value("document.getElementById('tip').textContent")
    assert "seed" in told and told in page.value(
        "[...document.querySelectorAll('[data-tip]')].map(p => p.dataset.tip)"
    )


ORDERED = {
    "set-ups": ["1_1", "1_2", "1_10", "2_1", "16_8"],
    "means with their spread": ["0.80 ± 0.30", "0.95 ± 0.01", "1.20 ± 0.00", "10.00 ± 1.00"],
    "means with an interval": ["-12.5 (-20.1 to -4.9)", "-1.20 (-2.26 to -0.15)", "+0.09", "2.31"],
    "thousands": ["63.6", "801 ± 12", "1,601 ± 97", "12,000", "1,200,000"],
    "times": ["761 µs", "14.3 ms", "8.44 s", "36 min 31 s", "1 h 22 min", "10 h 5 min"],
    "sizes": ["400 kB", "1.5 MB", "0.5 GiB", "1 GB"],
    "links": ["1ms/50mbit", "1ms/1000mbit", "20ms/50mbit", "80ms/50mbit", "150ms/50mbit"],
    "strategies": ["ddp", "diloco h5", "diloco h10", "diloco h50", "local_sgd h10"],
    "shares": ["-3.5%", "+0.4%¶", "+12.0%"],
    "numbers of runs": ["0/3", "2/3§", "3/3", "10/10"],
    "marked numbers": ["16†", "176", "352†‡"],
    "learning rates": ["2e-05", "0.0001", "0.003", "1e+01"],
    "targets missed": ["2.65 ± 0.17", "median 4.69", "19.5", "not reached"],
    "outcomes among numbers": ["0.1", "0.5", "oom", "timeout"],
}


@pytest.mark.parametrize("what", ORDERED)
def test_a_column_is_ordered_by_what_its_cells_mean(what: str, together: Path, page: Page) -> None:
    page.open(together, 900)
    right = ORDERED[what]
    for mixed in (right[::-1], sorted(right), right[1:] + right[:1]):
        given = ["-", *mixed, "", "base"]
        for up in (True, False):
            call = f"sorted({given!r}, String, {str(up).lower()})"
            # What is missing stands last both ways.
            assert page.value(call) == [*(right if up else right[::-1]), "-", "", "base"]


def column(page: Page, section: str, number: int) -> list[str]:
    rows = f"[...document.querySelectorAll('{section} tbody tr:not([hidden])')]"
    texts: list[str] = page.value(f"{rows}.map(r => r.cells[{number}].textContent)")
    return texts


def headings(page: Page, table: str) -> list[str]:
    found: list[str] = page.value(
        f"[...document.querySelectorAll('{table} th')].map(h => h.textContent)"
    )
    return found


def key(page: Page, name: str, code: str = "") -> None:
    for kind in ("keyDown", "keyUp"):
        page.ask("Input.dispatchKeyEvent", type=kind, key=name, code=name, text=code,
                 windowsVirtualKeyCode={"Enter": 13, "ArrowDown": 40}.get(name, 0))  # fmt: skip


def numbers(texts: list[str]) -> list[float]:
    return [float(text.partition(" ")[0].replace(",", "").rstrip("†§")) for text in texts]


def test_a_heading_sorts_its_table_by_mouse_and_keys(links: Path, page: Page) -> None:
    page.open(links, 1400)
    page.value(EVERYTHING)
    page.value(
        "[...document.querySelectorAll('section.sweep > details')].find(d => "
        "d.querySelector('h3').textContent.startsWith('All that')).id = 'compared'"
    )
    table = "#compared"
    at = {heading: n for n, heading in enumerate(headings(page, table))}
    before = column(page, table, at["samples/s"])
    heading = f"document.querySelectorAll('{table} th')[{at['samples/s']}]"
    page.value(f"{heading}.querySelector('button').focus()")
    for turn, said in enumerate(("ascending", "descending")):
        key(page, "Enter", "\r")
        assert page.value(f"{heading}.getAttribute('aria-sort')") == said
        values = numbers(column(page, table, at["samples/s"]))
        assert values == sorted(numbers(before), reverse=bool(turn)) and len({*values}) > 10
        assert max(values) > 1000
    page.value(f"document.querySelectorAll('{table} th')[{at['target wall s']}].click()")
    reached = column(page, table, at["target wall s"])
    known = [text for text in reached if text != "-"]
    assert reached == [*known, *["-"] * reached.count("-")]  # what is unknown stands last
    missed = [text for text in known if text == "not reached" or text.startswith("missed ")]
    assert missed and len({*missed}) > 1 and known[-len(missed) :] == missed != known
    page.value(f"document.querySelectorAll('{table} th')[{at['acc. points']}].click()")
    points = column(page, table, at["acc. points"])
    known = [text for text in points if text not in ("base", "-")]
    assert points[: len(known)] == known and {"base", "-"} == {*points[len(known) :]}
    assert numbers([points[0]])[0] < -5
    assert page.complaints() == []


def test_a_node_stays_below_its_group(together: Path, page: Page) -> None:
    page.open(together, 900)
    rows = "".join(
        f"<tr{' data-part' if part else ''}><td>{name}</td><td>{number}</td></tr>"
        for name, number, part in (("a", 3, 0), ("", 9, 1), ("b", 1, 0), ("", 8, 1), ("", 7, 1))
    )
    body = "document.querySelector('section.sweep tbody')"
    page.value(f"{body}.innerHTML = `{rows}`")
    page.value("document.querySelectorAll('section.sweep th')[1].click()")
    texts = page.value(f"[...{body}.rows].map(r => r.textContent)")
    assert texts == ["b1", "8", "7", "a3", "9"]


def chosen(page: Page, **values: str) -> None:
    page.value("document.getElementById('filter').reset()")
    for name, value in values.items():
        select = f"document.querySelector('#filter select[name={name}]')"
        page.value(f"{select}.value = {value!r}; {select}.dispatchEvent(new Event('input', "
                   "{bubbles: true}))")  # fmt: skip


def test_a_filter_acts_on_all_tables(links: Path, page: Page) -> None:
    page.open(links, 1400)
    page.value(EVERYTHING)
    options = {
        name: page.value(
            f"[...document.querySelector('#filter select[name={name}]').options].map(o => o.text)"
        )
        for name in ("script", "setup", "strategy", "link")
    }
    assert options["setup"] == ["all", "2_1", "4_1"]
    assert options["link"] == ["all", "1ms/50mbit", "1ms/1000mbit", "20ms/50mbit", "80ms/50mbit"]
    assert options["strategy"][:4] == ["all", "ddp", "ddp powersgd", "diloco h10 lr1 m0.5"]
    shown = "[...document.querySelectorAll('#filter label')].filter(l => !l.hidden).length"
    assert page.value(shown) == 3  # all runs are of one script
    counts = "[...document.querySelectorAll('.count')].map(c => c.textContent)"
    whole = page.value(counts)
    assert len(whole) >= 2 and all(" of " not in text for text in whole)
    chosen(page, setup="4_1", link="20ms/50mbit")
    visible: list[Any] = page.value(
        "[...document.querySelectorAll('tbody')].map(b => "
        "[...b.rows].filter(r => r.checkVisibility()).map(r => r.dataset.setup + ' ' + "
        "r.dataset.link))"
    )
    assert len(visible) == len(whole) and all(visible)
    assert {text for table in visible for text in table} == {"4_1 20ms/50mbit"}
    assert "5 of 44 rows" in page.value(counts)
    told = page.value("document.querySelector('#filter output').textContent")
    assert " rows, in 1 of 1 sections; answers and figures show all runs" in told
    # By the keys alone: the next strategy of the list.
    chosen(page, setup="4_1")
    page.value("document.querySelector('#filter select[name=strategy]').focus()")
    key(page, "ArrowDown")
    assert page.value("document.activeElement.value") == "ddp"
    assert "4 of 44 rows" in page.value(counts)
    page.value("document.querySelector('#filter button[type=reset]').click()")
    page.ask("Runtime.evaluate", expression="new Promise(r => setTimeout(r, 20))",
             awaitPromise=True)  # fmt: skip
    assert page.value(counts) == whole
    assert page.complaints() == []


def test_a_sweep_of_which_no_row_is_left_is_hidden(
    tmp_path: Path, page: Page, together: Path
) -> None:
    text = together.read_text()
    start, end = text.index('<section id="start_together_tiny"'), text.index('<section id="defin')
    section = text[start:end]
    other = section.replace('id="start', 'id="other').replace(
        'data-setup="4_1"', 'data-setup="1_1"'
    )
    link = '<li><a href="#other_together_tiny">other</a></li></ul></nav>'
    both = text.replace(section, section + other).replace("</ul></nav>", link)
    (tmp_path / "both.html").write_text(both)
    page.open(tmp_path / "both.html", 900)
    chosen(page, setup="1_1")
    hidden = "[...document.querySelectorAll('section.sweep')].map(s => s.hidden)"
    assert page.value(hidden) == [True, False]
    links = "[...document.querySelectorAll('nav > ul > li')].map(l => l.hidden)"
    assert page.value(links) == [True, False, False]
    told = page.value("document.querySelector('#filter output').textContent")
    assert "in 1 of 2 sections" in told


def test_every_table_has_its_numbers_beside_it(links: Path) -> None:
    page = links.read_text()
    tables = page.count("<table>")
    assert tables >= 2
    for file in ("table.csv", "runs.csv"):
        assert page.count(f'href="slow_links_tiny/{file}"') == tables
        assert (links.parent / "slow_links_tiny" / file).is_file()
