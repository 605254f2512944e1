"""The cards of the methods as files: what there is, told without loading PyTorch.

A card is Markdown beside the method's code. Its head names the methods that it describes, and says in a line what
they do; where it describes several, a line under a method's own name comes before that of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable

HEAD = "---\n"
LONGEST = 60  # characters of a summary: beside the longest name it fits into a terminal of 80 columns


def summaries() -> dict[str, str]:
    """What each method does, in one line, by its name.

    >>> summaries()["heterofl"]
    'Each device trains the first channels of every layer'
    """
    found = {}
    for file in _files():
        head = _head(file.read_text(encoding="utf-8"))
        for name in head.get("name", "").split(", "):
            found[name] = head.get(name, head["summary"])
    return dict(sorted(found.items()))


def card(name: str) -> str | None:
    """The card of a method, without its head; None where there is no such file."""
    for file in _files():
        text = file.read_text(encoding="utf-8")
        if name in _head(text).get("name", "").split(", "):
            return text.partition(HEAD)[2].partition(HEAD)[2].lstrip()
    return None


def _files() -> Iterator[Traversable]:
    """In the folder of the methods and one below: looked up from above, because to ask the package would load it."""
    methods = resources.files("fedtailor") / "methods"
    for entry in sorted(methods.iterdir(), key=lambda entry: entry.name):
        below = sorted(entry.iterdir(), key=lambda file: file.name) if entry.is_dir() else [entry]
        yield from (file for file in below if file.name.endswith(".md"))


def _head(text: str) -> dict[str, str]:
    lines = text.partition(HEAD)[2].partition(HEAD)[0].splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
