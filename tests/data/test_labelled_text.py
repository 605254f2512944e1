"""Texts with labels are classification, whatever file they come from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from published_files import write_lines

from fedtailor.data import Vocabulary, load_dataset
from fedtailor.errors import FedtailorError

REVIEWS = [
    {"text": f"A {'good' if row % 3 else 'dull'} film, no {row}.", "label": "pos" if row % 3 else "neg"}
    for row in range(20)
]


def written(folder: Path, records: list[dict], name: str = "reviews.jsonl") -> str:
    write_lines(folder / name, records)
    return str(folder / name)


def test_lines_with_text_and_label_are_labelled_text(tmp_path: Path) -> None:
    dataset = load_dataset(written(tmp_path, REVIEWS))
    assert dataset.label_names == ("neg", "pos")
    assert (dataset.num_classes, len(dataset.train), len(dataset.test)) == (2, 16, 4)
    words = dataset.origin.vocabulary
    assert words.unit == "words"
    assert dataset.origin.symbols == len(words)
    x, y = dataset.train.take(torch.arange(16))
    assert x.dtype == torch.int64
    back = [words.entries[number - 2] for number in x[0].tolist() if number > 1]
    assert back == ["a", "dull", "film", ",", "no", "0", "."]
    assert y.tolist()[:4] == [0, 1, 1, 0]
    assert (
        "is taken for labelled text: 16 training and 4 test examples of 2 classes (neg, pos)"
        in dataset.origin.taken_for
    )
    assert 'vocabulary = "characters"' in dataset.origin.otherwise
    assert 'read_as = "next-character"' in dataset.origin.otherwise


def test_the_test_part_does_not_make_the_vocabulary(tmp_path: Path) -> None:
    records = [
        {"text": f"seen{row}", "label": row % 2, "split": "train" if row < 8 else "test"} for row in range(10)
    ]
    dataset = load_dataset(written(tmp_path, records))
    assert sorted(dataset.origin.vocabulary.entries) == [f"seen{row}" for row in range(8)]
    assert dataset.test.take(torch.arange(2))[0].tolist() == [[1], [1]]  # not in the vocabulary


def test_characters_length_and_size(tmp_path: Path) -> None:
    dataset = load_dataset(written(tmp_path, REVIEWS), vocabulary="characters", length=5, vocabulary_size=10)
    assert dataset.origin.vocabulary.unit == "characters"
    assert len(dataset.origin.vocabulary) == 12
    assert dataset.train.take(torch.tensor([0]))[0].shape == (1, 5)
    for options, words in (
        ({"vocabulary": "letters"}, "vocabulary = 'letters': expected words or characters"),
        ({"length": 0}, "length = 0"),
        ({"vocabulary_size": 0}, "vocabulary_size = 0"),
        ({"windw": 3}, "unknown option of reviews.jsonl 'windw'"),
        ({"read_as": "prose"}, "unknown read_as of reviews.jsonl 'prose'"),
    ):
        with pytest.raises(FedtailorError, match=words):
            load_dataset(str(tmp_path / "reviews.jsonl"), **options)


def test_a_text_can_be_read_otherwise(tmp_path: Path) -> None:
    records = [{"user": f"u{row % 2}", "text": "to and fro " * 12, "label": row % 2} for row in range(4)]
    path = written(tmp_path, records)
    by_label = load_dataset(path)
    assert sorted(set(by_label.client_train)) == ["u0", "u1"]
    windows = load_dataset(path, read_as="next-character", window=10)
    assert windows.train.take(torch.tensor([0]))[0].shape == (1, 10)
    assert "is taken for running text" in windows.origin.taken_for


@pytest.mark.parametrize("field", ["tokens", "text"])
def test_tokens_of_others(tmp_path: Path, field: str) -> None:
    numbers = [{field: [7, row + 1][: row % 3], "label": row % 2} for row in range(10)]
    dataset = load_dataset(written(tmp_path, numbers))
    assert dataset.origin.vocabulary is None
    assert dataset.origin.symbols == 10
    assert dataset.train.columns[0][:3].tolist() == [[0, 0], [7, 0], [7, 3]]
    pieces = [{field: ["un", "##do", str(row)], "label": row % 2} for row in range(10)]
    dataset = load_dataset(written(tmp_path, pieces))
    assert dataset.origin.vocabulary.unit == "tokens"
    assert dataset.origin.vocabulary.entries[:2] == ("##do", "un")


def test_a_csv_with_a_text_column(tmp_path: Path) -> None:
    rows = "".join(f'"Line {row},\nand more",{"a" if row % 2 else "b"}\n' for row in range(10))
    (tmp_path / "notes.csv").write_text(f"text,label\n{rows}")
    dataset = load_dataset(str(tmp_path / "notes.csv"))
    assert dataset.label_names == ("a", "b")
    assert dataset.origin.lines[0].tolist()[:3] == [2, 4, 6]  # cells may go over lines
    (tmp_path / "named.csv").write_text(f"remark,verdict\n{rows}")
    assert load_dataset(str(tmp_path / "named.csv"), text="remark", label="verdict").num_classes == 2


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([{"text": "a", "label": 0}, {"text": "b"}], "column label of .*, the label, is empty on line 2"),
        ([{"text": "a"}, {"text": "b", "label": 0}], "the label, is empty on line 1"),
        ([{"text": "a", "label": 0}, {"text": [3], "label": 0}], "holds numbers and text"),
        ([{"text": 4, "label": 0}], "line 1 of .* has a text of type int"),
        ([{"tokens": [3, -1], "label": 0}] * 5, "has the token -1: expected 0 or more"),
        ([{"tokens": [3]}], "has tokens: expected text .* and label"),
        ([{"text": "a", "label": 0, "split": "dev"}], "split = 'dev': expected train or test"),
    ],
)
def test_wrong_labelled_text(tmp_path: Path, records: list[dict], words: str) -> None:
    with pytest.raises(FedtailorError, match=words):
        load_dataset(written(tmp_path, records))


def test_a_vocabulary_travels_as_a_file(tmp_path: Path) -> None:
    words = Vocabulary.of(["größe und maß", "und ende"], "words", size=10, length=3)
    words.save(tmp_path / "words.json")
    again = Vocabulary.load(tmp_path / "words.json")
    assert again == words
    assert again.encode(["Und maß voll"]).tolist() == words.encode(["und maß voll"]).tolist() == [[2, 5, 1]]
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(FedtailorError, match="is no vocabulary"):
        Vocabulary.load(tmp_path / "other.json")
    with pytest.raises(FedtailorError, match="expected a list of texts"):
        words.encode("one text")
