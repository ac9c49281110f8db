"""python -m harness VERB: see harness/cli.py."""

import sys
from pathlib import Path

if not __package__:  # started as `python harness VERB`
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.core.process import install_quit_handlers


def main() -> int:
    install_quit_handlers()  # what follows takes a moment, too
    from harness.cli import main as of_verbs

    return of_verbs()


if __name__ == "__main__":
    sys.exit(main())
