"""CSV and Parquet: columns of numbers, and one sentence for what is none."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fedtailor
from fedtailor.data import load_dataset
from fedtailor.data.scan import findings
from fedtailor.errors import FedtailorError

HEADER = "height,income,label"
ROWS = [f"{row % 7},{1000 * (row % 5)},{row % 3}" for row in range(20)]


def table(folder: Path, *lines: str, name: str = "mine.csv") -> str:
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(folder / name)


def test_columns_become_scaled_features(tmp_path: Path) -> None:
    dataset = load_dataset(table(tmp_path, HEADER, *ROWS))
    assert dataset.origin.columns == ("height", "income")
    assert (dataset.num_classes, len(dataset.train), len(dataset.test)) == (3, 16, 4)
    x, y = dataset.train.take(torch.arange(16))
    assert torch.allclose(x.mean(0), torch.zeros(2), atol=1e-6)
    assert torch.allclose(x.std(0, unbiased=False), torch.ones(2), atol=1e-6)
    assert y.tolist()[:4] == [0, 1, 2, 0]
    assert "2 features (height, income), scaled" in dataset.origin.taken_for
    assert "standardise = false" in dataset.origin.otherwise
    plain = load_dataset(table(tmp_path, HEADER, *ROWS), standardise=False)
    assert plain.train.take(torch.tensor([1]))[0].tolist() == [[1.0, 1000.0]]


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_separators_names_and_other_columns(tmp_path: Path, separator: str) -> None:
    lines = [
        "\ufeffa,who,part,kind",
        *(f"{row},p{row % 2},{'test' if row > 7 else 'train'},k{row % 2}" for row in range(10)),
    ]
    path = table(tmp_path, *(line.replace(",", separator) for line in lines))
    dataset = load_dataset(path, label="kind", client="who", split="part")
    assert dataset.label_names == ("k0", "k1")
    assert (len(dataset.train), len(dataset.test)) == (8, 2)
    assert dataset.client_test.tolist() == ["p0", "p1"]


def test_no_header_and_the_index_of_pandas(tmp_path: Path) -> None:
    headless = load_dataset(table(tmp_path, *ROWS), label="column 3")
    assert headless.origin.columns == ("column 1", "column 2")
    assert len(headless.train) == 16
    index = load_dataset(table(tmp_path, f",{HEADER}", *(f"{n},{line}" for n, line in enumerate(ROWS))))
    assert index.origin.columns == ("height", "income")
    assert "counts the rows and is left out" in index.origin.taken_for


def test_what_the_label_means(tmp_path: Path) -> None:
    prices = table(tmp_path, "a,y", *(f"{row},{row * 10}" for row in range(20)))
    assert load_dataset(prices).num_classes == 191
    numbers = load_dataset(prices, targets="numbers")
    assert numbers.num_classes == 0
    assert numbers.train.targets.dtype == torch.float32
    assert load_dataset(prices, targets="names").num_classes == 20
    decimal = load_dataset(table(tmp_path, "a,y", *(f"{row},{row + 0.5}" for row in range(20))))
    assert (decimal.num_classes, decimal.train.targets[1].item()) == (0, 1.5)
    signs = load_dataset(
        table(tmp_path, "a,y", *(f"{row},{(-1) ** row}" for row in range(20))), targets="names"
    )
    assert signs.label_names == ("-1", "1")


def test_several_columns_are_labels_that_hold_or_do_not(tmp_path: Path) -> None:
    path = table(
        tmp_path, "a,p,q,r", *(f"{row},{row % 2},{row % 3 // 2},{row % 5 // 4}" for row in range(20))
    )
    dataset = load_dataset(path, label=["p", "r"])
    assert dataset.origin.columns == ("a", "q")
    assert (dataset.num_classes, dataset.label_names) == (0, ("p", "r"))
    assert dataset.test.targets.tolist() == [[0, 1], [1, 1], [0, 1], [1, 1]]
    assert "columns p, r are the targets, 2 labels of 0 or 1 each" in dataset.origin.taken_for
    assert findings(dataset) == ()
    numbers = load_dataset(path, label=["p", "r"], targets="numbers")
    assert (numbers.train.targets.dtype, numbers.label_names) == (torch.float32, ())
    assert load_dataset(path, label=["p"]).num_classes == 2
    run = {"dataset": path, "clients": 2, "options": {"label": ["p", "r"]}}
    with pytest.warns(UserWarning, match="2 labels of 0 or 1"):
        trained = fedtailor.train(
            "mlp", run, "equal", "fedavg", task="multi-label", rounds=1, engine={"workers": 0}
        )
    assert trained.data.inputs()["labels"] == ["p", "r"]
    texts = table(tmp_path, "text,p,q", *(f"word {row},{row % 2},1" for row in range(20)), name="texts.csv")
    assert load_dataset(texts, label=["p", "q"]).train.targets[:2].tolist() == [[0, 1], [1, 1]]


def test_decimal_commas_and_question_marks(tmp_path: Path) -> None:
    lines = ["area;year;y", "118,5;1.990,25;0", ",5;7;1", "-3;?;0", "?;8;1", "1e3;9;0"]
    dataset = load_dataset(table(tmp_path, *lines), standardise=False, missing="drop")
    raw = torch.cat([part.take(torch.arange(len(part)))[0] for part in (dataset.train, dataset.test)])
    assert raw.tolist() == [[118.5, 1990.25], [0.5, 7.0], [1000.0, 9.0]]
    headless = load_dataset(table(tmp_path, "1,5;2,5;0", "3,5;4,5;1"), label="column 3", standardise=False)
    assert headless.train.take(torch.tensor([1]))[0].tolist() == [[3.5, 4.5]]
    thousands = load_dataset(table(tmp_path, "a;y", "1,234;0"), decimal=",", standardise=False)
    assert thousands.train.take(torch.tensor([0]))[0].item() == pytest.approx(1.234)
    texts = load_dataset(table(tmp_path, "text,y", "?,0", "well,1"))
    assert len(texts.train) == 2


def test_true_and_false_are_one_and_zero(tmp_path: Path) -> None:
    """As pandas (True) and spreadsheets (TRUE) write them; of a label they are names."""
    rows = [f"{row},{row % 3 == 0},{str(row % 2 == 0).upper()}" for row in range(10)]
    dataset = load_dataset(table(tmp_path, "a,paid,label", *rows), standardise=False)
    assert dataset.train.take(torch.arange(4))[0].tolist() == [[0, 1], [1, 0], [2, 0], [3, 1]]
    assert dataset.label_names == ("FALSE", "TRUE")
    with pytest.raises(FedtailorError, match="column paid of .* holds 'true' on line 2: expected numbers"):
        load_dataset(table(tmp_path, "a,paid,label", *(r.lower() for r in rows), "1,maybe,true"))


def test_quantities_are_scaled_if_asked_for_and_the_scale_is_kept(tmp_path: Path) -> None:
    path = table(tmp_path, "a,y", *(f"{row},{1000 * row}" for row in range(50)))
    (large,) = findings(load_dataset(path, targets="numbers"))
    assert large == (
        "the targets of mine.csv have mean 24,000 and deviation 14,405: networks and learning rates are made for "
        "numbers of about 1; [data] options = { standardise_targets = true } scales them"
    )
    (quantity,) = findings(load_dataset(path))
    assert quantity.startswith(
        "the targets of mine.csv look like a quantity (40 different whole numbers in 40"
    )
    assert "whole numbers up to 48,000" in load_dataset(path).origin.taken_for
    scaled = load_dataset(path, standardise_targets=True)
    assert scaled.train.targets.mean().item() == pytest.approx(0, abs=1e-6)
    assert scaled.train.targets.std(correction=0).item() == pytest.approx(1)
    assert findings(scaled) == ()
    kept = scaled.origin.inputs(None, ())["targets"]
    raw = scaled.test.targets * kept["std"][0] + kept["mean"][0]
    assert raw.tolist() == pytest.approx([4000, 9000, 14000, 19000, 24000, 29000, 34000, 39000, 44000, 49000])
    assert "(y - 24,000) / 14,405; losses and errors are of what is scaled" in scaled.origin.taken_for


def test_numbers_that_are_not_there(tmp_path: Path) -> None:
    lines = [HEADER, *ROWS]
    lines[4], lines[9] = ",2000,0", "3,NA,2"
    path = table(tmp_path, *lines)
    with pytest.raises(
        FedtailorError, match=r"lacks 2 numbers in height, income \(lines 5 and 10\).*missing = "
    ):
        load_dataset(path)
    dropped = load_dataset(path, missing="drop")
    assert len(dropped.train) + len(dropped.test) == 18
    assert 5 not in dropped.origin.lines[0]
    filled = load_dataset(path, missing="mean")
    x = filled.train.take(torch.arange(len(filled.train)))[0]
    assert x[3, 0].item() == pytest.approx(0, abs=1e-6)
    raw = torch.tensor([[float("nan"), 2000.0]])
    assert torch.allclose(filled.train.preparation.layer()(raw), x[3:4], atol=1e-6)
    with pytest.raises(FedtailorError, match="missing = 'mean': expected standardise = true"):
        load_dataset(path, missing="mean", standardise=False)


@pytest.mark.parametrize(
    ("lines", "options", "words"),
    [
        (
            ["a,city,y", "1,Rome,0"],
            {},
            r"column city of .* holds 'Rome' on line 2: expected numbers.*leave_out",
        ),
        (["a,b", "1,2"], {}, r"has the columns a, b: say which one is the label"),
        (["a,y,label", "1,2,3"], {}, "has the columns y, label: say which one is meant"),
        (["a,y", "1,2,3"], {}, "line 2 of .* has 3 cells: expected 2"),
        (["a,a,y", "1,2,3"], {}, "two columns called 'a'"),
        (["a,y", "1,"], {}, "the label, is empty on line 2"),
        (["a,y", "1,0"], {"label": "z"}, "unknown column of mine.csv, in label = 'z'"),
        (["a,y", "1,0"], {"leave_out": ["b"]}, "unknown column of mine.csv, in leave_out = 'b'"),
        (["a,y", "1,0"], {"leave_out": ["a"]}, "has no column besides y"),
        (["a,y", "1,0"], {"missing": "zero"}, "unknown missing 'zero'"),
        (
            ["a,y", "1,red"],
            {"targets": "numbers"},
            "holds 'red' on line 2: targets = 'numbers' expects numbers",
        ),
        (["a,client,y", "1,x,0", "2,,1"], {}, "names the client on some lines only"),
        ([""], {}, "holds no lines"),
        (["a,y", '1,"0'], {}, "cannot be read as CSV"),
        (
            ["a:b:y", "1:2:0"],
            {},
            r"has one column, 'a:b:y': several with ':' between them\? Expected a comma",
        ),
        (["a;y", "1,234;0", "5,678;1"], {}, r"holds '1,234' on line 2: expected numbers \(.*decimal = \",\""),
        (["a;y", "1,5;0"], {"decimal": "."}, "holds '1,5' on line 2: expected numbers"),
        (["a,y", "1,0"], {"decimal": ";"}, "decimal = ';': expected '.' or ','"),
        (["a,y", "1,0"], {"label": 3}, "label = 3: expected the name of a column, or a list"),
        (["a,y", "1,0"], {"label": []}, r"label = \[\]: expected the name of a column, or a list"),
        (["a,y", "1,0"], {"label": ["y", "y"]}, "expected each column once"),
        (["a,y", "1,0"], {"label": ["y", "z"]}, "unknown column of mine.csv, in label = 'z'"),
        (
            ["a,p,q", "1,0,2"],
            {"label": ["p", "q"]},
            "column q of .* holds 2 on line 2: expected 0 or 1; .*'numbers'",
        ),
        (
            ["a,p,q", "1,0,1"],
            {"label": ["p", "q"], "targets": "names"},
            "targets = 'names': expected numbers",
        ),
        (
            ["a,p,q", "1,0,1"],
            {"label": ["p", "q"], "standardise_targets": True},
            "expected quantities",
        ),
        (["a,y", "1,red"], {"standardise_targets": True}, "expected targets that are numbers, not names"),
        (["a,y", "1,0"], {"client": ["a"]}, r"client = \['a'\]: expected the name of one column"),
        (["a,y", "1,0"], {"leave_out": 3}, "leave_out = 3: expected a list of columns"),
        (["a,y", "1,0"], {"num_classes": "many"}, "num_classes = 'many': expected 0"),
        (["text,y", "so dull,0"], {"text": ["text"]}, r"text = \['text'\]: expected the name of one column"),
        (["text,y", "so dull,0"], {"lenth": 3}, "did you mean 'length'.*read_as"),
    ],
)
def test_wrong_tables(tmp_path: Path, lines: list[str], options: dict, words: str) -> None:
    with pytest.raises(FedtailorError, match=words):
        load_dataset(table(tmp_path, *lines), **options)


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "old.csv").write_bytes("größe,y\n1,0\n".encode("latin-1"))
    with pytest.raises(FedtailorError, match="is not UTF-8"):
        load_dataset(str(tmp_path / "old.csv"))


def test_parquet_is_the_same_table(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = np.array([[float(cell) for cell in row.split(",")] for row in ROWS]).T
    columns[1, 3] = np.nan
    content = {"height": columns[0], "income": columns[1], "label": columns[2].astype(int)}
    parquet.write_table(arrow.table(content), tmp_path / "mine.parquet")
    with pytest.raises(FedtailorError, match=r"lacks 1 numbers in income \(row 3\)"):
        load_dataset(str(tmp_path / "mine.parquet"))
    dataset = load_dataset(str(tmp_path / "mine.parquet"), missing="drop")
    assert dataset.train.take(torch.tensor([0]))[0].shape == (1, 2)
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(FedtailorError, match="cannot be read as Parquet"):
        load_dataset(str(tmp_path / "torn.parquet"))


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(FedtailorError, match=r"fedtailor\[parquet\]"):
        load_dataset(str(tmp_path / "mine.parquet"))
