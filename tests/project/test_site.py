"""The site of make docs: every file that README leads to, and no link that leads nowhere."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SITE = ".ci/site.py"


@pytest.fixture
def pages(root: Path) -> Any:
    return runpy.run_path(str(root / SITE))["Pages"]


def test_pages_folders_and_code_become_pages(tmp_path: Path, pages: Any) -> None:
    code = tmp_path / "rooms" / "links.py"
    code.parent.mkdir()
    code.write_text("PLACES = {}\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "guide.md").write_text("# G\n[back](../README.md#r) [all](../rooms/)")
    text = '# R\n[g](docs/guide.md#g) [c](rooms/links.py) [w](https://a.b/c) <img src="a.png">'
    (tmp_path / "README.md").write_text(text)
    (tmp_path / "a.png").write_bytes(b"picture")
    pages(tmp_path, site := tmp_path / "site")
    assert {f.relative_to(site).as_posix(): f.read_text() for f in site.rglob("*.*")} == {
        "README.md": text.replace("links.py", "links.py.md"),
        "docs/guide.md": "# G\n[back](../README.md#r) [all](../rooms/index.md)",
        "rooms/index.md": "# rooms\n\n- [links.py](links.py.md)\n",
        "rooms/links.py.md": "# links.py\n\n````py\nPLACES = {}\n\n````\n",
        "a.png": "picture",
    }


@pytest.mark.parametrize("target", ["gone.md", "gone/", ".."])
def test_a_link_to_nothing_ends_it(target: str, tmp_path: Path, pages: Any) -> None:
    (tmp_path / "README.md").write_text(f"[gone]({target})")
    with pytest.raises(SystemExit, match=f"leads to no file of ours: {re.escape(target)}$"):
        pages(tmp_path, tmp_path / "site")


def test_the_pages_of_the_repository(root: Path, tmp_path: Path, pages: Any) -> None:
    names = pages(root, tmp_path).names
    assert {*root.glob("docs/*.md"), root / "outputs" / "README.md", root / "LICENSE"} <= {*names}


@pytest.mark.process
@pytest.mark.slow
def test_every_link_of_the_site_leads_somewhere(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("zensical")
    site = tmp_path / "site"
    command = [sys.executable, SITE, str(site)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    links = 0
    for page in site.rglob("*.html"):
        body = re.sub(r"<script.*?</script>", "", page.read_text(), flags=re.DOTALL)
        for link in re.findall(r'(?:href|src|srcset)="([^"]*)"', body):
            if page.name == "404.html" or "://" in link or link.startswith("data:"):
                continue
            file, _, part = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{page}: {link}"
            assert not part or f'id="{part}"' in target.read_text(), f"{page}: {link}"
            links += 1
    assert links > 1000
