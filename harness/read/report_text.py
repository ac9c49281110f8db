"""The report as Markdown, its tables in the form that a README takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.read.figures import FIGURES
from harness.read.results import Rows
from harness.read.sections import Section
from harness.read.sweep_files import escaped, markdown

# Words that the tables use; each table says what it uses besides.
DEFINITIONS = {
    "samples/s": "training samples of the timed steps over all processes, divided by their time; "
    "evaluation, saving and the first steps are left out.",
    "training time": "the training part of all epochs, without evaluation and saving.",
    "wall time": "everything from the start of a run to its end, all attempts added up.",
    "loss, top-1, top-5": "of the last epoch, over the whole evaluation set, each sample once.",
    "effective batch": "samples of one update over all processes.",
    "±": "sample standard deviation over the seeds; bands and bars in figures are 95 % intervals "
    "of the mean (Student's t), points are single runs.",
    "scaling efficiency": "weak X_N/(N X_1) of samples/s at equal batch per device, strong "
    "T_1/(N T_N) of training time at equal effective batch.",
    "time to accuracy": "training time to the end of the first epoch that reaches the target; a "
    "miss takes for ever, and is counted.",
    "where the time went": "of the rank in the middle, means over the seeds; what the records do "
    "not tell apart is one part.",
}


def markdown_report(folder: str, sections: Sequence[Section], problems: Sequence[str]) -> str:
    return "\n".join(_lines(folder, sections, problems)) + "\n"


def _lines(folder: str, sections: Sequence[Section], problems: Sequence[str]) -> Iterator[str]:
    yield f"# What was measured: {escaped(folder)}"
    for problem in problems:
        yield f"\n- {escaped(problem)}"
    for section in sections:
        yield ""
        yield markdown(section.table).rstrip().replace("### ", "## ", 1)
        yield "\n### Results\n"
        yield from markdown_table(section.results)
        if section.nodes[1]:
            yield "\n### By node\n"
            yield from markdown_table(section.nodes)
        for title, texts in (
            ("Explanation", section.explained),
            ("To be fair", section.fairness),
            ("Not read", section.problems),
        ):
            if texts:
                yield f"\n### {title}\n"
                yield from (f"- {escaped(text)}" for text in texts)
        if section.failures:
            yield "\n### Not finished\n"
            yield from (
                f"- {escaped(which)}: {escaped(what)}" for which, what, _ in section.failures
            )
        if section.figures:
            yield "\n### Figures"
        for name, drawn in section.figures.items():
            alt = " ".join(drawn.alt.replace("]", ")").replace("[", "(").split())
            yield f"\n![{alt}]({section.name}/figures/{name}.png)"
            yield f"\n{FIGURES[name][1]}" + "".join(f"; {escaped(note)}" for note in drawn.notes)
    yield "\n## Definitions\n"
    yield from (f"- **{word}**: {text}" for word, text in DEFINITIONS.items())


def markdown_table(table: Rows) -> Iterator[str]:
    headings, rows = table
    yield "| " + " | ".join(map(escaped, headings)) + " |"
    yield "|---" + "|--:" * (len(headings) - 1) + "|"
    yield from ("| " + " | ".join(map(escaped, row)) + " |" for row in rows)
