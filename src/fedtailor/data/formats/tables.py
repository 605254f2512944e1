"""Tables by column: CSV and tab-separated files, Parquet (an extra), and JSON lines seen as a table."""

from __future__ import annotations

import csv
import importlib
import io
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedtailor.data.batches import TARGET_KEYS
from fedtailor.data.files import broken, read_file
from fedtailor.data.formats.lines import numbered_records
from fedtailor.data.partitions import Array
from fedtailor.errors import FedtailorError, require, unknown

SEPARATORS = ("\t", ";", "|", ",")  # of two that fit alike, the first: a comma may stand in a number
DECIMAL_COMMA = re.compile(r"[+-]?(\d{1,3}(\.\d{3})+|\d*),\d+")
THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+")
ROWS_TO_JUDGE = 20  # by which the separator is told
NOTHING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})  # cells that say that there is no value
LABELS = (*TARGET_KEYS, "class")  # columns that are taken for the label
CLIENTS = ("client", "user")
LARGEST_CELL = 2**24  # characters


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of equal length by name, and the line of the file on which each row stands."""

    path: Path
    columns: Mapping[str, Sequence[Any]]
    lines: Array
    line_word: str = "line"  # Parquet has rows
    unnamed: bool = False  # a first column without a name that only counted the rows was left out

    def __len__(self) -> int:
        return len(self.lines)

    def numbers(self, name: str) -> Array | None:
        """A column as float64, NaN where there is nothing; None where it holds anything but numbers."""
        values = self.columns[name]
        try:
            return np.asarray([np.nan if is_nothing(value) else value for value in values], dtype=np.float64)
        except (ValueError, TypeError):
            return None

    def first_word(self, name: str) -> str:
        """Where a column first holds something that is no number: ``'Rome' on line 7``."""
        for line, value in zip(self.lines.tolist(), self.columns[name], strict=True):
            if not is_nothing(value) and not _is_number(value):
                return f"{value!r} on {self.line_word} {line}"
        return "nothing"

    def one_of(self, given: str | None, usual: Sequence[str], setting: str) -> str | None:
        """The column that the user named, or the only one with a usual name; None where there is none."""
        if given is not None:
            require(isinstance(given, str), setting, given, "the name of one column")
            if given not in self.columns:
                raise unknown(f"column of {self.path.name}, in {setting} =", given, self.columns)
            return given
        if len(self.columns) == 1 and (signs := _signs(next(iter(self.columns)))):
            raise FedtailorError(
                f"{self.path} has one column, {next(iter(self.columns))!r}: several with {signs!r} between them? "
                "Expected a comma, a semicolon, a tab or | between cells"
            )
        found = [name for name in self.columns if name.lower() in usual]
        if len(found) > 1:
            raise FedtailorError(
                f"{self.path} has the columns {', '.join(found)}: "
                f'say which one is meant, options = {{ {setting} = "{found[0]}" }}'
            )
        return found[0] if found else None

    def take(self, rows: Array) -> Table:
        """Some of the rows."""
        chosen = rows.tolist()
        columns = {name: [values[row] for row in chosen] for name, values in self.columns.items()}
        return Table(self.path, columns, self.lines[rows], self.line_word, self.unnamed)


def _signs(header: str) -> str:
    """The sign that seems to stand between names in what was read as one; "" where there is none."""
    found = re.fullmatch(r"\w+(?:([^\w\s]|\s+)\w+)(?:\1\w+)+", header)
    return found.group(1) if found else ""


def is_nothing(value: object) -> bool:
    """Whether a cell says that there is no value."""
    if isinstance(value, str):
        return value.strip().lower() in NOTHING
    return value is None or (isinstance(value, float) and np.isnan(value))


def _is_number(value: object) -> bool:
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def read_table(path: Path, decimal: str | None = None) -> Table:
    """The table in a file, by the ending of its name; ``decimal`` is the sign in the numbers of a CSV file."""
    if path.suffix == ".jsonl":
        return read_lines(path)
    return read_parquet(path) if path.suffix == ".parquet" else read_csv(path, decimal)


def read_lines(path: Path) -> Table:
    """JSON lines: the fields of all lines together are the columns, None where a line lacks one."""
    found = list(numbered_records(path))
    names = list(dict.fromkeys(name for _, record in found for name in record))
    columns = {name: [record.get(name) for _, record in found] for name in names}
    return Table(path, columns, np.array([line for line, _ in found], dtype=np.int64))


def read_csv(path: Path, decimal: str | None = None) -> Table:
    """Comma, semicolon, tab or | between the cells; the first line has the names, unless all of it is numbers.

    Where no comma stands between the cells, it may stand in numbers: ``118,5``.
    """
    try:
        text = read_file(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FedtailorError(
            f"{path} is not UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8"
        ) from error
    separator = "\t" if path.suffix == ".tsv" else _separator(text)
    rows, lines = _rows(path, text, separator)
    if not rows:
        raise FedtailorError(f"{path} holds no lines: expected the names of columns and then rows of numbers")
    commas = separator != "," and decimal != "."
    headless = all(_is_number(cell) or (commas and DECIMAL_COMMA.fullmatch(cell.strip())) for cell in rows[0])
    names = [f"column {place}" for place in range(1, len(rows[0]) + 1)] if headless else _names(path, rows[0])
    body, lines = (rows, lines) if headless else (rows[1:], lines[1:])
    for row, line in zip(body, lines, strict=True):
        if len(row) != len(names):
            raise FedtailorError(
                f"line {line} of {path} has {len(row)} cells: expected {len(names)}, as on the first line"
            )
    columns = (
        dict(zip(names, map(list, zip(*body, strict=True)), strict=True)) if body else {n: [] for n in names}
    )
    if commas:
        columns = {name: _with_points(column, sure=decimal == ",") for name, column in columns.items()}
    return _without_count(Table(path, columns, np.array(lines, dtype=np.int64)))


def _separator(text: str) -> str:
    """The sign that makes equally many cells, and most, of the first rows; if none does, the first line's own."""
    widths: dict[str, int] = {}
    for sign in SEPARATORS:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=sign)
        try:
            counts = {len(row) for row in itertools.islice(filter(None, reader), ROWS_TO_JUDGE)}
        except csv.Error:
            continue
        if len(counts) == 1:
            widths[sign] = counts.pop()
    if max(widths.values(), default=1) > 1:
        return max(widths, key=lambda sign: widths[sign])
    first = text.lstrip("\r\n").partition("\n")[0]
    return max(reversed(SEPARATORS), key=first.count)


def _with_points(column: list[str], sure: bool) -> list[str]:
    """A column of decimal commas with points; as it is if it holds other things, or if commas may mean thousands."""
    cells = [cell.strip() for cell in column if not is_nothing(cell)]
    with_comma = [cell for cell in cells if "," in cell]
    if not with_comma or not all(DECIMAL_COMMA.fullmatch(cell) or _is_number(cell) for cell in cells):
        return column
    if not sure and all(THOUSANDS.fullmatch(cell) for cell in with_comma):
        return column
    return [cell.replace(".", "").replace(",", ".") if "," in cell else cell for cell in column]


def _rows(path: Path, text: str, separator: str) -> tuple[list[list[str]], list[int]]:
    """All rows that are not blank, and the line on which each begins: a quoted cell may go over several."""
    before = csv.field_size_limit(LARGEST_CELL)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    rows, lines, begin = [], [], 1
    try:
        for row in reader:
            if row:
                rows.append(row)
                lines.append(begin)
            begin = reader.line_num + 1
    except csv.Error as error:
        raise broken(path, f"cannot be read as CSV (line {reader.line_num}: {error})") from error
    finally:
        csv.field_size_limit(before)
    return rows, lines


def _names(path: Path, header: list[str]) -> list[str]:
    names = [cell.strip() or f"column {place}" for place, cell in enumerate(header, start=1)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise FedtailorError(f"{path} has two columns called {twice!r}: expected names that differ")
    return names


def _without_count(table: Table) -> Table:
    """Without a first column that has no name and counts the rows: the index that pandas writes."""
    values = table.numbers("column 1") if "column 1" in table.columns else None
    counts = values is not None and len(values) > 1 and np.array_equal(values, np.arange(len(values)))
    if not counts or "column 2" in table.columns:
        return table
    columns = {name: column for name, column in table.columns.items() if name != "column 1"}
    return Table(table.path, columns, table.lines, unnamed=True)


def read_parquet(path: Path) -> Table:
    """A Parquet file, by way of pyarrow."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise FedtailorError(
            "reading Parquet needs pyarrow: install fedtailor with its extra, fedtailor[parquet]"
        ) from error
    errors: tuple[type[Exception], ...] = (importlib.import_module("pyarrow").ArrowException, OSError)
    try:
        found = parquet.read_table(path)
    except errors as error:
        raise broken(path, f"cannot be read as Parquet ({error})") from error
    names: Iterable[str] = found.column_names
    columns = {str(name): found.column(place).to_pylist() for place, name in enumerate(names)}
    return Table(path, columns, np.arange(found.num_rows, dtype=np.int64), line_word="row")
