"""Real data and small sizes for a run that needs no download.

The handwritten digits come with scikit-learn. The English texts, prose from the docstrings of four
libraries, lie in english/ with the licences of these libraries. No random generator is used:
samples are ordered by the SHA-256 of their contents, so the data are the same on every machine.
"""

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import tokenizers
import transformers
from PIL import Image

ENGLISH = Path(__file__).parent / "english" / "texts.jsonl.gz"  # in the order of their hashes
LIBRARIES = ("matplotlib", "pandas", "scipy", "torch")
TEXTS_TEST_PER_CLASS, DIGITS_TEST_PER_CLASS = 128, 36


def _split(
    rows: Iterable[tuple[Any, int]], column: str, kind: Any, names: list[str], held_out: int
) -> datasets.DatasetDict:
    """Put the first ``held_out`` rows of each class into the test split."""
    features = datasets.Features({column: kind, "label": datasets.ClassLabel(names=names)})
    splits: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    count: Counter[int] = Counter()
    for value, label in rows:
        count[label] += 1
        name = "test" if count[label] <= held_out else "train"
        splits[name].append({column: value, "label": label})
    return datasets.DatasetDict(
        {name: datasets.Dataset.from_list(split, features) for name, split in splits.items()}
    )


def english() -> datasets.DatasetDict:
    """Return 2,816 training and 512 test texts of 20 to 80 words, equally many per library."""
    with gzip.open(ENGLISH, "rt", encoding="ascii") as file:
        texts = [json.loads(line) for line in file]
    rows = ((each["text"], LIBRARIES.index(each["label"])) for each in texts)
    return _split(rows, "text", datasets.Value("string"), list(LIBRARIES), TEXTS_TEST_PER_CLASS)


def digits() -> datasets.DatasetDict:
    """Return 1,437 training and 360 test images (8x8, RGB), 36 test images of each digit."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    # The 17 grey levels of the source (0 to 16) are spread over 0 to 255.
    pixels = (np.asarray(bunch.images) * 255 / 16).round().astype(np.uint8)
    order = sorted(
        range(len(pixels)), key=lambda i: hashlib.sha256(pixels[i].tobytes()).hexdigest()
    )
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
