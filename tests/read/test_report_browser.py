"""The report in a real browser: no complaint, every figure, no page wider than its window."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.read.report.report import make_report
from tests.support.browser import browser, chromium

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(chromium() is None, reason="needs Chromium: apt install chromium"),
]
SWEEP = "outputs/published/sweeps/slow_links_four-tiny"
DRAWINGS = "[...document.querySelectorAll('svg.figure')]"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = Path(__file__).resolve().parents[2]
    return make_report(root / SWEEP, tmp_path_factory.mktemp("report"))[0]


def test_the_page_is_whole_at_every_width_and_in_the_dark(report: Path, tmp_path: Path) -> None:
    names = sorted(file.stem for file in report.parent.glob("*/figures/*.svg"))
    names = [name for name in names if not name.endswith("-dark")]
    assert len(names) >= 5
    with browser(tmp_path) as page:
        grounds = set()
        for width, dark in ((400, False), (1400, False), (1400, True)):
            page.open(report, width, dark)
            assert page.complaints() == []
            whole = page.value("document.documentElement.scrollWidth")
            assert whole == page.value("document.documentElement.clientWidth") <= width
            shown = page.value(f"{DRAWINGS}.map(s => s.parentElement.parentElement.id)")
            ours = [f"slow_links_four_tiny-{name}-figure" for name in names]
            assert sorted(shown) == sorted(ours)
            sizes = page.value(f"{DRAWINGS}.map(s => s.getBoundingClientRect().height)")
            assert min(sizes) > 100
            labels = page.value(f"{DRAWINGS}.map(s => s.getAttribute('aria-label').length)")
            assert min(labels) > 40
            grounds.add(page.value("getComputedStyle(document.body).backgroundColor"))
            patch = "document.querySelector('svg.figure [id$=patch_1] path')"
            grounds.add(page.value(f"getComputedStyle({patch}).fill"))
        assert grounds == {"rgb(255, 255, 255)", "rgb(13, 17, 23)"}  # of page and figures alike


def test_points_say_what_they_are_and_headings_sort(report: Path, tmp_path: Path) -> None:
    with browser(tmp_path) as page:
        page.open(report, 1400)
        point = "document.querySelector('#slow_links_four_tiny-frontier-figure [data-tip]')"
        page.value(f"{point}.scrollIntoView({{block: 'center'}})")
        box = page.value(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
                         f"({point}.getBoundingClientRect())")  # fmt: skip
        assert page.value("document.getElementById('tip').hidden") is True
        page.move(*box)
        assert page.value("document.getElementById('tip').hidden") is False
        told = page.value("document.getElementById('tip').textContent")
        assert "seed" in told and told in page.value(
            "[...document.querySelectorAll('[data-tip]')].map(p => p.dataset.tip)"
        )
        column = (
            "[...document.querySelector('tbody').rows].map(r => parseFloat(r.cells[2].textContent))"
        )
        for turn in (1, -1):
            page.value("document.querySelectorAll('th')[2].click()")
            values = page.value(column)
            assert values == sorted(values, reverse=turn < 0) and len(set(values)) > 1
        assert page.complaints() == []
