"""python -m harness VERB: what there is to do besides running bert.py and vit.py."""

from __future__ import annotations

import difflib
import importlib
import sys

# Verb -> the module whose main(arguments) does it, and one line for the list.
VERBS = {
    "sweep": ("harness.launch.sweep", "many runs from one file: experiments/*.yaml"),
    "table": (
        "harness.read.tables.command",
        "what was measured: a row a run, or the table of a sweep",
    ),
    "nodes": ("harness.launch.netns.nodes", "a command on each of several emulated nodes"),
    "link": (
        "harness.train.measure.link",
        "links between nodes: round trip, bandwidth, all-reduce",
    ),
    "figures": ("harness.read.figures.catalogue", "a picture of what a sweep measured"),
    "import": ("harness.read.imports.command", "records of others: text files, trainer_state.json"),
    "compare": (
        "harness.read.compare.compare",
        "two runs or groups: difference, interval, is it noise",
    ),
    "explain": (
        "harness.read.explain.explain",
        "why several processes were not as many times as fast",
    ),
    "batches": (
        "harness.read.compare.critical_batch",
        "from which batch on larger ones do not pay",
    ),
    "predict": (
        "harness.read.predict.command",
        "step time, cost ... of topologies that nobody here has",
    ),
    "store": (
        "harness.train.run.elastic",
        "where nodes of an elastic run meet: each may be lost",
    ),
    "report": ("harness.read.report.report", "tables and figures of a folder as one page"),
    "env": ("harness.train.measure.environment", "machine and versions, to paste into a question"),
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m harness VERB [...]\n")
        for verb, (_, what) in VERBS.items():
            print(f"  {verb:<8} {what}")
        return 0
    verb, *rest = argv
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(VERBS)}"
        print(f"harness: error: unknown verb {verb}: {hint}", file=sys.stderr)
        return 2
    try:
        return int(importlib.import_module(VERBS[verb][0]).main(rest))
    except BrokenPipeError:
        # The reader has seen enough, as head does.
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
