"""Every model of the catalogue (``make test-zoo``): traced, checked, cut at 1/4, 1/2 and 3/4, run, trained, merged.

Results lie in ``build/zoo``, one file per model, where ``tools/zoo_page.py`` finds them. A run that was stopped goes on
where it was: a result of the same code and libraries is not worked out again.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

from zoo.catalogue import CATALOGUE
from zoo.trial import RESULTS, Result, TooSlowError, trial

pytestmark = pytest.mark.zoo
ROOT = Path(__file__).parents[2]
LIBRARIES = ("torch", "torchvision", "timm", "transformers")


@cache
def digest() -> str:
    """Of everything that a result depends on."""
    found = hashlib.sha256(" ".join(version(library) for library in LIBRARIES).encode())
    for folder in ("src/fedtailor/elasticity", "tests/zoo"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


def result_of(key: str) -> Result:
    """From the disk, or worked out now."""
    path = RESULTS / f"{key.replace('/', '.')}.json"
    if path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored.pop("digest") == digest():
            return Result(**stored)
    result = Result(key)
    try:
        result = trial(CATALOGUE[key])
    except TooSlowError as slow:
        result.verdict, result.sentence = "too slow", str(slow)
    finally:
        result.save(digest())
    return result


def test_the_zoo_is_large_enough():
    counts = {library: sum(key.startswith(library) for key in CATALOGUE) for library in LIBRARIES[1:]}
    assert sum(counts.values()) >= 150
    assert counts["torchvision"] >= 20
    assert counts["transformers"] >= 25


@pytest.mark.parametrize("key", CATALOGUE)
def test_a_cut_is_right_or_refused_with_a_sentence(key):
    result = result_of(key)
    assert result.verdict in ("passes", "in part", "refused"), result.sentence
    assert (result.verdict == "passes") == (not result.sentence)
