"""Real data and small sizes for a run that needs no download.

Both data sets come out of files that the pinned requirements install anyway: the handwritten
digits of scikit-learn, and prose from the docstrings of four libraries. No random generator is
used. Samples are ordered by the SHA-256 of their contents, so the same versions give the same
data on every machine.
"""

import ast
import functools
import gc
import hashlib
import importlib.util
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import tokenizers
import transformers
from PIL import Image

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
TRAIN_PER_CLASS, TEST_PER_CLASS, DIGITS_TEST_PER_CLASS = 704, 128, 36
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


def _key(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


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
        taken.sort(key=_key)
    gc.enable()
    return texts


def _split(
    rows: Iterable[tuple[Any, int]], column: str, kind: Any, names: list[str], held_out: int
) -> datasets.DatasetDict:
    """Put the first ``held_out`` rows of each class into the test split."""
    features = datasets.Features({column: kind, "label": datasets.ClassLabel(names=names)})
    splits: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    taken: Counter[int] = Counter()
    for value, label in rows:
        taken[label] += 1
        name = "test" if taken[label] <= held_out else "train"
        splits[name].append({column: value, "label": label})
    return datasets.DatasetDict(
        {name: datasets.Dataset.from_list(split, features) for name, split in splits.items()}
    )


def english() -> datasets.DatasetDict:
    """Return 2,816 training and 512 test texts of 20 to 80 words, equally many per library."""
    needed = TRAIN_PER_CLASS + TEST_PER_CLASS
    rows = []
    for label, (library, texts) in enumerate(_texts().items()):
        if len(texts) < needed:
            raise RuntimeError(f"only {len(texts)} of {needed} texts found in {library}")
        rows += [(text, label) for text in texts[:needed]]
    rows.sort(key=lambda row: _key(row[0]))
    return _split(rows, "text", datasets.Value("string"), list(SOURCES), TEST_PER_CLASS)


def digits() -> datasets.DatasetDict:
    """Return 1,437 training and 360 test images of 8x8, RGB, the test split equally many each."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    # The 17 grey levels of the source (0 to 16) are spread over 0 to 255.
    pixels = (np.asarray(bunch.images) * 255 / 16).round().astype(np.uint8)
    order = sorted(range(len(pixels)), key=lambda index: _key(pixels[index].tobytes()))
    rows = ((Image.fromarray(pixels[i]).convert("RGB"), int(bunch.target[i])) for i in order)
    names = [str(name) for name in bunch.target_names]
    return _split(rows, "image", datasets.Image(), names, DIGITS_TEST_PER_CLASS)


def _wordpieces(texts: Iterable[str], size: int) -> dict[str, int]:
    """Learn a WordPiece vocabulary that is the same in every process.

    The WordPiece trainer of ``tokenizers`` numbers the ``##`` pieces in the order of a randomly
    seeded hash map and breaks ties by that number, so its result differs from run to run. Its
    BPE trainer is stable. Here it gets words whose continuing letters are moved into a private
    plane of Unicode. Moved back with ``##`` before them, its tokens are WordPiece tokens.
    """
    shift = 0xF0000
    normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    splitter = tokenizers.pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

    def moved(text: str) -> str:
        words = [word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))]
        # Letters above the first plane have no place to be moved to.
        words = [word for word in words if max(word) < "\uffff"]
        return " ".join(w[0] + "".join(chr(ord(c) + shift) for c in w[1:]) for w in words)

    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, show_progress=False
    )
    model.train_from_iterator(map(moved, texts), trainer)
    return {
        "##" * (ord(token[0]) >= shift) + "".join(chr(ord(c) % shift) for c in token): number
        for token, number in sorted(model.get_vocab().items(), key=lambda item: item[1])
    }


def train_tokenizer(
    texts: Iterable[str], folder: Path, vocab_size: int
) -> transformers.PreTrainedTokenizerFast:
    """Train a lower-casing tokenizer and save it in ``folder``."""
    transformers.BertTokenizer(_wordpieces(texts, vocab_size)).save_pretrained(folder)
    saved: transformers.PreTrainedTokenizerFast = transformers.BertTokenizer.from_pretrained(folder)
    return saved
