"""How far predictions are off: fitted on 1_1, 1_2 and a probe of each link between two nodes, then
2_1, 2_2 and 4_1 are predicted over these links, run on emulated nodes (root), and compared.

    python -m benchmarks.prediction --out found                    the stand-in, twelve links
    python -m benchmarks.prediction --out found --links 1ms/100mbit,20ms/100mbit
    python -m benchmarks.prediction --out found --real             vit.py --tiny on 2_1 as well
    python -m benchmarks.prediction --out found --table            nothing is run any more

A folder that exists is continued: what has been measured is not measured again. The
stand-in's computing is a timed wait (benchmarks/standin.py), because emulated nodes share the cores
of one machine; with --real two nodes compute, one core each.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.prediction_real import real_rows
from benchmarks.prediction_table import Row, compared, table
from benchmarks.results import parser_of, result_of, show
from harness.core.collectives import GLOO, Shape, wire_of
from harness.core.links import plain_link
from harness.core.records import read_json, write_json
from harness.read.predict.computing import fit_line, fit_sharing
from harness.read.predict.exchange import Reduction
from harness.read.predict.model import Model
from harness.read.predict.scenario import Scenario

LINKS = tuple(f"{delay}ms/{rate}mbit" for delay in (1, 5, 20, 50) for rate in (50, 200, 1000))
SHAPES = (Shape(2), Shape(2, 2), Shape(4))
BATCHES, BATCH, MB = (8, 16, 32), 16, 4.0
PROBE_MB = "0.25,1,3"


def main(argv: list[str]) -> int:
    parser = parser_of("prediction", __doc__, out=False)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--links", default=",".join(LINKS), help="one way, with commas")
    parser.add_argument("--mb", type=float, default=MB, help="of the stand-in's gradients")
    parser.add_argument("--real", action="store_true", help="vit.py --tiny on two nodes as well")
    parser.add_argument("--table", action="store_true", help="only of what has been measured")
    options = parser.parse_args(argv)
    links = options.links.split(",")
    rows = list(standin_rows(options.out, links, options.mb, measure=not options.table))
    if options.real:
        rows += real_rows(options.out / "real", links, measure=not options.table)
    if not rows:
        print("nothing has been measured yet")
        return 1
    record = {"rows": rows, "load": os.getloadavg()[0]}
    show(table(rows), options.out / "prediction.json", record)
    return 0


def standin_rows(out: Path, links: list[str], mb: float, measure: bool) -> Iterator[Row]:
    """A row per link and shape; everything to fit on is measured before what is predicted."""

    def case(name: str, shape: Shape, link: str | None, *words: str) -> Row | None:
        file = out / f"{name}.json"
        if not file.exists() and measure:
            write_json(file, run(shape, link, f"--mb={mb:g}", *words))
        return read_json(file)

    start = f"standin-{mb:g}mb"
    singles = [(b, case(f"{start}-1_1-b{b}", Shape(1), None, f"--batch={b}")) for b in BATCHES]
    two = case(f"{start}-1_2", Shape(1, 2), None, f"--batch={BATCH}")
    if two is None or any(found is None for _, found in singles):
        return
    line = fit_line([(batch, found["step_s"]) for batch, found in singles if found])
    sharing = fit_sharing({2: [two["step_s"] / line.step_s(BATCH)]})
    model = Model(line, sharing, None, 0.0, int(mb * 1e6), GLOO)
    for link in links:
        start_of_link = f"{start}-{link.replace('/', '-')}"
        words = (f"--batch={BATCH}", f"--probe={PROBE_MB}")
        wire = wire_of(plain_link(link))
        for shape in SHAPES:
            more = words if shape == SHAPES[0] else words[:1]
            found = case(f"{start_of_link}-{shape}", shape, link, *more)
            if found is None:
                continue
            if shape == SHAPES[0]:
                probed = found["link"]["allreduce"]
                rows = [r for r in probed if r["bytes"] and r["s"]]
                reductions = [Reduction(GLOO, r["bytes"], r["s"], shape, wire) for r in rows]
                model = replace(model, table=tuple(reductions))
            plan = Scenario(shape, BATCH, wire)
            yield compared("stand-in", link, found["step_s"], model, plan)


def run(shape: Shape, link: str | None, *words: str) -> Row:
    """Run the stand-in on these nodes; return what it found."""
    inner = [f"--nproc_per_node={shape.per_node}", "-m", "benchmarks.standin", *words]
    if link is None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *inner]
    else:
        nodes = ["-m", "harness", "nodes", str(shape.nodes), "--link", link, "--", "torchrun"]
        command = [sys.executable, *nodes, *inner]
    found: Row = result_of(command)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
