"""Tables in Markdown of speed.py's record, and checks that must pass before they mean anything."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.results import markdown, spread
from benchmarks.speed_cases import ARMS, Case, is_exact

WARMED_UP = 1  # epochs that are not timed
AGREE = 1e-3  # largest difference of losses between exact arms in fp32, as a share
Runs = list[dict[str, Any]]


def complaints(cases: dict[str, Any]) -> Iterator[str]:
    """Arms that failed, or whose work differed from the others'; nothing if all is well."""
    for name, result in cases.items():
        case = Case(**result["case"])
        for run in result["runs"]:
            where = f"{name}, {run['arm']} on {run['processes']}"
            if run["failed"]:
                yield f"{where}: failed: {run['failed']}"
                continue
            yield from (f"{where}: {text}" for text in _unequal(case, run, _reference(result, run)))


def _reference(result: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """The run to compare this one with: that of `ours` if it has been measured."""
    there = [r for r in _good(result["runs"]) if r["processes"] == run["processes"]]
    return next((r for r in there if r["arm"] == "ours"), there[0])


def _unequal(case: Case, run: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    updates = [sum(e["updates"] for e in r["epochs"]) for r in (run, other)]
    if updates[0] != updates[1] or updates[0] != _updates(case, run["processes"]) * case.epochs:
        yield f"{updates[0]:.0f} updates, {updates[1]:.0f} in {other['arm']}"
    for what in ("samples", "labels", "token_sum"):
        if run["fed"].get(what) != other["fed"].get(what):
            yield f"was fed other samples than {other['arm']} ({what})"
    pixels = [r["fed"].get("pixel_squares", 0.0) for r in (run, other)]
    if abs(pixels[0] - pixels[1]) > 1e-3 * pixels[1]:
        yield f"was fed other pictures than {other['arm']}"
    tested = {q["eval_samples"] for r in (run, other) for q in r["quality"]}
    if tested != {case.test}:
        yield f"was tested on {sorted(tested)} samples, not on {case.test}"
    if case.precision == "fp32" and _both_exact(case, run, other):
        off = _off(run, other)
        if off > AGREE:
            yield f"test loss differs from that of {other['arm']} by {off:.1e} of it"


def _updates(case: Case, processes: int) -> int:
    return case.train // (case.batch * processes)


def _both_exact(case: Case, *runs: dict[str, Any]) -> bool:
    return all(is_exact(case, run["arm"], run["processes"]) for run in runs)


def _off(run: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of test losses over the epochs, as a share of the other run's."""
    pairs = zip(run["quality"], other["quality"], strict=True)
    return float(max(abs(a["eval_loss"] / b["eval_loss"] - 1) for a, b in pairs))


def _good(runs: Runs) -> Runs:
    return [run for run in runs if not run["failed"]]


# ---- tables ----

HEAD = (
    "arm", "n", "whole epoch s", "training s", "evaluation s", "saving s", "training samples/s",
    "whole epoch: ours is faster by", "training alone: ours is faster by", "share of matmul peak",
    "prepared, cold s", "again s", "tokens fed a sample", "test loss", "off ours by",
)  # fmt: skip


def table(record: dict[str, Any]) -> str:
    facts = record["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in facts["versions"].items() if v)
    lines = [
        f"{facts['machine']}, Python {facts['python']}, {versions}, commit {facts['commit']}"
        f"{' with changes' if facts['dirty'] else ''}",
        "",
        "Medians (smallest to largest) over rounds; the first epoch of each run is not timed. "
        "*Whole epoch*: training, evaluation and saving, as each recipe does them. *Training "
        "alone*: the steps, loading of their data included. Ratios are of the same round: the "
        "arm's time / ours. *Prepared*: reading, tokenising, decoding before training, without "
        "imports; in none of the other columns.",
        "",
        *(f"- {name}: {arm.says}" for name, arm in ARMS.items()),
    ]
    for name, result in record["cases"].items():
        for processes in result["processes"]:
            lines += ["", *_section(name, result, processes)]
        if 1 in result["processes"] and len(result["processes"]) > 1:
            lines += ["", f"## {name}, scaling", "", _scaling(result)]
    if texts := list(complaints(record["cases"])):
        lines += ["", "**Not equal, or failed:**", "", *(f"- {text}" for text in texts)]
    if left := record.get("not_begun"):
        lines += ["", f"{left} runs were not begun: the time was over."]
    return "\n".join(lines)


def _section(name: str, result: dict[str, Any], processes: int) -> Iterator[str]:
    case, facts, limit = Case(**result["case"]), result["facts"], result["roofline"]
    runs = [r for r in _good(result["runs"]) if r["processes"] == processes]
    flop = facts["gflop_per_sample"]
    yield f"## {name}, {processes} process{'es' if processes > 1 else ''}"
    yield ""
    yield (
        f"{case.model}{_changed(case)}, {facts['parameters'] / 1e6:.2f} M "
        f"parameters; {facts['data']}, {_data(case, facts)}; {case.train} training and {case.test} "
        f"test samples; batch {case.batch} a process, {_updates(case, processes)} updates an epoch,"
        f" {case.epochs} epochs; {case.precision}, {result['threads']} thread(s) a process, seed "
        f"{result['seed']}"
        f"{'; ours with ' + result['flags'] if result['flags'] else ''}."
    )
    if flop:
        bound = processes * limit["matmul_tflops"] * 1e3 / flop
        yield (
            f"Measured peak of a process: matrix product {limit['matmul_tflops']:.3g} TFLOP/s, "
            f"copying {limit['copy_gb_per_s']:.3g} GB/s. {flop:.3g} GFLOP a sample, padding left "
            f"out: at that peak {bound:,.0f} samples/s; AdamW alone moves "
            f"{_optimizer_ms(facts, limit):.2g} ms of memory an update."
        )
    yield ""
    yield markdown("l" + "r" * (len(HEAD) - 1), HEAD, (
        row(arm, own, runs, result, processes)
        for arm in result["arms"] if (own := [r for r in runs if r["arm"] == arm])
    ))  # fmt: skip


def _changed(case: Case) -> str:
    words = ", ".join(f"{name} {value}" for name, value in case.changed.items())
    return f" ({words})" if words else ""


def _data(case: Case, facts: dict[str, Any]) -> str:
    if "mean_tokens" in facts:
        return f"{facts['mean_tokens']:.1f} tokens a text, at most {facts['longest']}"
    how = "pictures as they are stored"
    if case.jpeg_px:
        how = f"JPEG files of {case.jpeg_px} px and {facts['kb_per_file']:.0f} kB"
    return f"{how}, resized to {case.image_size} px"


def _optimizer_ms(facts: dict[str, Any], limit: dict[str, float]) -> float:
    """AdamW reads weight, gradient and two moments, and writes all but the gradient: 7 numbers."""
    return float(facts["parameters"] * 7 * 4 / limit["copy_gb_per_s"] / 1e6)


def row(arm: str, own: Runs, runs: Runs, result: dict[str, Any], processes: int) -> list[str]:
    case = Case(**result["case"])
    rates = [case.train / _mean(r, "train_s") for r in own]
    flop, peak = result["facts"]["gflop_per_sample"], result["roofline"]["matmul_tflops"]
    share = statistics.median(rates) * flop / (peak * 1e3 * processes) if flop else None
    fed = own[0]["fed"]
    first = [r["prepare_s"] for r in own if r["round"] == 1]
    later = [r["prepare_s"] for r in own if r["round"] > 1]
    ours = [r for r in runs if r["arm"] == "ours"]
    off = max((_off(r, ours[0]) for r in own), default=0.0) if ours else None
    exact = is_exact(case, arm, processes)
    return [
        arm, str(len(own)), spread([_whole(r) for r in own], ".2f"),
        *(f"{statistics.median(_mean(r, part) for r in own):.2f}"
          for part in ("train_s", "evaluate_s", "save_s")),
        spread(rates, ",.0f"), _ratio(own, ours, _whole),
        _ratio(own, ours, lambda run: _mean(run, "train_s")),
        f"{100 * share:.0f} %" if share is not None else "",
        f"{first[0]:.2f}" if first else "", f"{statistics.median(later):.2f}" if later else "",
        f"{fed['tokens'] / fed['samples']:.1f}" if "tokens" in fed else "",
        f"{own[0]['quality'][-1]['eval_loss']:.5f}",
        "" if off is None or arm == "ours" else f"{off:.0e}{'' if exact else ' (not the same)'}",
    ]  # fmt: skip


def _mean(run: dict[str, Any], part: str) -> float:
    return float(statistics.mean(epoch[part] for epoch in run["epochs"][WARMED_UP:]))


def _whole(run: dict[str, Any]) -> float:
    return sum(_mean(run, part) for part in ("train_s", "evaluate_s", "save_s"))


def _ratio(own: Runs, ours: Runs, of: Callable[[dict[str, Any]], float]) -> str:
    """Ratios round by round, so that what slows the machine for a while slows both sides."""
    by_round = {run["round"]: of(run) for run in ours}
    ratios = [of(run) / by_round[run["round"]] for run in own if run["round"] in by_round]
    return spread(ratios, ".2f") if ratios else ""


def _scaling(result: dict[str, Any]) -> str:
    """Training samples/s of N processes / (N x that of one process), in the same round."""
    runs, rows = _good(result["runs"]), []
    for arm in result["arms"]:
        one = {r["round"]: r for r in runs if r["arm"] == arm and r["processes"] == 1}
        for processes in result["processes"]:
            several = [r for r in runs if r["arm"] == arm and r["processes"] == processes]
            shares = [
                _mean(one[r["round"]], "train_s") / _mean(r, "train_s") / processes
                for r in several if r["round"] in one
            ]  # fmt: skip
            if processes > 1 and shares:
                rows.append((arm, str(processes), spread(shares, ".3f")))
    heads = ("arm", "processes", "scaling efficiency (weak, training alone)")
    return markdown("lrr", heads, rows)
