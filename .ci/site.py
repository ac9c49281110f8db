"""The site of make docs: README.md and everything that its pages lead to, links checked.

python .ci/site.py [FOLDER]     where the site goes, site/ unless given
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\(|src=\"|srcset=\")(?!\w+:|#)([^)\"#]+)")
SHOWN = {".py", ".yaml", ".sh", ".cff", ""}  # browsers would download these: they become pages
SETTINGS = """
[project]
site_name = "harness"
docs_dir = "pages"
use_directory_urls = false
nav = [{nav}]

[project.theme]
font = false
features = ["navigation.top", "content.code.copy"]
"""


class Pages:
    """A copy of the repository's files as far as links lead, from README.md on."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder, self.names = root, folder, dict[Path, str]()
        self.add(root / "README.md")

    def add(self, file: Path) -> str:
        """The name under which this file is in the site, and with it what it leads to."""
        if file in self.names:
            return self.names[file]
        copy = self.folder / file.relative_to(self.root)
        if file.is_dir():
            copy = copy / "index.md"
        elif file.suffix in SHOWN:
            copy = copy.with_name(f"{file.name}.md")
        self.names[file] = copy.relative_to(self.folder).as_posix()
        copy.parent.mkdir(parents=True, exist_ok=True)
        if copy.suffix == ".md":
            copy.write_text(self.page(file))
        else:
            shutil.copy(file, copy)
        return self.names[file]

    def page(self, file: Path) -> str:
        if file.is_dir():
            inside = sorted(f for f in file.iterdir() if not f.name.startswith((".", "__")))
            lines = [f"- [{f.name}]({f.name})" for f in inside]
            return self.linked("\n".join([f"# {file.name}", "", *lines, ""]), file)
        text = file.read_text("utf-8")
        if file.suffix == ".md":
            return self.linked(text, file.parent)
        return f"# {file.name}\n\n````{file.suffix[1:] or 'text'}\n{text}\n````\n"

    def linked(self, text: str, folder: Path) -> str:
        """With the names of the site where these differ from the repository's."""

        def named(found: re.Match[str]) -> str:
            target = (folder / found[2]).resolve()
            if not (target.exists() and target.is_relative_to(self.root)):
                raise SystemExit(f"a link in {folder} leads to no file of ours: {found[2]}")
            own = target.relative_to(self.root).as_posix()
            return found[1] + found[2].rstrip("/") + self.add(target).removeprefix(own)

        return LINK.sub(named, text)


def main(site: Path) -> None:
    with tempfile.TemporaryDirectory() as work:
        Pages(ROOT, Path(work, "pages"))
        rows = re.findall(r"^\| \[(.+)\]\((docs/.+\.md)\)", (ROOT / "README.md").read_text(), re.M)
        nav = [("Home", "README.md"), *rows, ("Fields of records", "outputs/README.md")]
        entries = ", ".join(f'{{"{title}" = "{page}"}}' for title, page in nav)
        Path(work, "zensical.toml").write_text(SETTINGS.replace("{nav}", entries))
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        if subprocess.run(command, cwd=work).returncode:
            raise SystemExit("the site was not built: see the links named above")
        shutil.rmtree(site, ignore_errors=True)
        shutil.move(Path(work, "site"), site)
    print(f"open {site}/index.html")


if __name__ == "__main__":
    main(Path(*sys.argv[1:] or ["site"]))
