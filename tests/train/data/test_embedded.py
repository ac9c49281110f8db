"""The embedded data are real, balanced, disjoint and the same in every process."""

import gzip
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import datasets
import pytest
import transformers

from harness.train.data import embedded
from harness.train.data.cache import cached
from tests.support import docstrings
from tests.support.samples import content

ROOT = Path(__file__).resolve().parents[3]
# Written out on purpose: a test that imports the list of the program could not find a gap in it.
FORBIDDEN = re.compile(
    r"torch|pandas|scipy|matplotlib|numpy|sklearn|scikit|pyplot|\b(?:np|pd|plt|mpl\w*)\b", re.I
)
CHILD = """
import sys
from pathlib import Path
from harness.train.data import embedded
from tests.support import docstrings
from tests.support.samples import content
texts = embedded.english()
print(content(texts), content(embedded.digits()))
embedded.train_tokenizer(texts["train"]["text"], Path(sys.argv[1]), 2048)
"""


@pytest.fixture(scope="module")
def english() -> datasets.DatasetDict:
    return embedded.english()


@pytest.fixture(scope="module")
def digits() -> datasets.DatasetDict:
    return embedded.digits()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Checksums and a tokenizer of a process that differs from this one in all that could matter.

    The seed of the hashes in this process is a random one.
    """
    folder = tmp_path_factory.mktemp("other") / "tokenizer"
    differs = {"PYTHONHASHSEED": "1", "RAYON_NUM_THREADS": "1", "LC_ALL": "C"}
    command = [sys.executable, "-c", CHILD, str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | differs, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, folder


def runs(text: str, length: int = 4) -> set[tuple[str, ...]]:
    words = re.findall(r"[a-z]+", text.lower())
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


@pytest.mark.slow
def test_english_is_made_by_the_rules_of_its_generator() -> None:
    """The file that is shipped, from the versions that it was taken from."""
    installed = {name: metadata.version(name).partition("+")[0] for name in docstrings.VERSIONS}
    if installed != docstrings.VERSIONS:
        pytest.skip(f"made from {docstrings.VERSIONS}")
    with gzip.open(embedded.ENGLISH, "rt") as file:
        assert file.read() == docstrings.lines()


def test_every_library_has_its_licence(english: datasets.DatasetDict) -> None:
    for name in english["train"].features["label"].names:
        text = (embedded.ENGLISH.parent / f"LICENSE-{name}").read_text()
        assert "Copyright" in text and "AS IS" in " ".join(text.split())


def test_english_is_balanced_and_cut(english: datasets.DatasetDict) -> None:
    assert english["train"].features["label"].names == ["matplotlib", "pandas", "scipy", "torch"]
    assert Counter(english["train"]["label"]) == dict.fromkeys(range(4), 704)
    assert Counter(english["test"]["label"]) == dict.fromkeys(range(4), 128)
    for text in [*english["train"]["text"], *english["test"]["text"]]:
        assert text.isascii()
        assert len(re.findall(r"[A-Za-z]+", text)) >= 20
        assert len(text.split()) <= 80


def test_english_does_not_name_the_library(english: datasets.DatasetDict) -> None:
    for text in [*english["train"]["text"], *english["test"]["text"]]:
        assert not FORBIDDEN.search(text), text


def test_english_test_texts_are_new(english: datasets.DatasetDict) -> None:
    train, test = list(english["train"]["text"]), list(english["test"]["text"])
    assert len({*train, *test}) == len(train) + len(test)
    known = [runs(text) for text in train]
    for text in test:
        mine = runs(text)
        # Whichever of two came first, the longer one shares little of itself. A short test text
        # may lie in a long training text to a larger part, but never mostly.
        shared = [(len(mine & other), len(other)) for other in known]
        assert all(both <= 0.25 * max(len(mine), size) for both, size in shared), text
        assert max(shared)[0] <= 0.5 * len(mine), text


def test_classes_are_mixed(english: datasets.DatasetDict, digits: datasets.DatasetDict) -> None:
    # A run that uses only the first rows must see every class.
    for data, classes in ((english, 4), (digits, 10)):
        for part in data.values():
            assert len(set(part["label"][:100])) == classes


def test_digits_are_images_of_every_class(digits: datasets.DatasetDict) -> None:
    assert (len(digits["train"]), len(digits["test"])) == (1437, 360)
    assert Counter(digits["test"]["label"]) == dict.fromkeys(range(10), 36)
    assert min(Counter(digits["train"]["label"]).values()) >= 138
    assert digits["train"].features["label"].names == [str(digit) for digit in range(10)]
    image = digits["train"][0]["image"]
    assert (image.mode, image.size) == ("RGB", (8, 8))
    pixels = {name: {i.tobytes() for i in part["image"]} for name, part in digits.items()}
    assert len(pixels["train"] | pixels["test"]) == 1797
    assert min(map(min, pixels["train"])) == 0
    assert max(map(max, pixels["train"])) == 255


@pytest.mark.process
def test_same_data_in_another_process(
    english: datasets.DatasetDict, digits: datasets.DatasetDict, other: tuple[str, Path]
) -> None:
    expected = [content(english), content(digits)]
    assert all(re.fullmatch(r"[0-9a-f]{16}", value) for value in expected)
    assert other[0].split() == expected


def test_checksum_sees_order_and_labels(digits: datasets.DatasetDict) -> None:
    part = digits["test"].select(range(3))
    labels = [(label + 1) % 10 for label in part["label"]]
    relabelled = part.remove_columns("label").add_column("label", labels)
    kinds = (part, part.select([1, 0, 2]), relabelled)
    assert len({content(datasets.DatasetDict(train=each)) for each in kinds}) == 3
    again = datasets.DatasetDict(train=digits["test"].select(range(3)))
    assert content(again) == content(datasets.DatasetDict(train=part))


@pytest.mark.process
def test_tokenizer_is_the_same_everywhere(
    english: datasets.DatasetDict, other: tuple[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "tokenizer"
    texts = english["train"]["text"]
    trained = embedded.train_tokenizer(texts, folder, 2048)
    assert len(trained) == 2048
    saved = (folder / "tokenizer.json").read_bytes()
    assert (other[1] / "tokenizer.json").read_bytes() == saved
    assert list(folder.parent.iterdir()) == [folder]
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    assert loaded.get_vocab() == trained.get_vocab()
    sample = english["test"]["text"][:8]
    assert loaded(sample)["input_ids"] == trained(sample)["input_ids"]


@pytest.mark.process
def test_tokenizer_works_like_that_of_bert(
    english: datasets.DatasetDict, other: tuple[str, Path]
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(other[1])
    assert tokenizer.convert_ids_to_tokens(range(5)) == [
        *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    ]
    # Lower case, and a rare word falls apart into pieces that continue it.
    tokens = tokenizer.tokenize("The FUNCTION returnsqz")
    assert tokens[:2] == ["the", "function"]
    assert len(tokens) > 3 and all(token.startswith("##") for token in tokens[3:])
    texts = english["test"]["text"]
    encoded = [tokenizer(text, truncation=True, max_length=48) for text in texts]
    pieces = [token for row in encoded for token in row["input_ids"]]
    assert pieces.count(tokenizer.unk_token_id) < 0.001 * len(pieces)
    batch = transformers.DataCollatorWithPadding(tokenizer)(encoded[:4])
    assert batch["input_ids"].shape == batch["attention_mask"].shape
    assert batch["input_ids"].shape[1] <= 48
    assert batch["input_ids"][:, 0].tolist() == [tokenizer.cls_token_id] * 4


def test_a_faster_process_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    key = {"tokenizer_for": "zzz"}

    def train(text: str) -> Callable[[Path], object]:
        return lambda draft: embedded.train_tokenizer([text], draft / "tokenizer", 60)

    def slow(draft: Path) -> None:
        cached(key, train("the winner"))
        train("zzz")(draft)

    folder = cached(key, slow)
    assert list((tmp_path / "harness").iterdir()) == [folder]  # no draft is left behind
    # What lies there is used as it is: other texts would give another vocabulary.
    assert cached(key, train("other words")) == folder
    vocabulary = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer").get_vocab()
    assert "##z" not in vocabulary and "w" in vocabulary
