"""How harness/train/data/english/texts.jsonl.gz was made: prose from docstrings, by rule.

No random generator is used: texts are ordered by the SHA-256 of their contents.
"""

import ast
import functools
import gc
import hashlib
import importlib.util
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

# Files that hold most of a library's prose and are the same in the wheels for every platform.
# Reading all of each library would take several times longer.
SOURCES: dict[str, str] = {
    "matplotlib": "*.py axes/*.py",
    "pandas": "core/**/*.py",
    "scipy": "signal/*.py stats/*.py optimize/*.py spatial/*.py linalg/*.py special/*.py "
    "sparse/*.py sparse/linalg/*.py sparse/csgraph/*.py",
    "torch": "nn/**/*.py optim/*.py distributions/*.py distributed/*.py distributed/fsdp/*.py "
    "utils/data/**/*.py autograd/*.py ao/nn/**/*.py ao/quantization/*.py",
}
PER_CLASS = 832
# The versions that the texts were taken from.
VERSIONS = {"matplotlib": "3.11.2", "pandas": "3.1.1", "scipy": "1.17.1", "torch": "2.13.0"}
MIN_WORDS, MAX_WORDS = 20, 80
# A text is dropped when more than this share of its runs of four words occur in the texts
# taken before it. This removes boilerplate, inherited and copied docstrings, so that the test
# split holds no text that was seen in training.
MAX_SHARED = 0.25
# Every word that contains one of these names (PyTorch, torch.nn, scipy_namespace) is removed from
# every text, whatever its label, and so are the usual short names. Other words of a library
# (DataFrame, tensor, axes) stay: they are what the texts are about.
LIBRARY_NAMES = re.compile(
    r"(?i)\b\w*(?:torch|pandas|scipy|matplotlib|numpy|sklearn|pylab|pyplot)\w*"
    r"|\b(?:scikit(?:-learn)?|np|pd|sp|plt|mpl\w*)\b"
)
# From one of these sections on, a docstring lists names, code and links.
END_OF_PROSE = re.compile(r"(?im)^ *(?:see also|references|examples?|attributes|methods)\W*$")
# Underlines, headings and lines such as ``x, y : array_like`` tell a library by its style.
NO_PROSE = re.compile(
    r"(?im)^ *(?:[-=~^]{3,}|(?:parameter|arg|argument|return|raise|yield|note|warning)s?:*"
    r"|\*{0,2}\w+(?:, \*{0,2}\w+)* ?: .*) *$"
)
# ``axis (int):`` is dropped, ``~.axes.Axes.plot`` becomes words, and symbols are dropped.
MARKUP = re.compile(
    r"(?m)^\s*\w+ ?\([^)]*\) ?:|:[\w:]+:(?=`)"
    r"|(?<=\w\w)\.(?=[A-Za-z])|(?<![\w)])\.+|_+|[^\w\s.,;:!?()%='-]+"
)
PLAIN_WORD = re.compile(r"[(\"']?[A-Za-z][a-z'-]*[.,;:!?)\"']*$")


def key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _docstrings(library: str) -> Iterator[str]:
    """Yield the docstrings of a library in a fixed order, without importing the library."""
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"{library} is not installed, and the embedded data need its files")
    root = Path(spec.origin).parent
    files = {file for pattern in SOURCES[library].split() for file in root.glob(pattern)}
    for file in sorted(files, key=lambda file: file.relative_to(root).as_posix()):
        with warnings.catch_warnings():
            # Old escape sequences in docstrings warn.
            warnings.simplefilter("ignore")
            todo: list[ast.AST] = [ast.parse(file.read_bytes())]
        while todo:
            node = todo.pop()
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                todo.extend(reversed(node.body))
                yield ast.get_docstring(node) or ""


def _prose(docstring: str) -> str:
    """Keep the first ``MAX_WORDS`` words of prose: no code, argument names, tables or links."""
    kept: list[str] = []
    text = NO_PROSE.sub("", END_OF_PROSE.split(docstring, maxsplit=1)[0])
    for block in re.split(r"\n\s*\n", text):
        words = block.split()
        plain = sum(PLAIN_WORD.match(word) is not None for word in words)
        # Formulas, tables and code have few plain words, and directives start with dots.
        if plain >= 0.6 * len(words) and words[:1] != [".."] and ">>>" not in words:
            plain_text = MARKUP.sub(" ", block.encode("ascii", "ignore").decode())
            kept += LIBRARY_NAMES.sub(" ", plain_text).split()
        if len(kept) >= MAX_WORDS:
            break
    return " ".join(kept[:MAX_WORDS])


@functools.cache
def _texts() -> dict[str, list[str]]:
    """Return the texts of every library, no two of them alike, in the order of their hash."""
    seen: set[tuple[str, ...]] = set()
    texts: dict[str, list[str]] = {library: [] for library in SOURCES}
    # A syntax tree is many small objects: the collector's rounds over them double the time.
    gc.disable()
    for library, taken in texts.items():
        for text in map(_prose, _docstrings(library)):
            words = re.findall(r"[a-z]+", text.lower())
            runs = set(zip(words, words[1:], words[2:], words[3:], strict=False))
            if len(words) >= MIN_WORDS and len(runs & seen) <= MAX_SHARED * len(runs):
                seen |= runs
                taken.append(text)
        taken.sort(key=key)
    gc.enable()
    return texts


def lines() -> str:
    """The shipped file: a JSON object a text, equally many per library."""
    rows = [
        (key(text), name, text) for name, texts in _texts().items() for text in texts[:PER_CLASS]
    ]
    assert len(rows) == PER_CLASS * len(SOURCES)
    return "".join(json.dumps({"label": n, "text": t}) + "\n" for _, n, t in sorted(rows))
