"""The licence of every package of constraints.txt, with all that those need.

python .ci/licences.py [FILE ...]     known weaknesses: pip-audit -r constraints.txt
"""

import re
import sys
from importlib import metadata
from pathlib import Path

NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def named(lines: list[str]) -> set[str]:
    """The packages in lines of requirements; extras are left out."""
    wanted = (line for line in lines if "extra ==" not in line and not line.startswith(("#", "-")))
    return {match[0].lower().replace("_", "-") for line in wanted if (match := NAME.match(line))}


def licence(package: metadata.PackageMetadata) -> str:
    classified = [c.rpartition(" :: ")[2] for c in package.get_all("Classifier") or []
                  if c.startswith("License ::")]  # fmt: skip
    text = package.get("License-Expression") or ", ".join(classified) or package.get("License")
    return (text or "unknown").strip().splitlines()[0][:60]


def main(files: list[str]) -> None:
    left = named([line for file in files for line in Path(file).read_text().splitlines()])
    seen: set[str] = set()
    while left:
        seen.add(name := left.pop())
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # of another system, or of an extra that is not installed
        left |= named(found.requires or []) - seen
    for name in sorted(seen):
        try:
            package = metadata.metadata(name)
        except metadata.PackageNotFoundError:
            print(f"{name:<28} {'-':<14} not installed here")
            continue
        print(f"{name:<28} {package['Version']:<14} {licence(package)}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["constraints.txt"])
