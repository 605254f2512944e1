"""What a device can afford: a budget of limits, and how people write and read them."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from fractions import Fraction
from math import isfinite
from numbers import Integral, Rational

from fedtailor.elasticity.cutting.selections import WidthLike
from fedtailor.errors import FedtailorError, unknown

Limit = int | Fraction  # an absolute number in the smallest unit, or a share of the full model

COUNT_UNITS = {"k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
BYTE_UNITS = {
    "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
TIME_UNITS = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9}

# Limits that may be absolute, with their units. The others, width, depth and density, are shares by nature.
UNITS = {
    "macs": COUNT_UNITS,
    "params": COUNT_UNITS,
    "bytes": BYTE_UNITS,
    "memory": BYTE_UNITS,
    "step_time": TIME_UNITS,
}
EXAMPLES = {"macs": "5M", "params": "100k", "bytes": "2MB", "memory": "20MB", "step_time": "3ms"}

NUMBER_AND_UNIT = re.compile(r"([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d{1,2})?)\s*([^\d\s]*)")


@dataclass(frozen=True)
class Budget:
    """The limits of a device; several may hold at once.

    ``width`` is a share of every layer's channels, ``depth`` of the blocks that follow each other, ``density`` of the
    single weights. The others are shares of the full model's cost when they lie between 0 and 1 (or end with %), and
    absolute when they are whole numbers above 1 or carry a unit: ``macs`` of one example, ``params``,
    ``bytes`` that are stored and sent, ``memory`` that training takes (estimated), ``step_time`` of one training step
    (measured).

    >>> Budget(width="1/4")
    Budget(width=1/4)
    >>> Budget(macs=0.5, params=100_000)
    Budget(macs=1/2, params=100000)
    >>> Budget(macs="5M", memory="20MiB", step_time="3ms", bytes="50%")
    Budget(macs=5000000, bytes=1/2, memory=20971520, step_time=3ms)
    """

    width: WidthLike | None = None
    macs: WidthLike | None = None
    params: WidthLike | None = None
    bytes: WidthLike | None = None
    density: WidthLike | None = None
    memory: WidthLike | None = None
    step_time: WidthLike | None = None
    depth: WidthLike | None = None

    def __post_init__(self) -> None:
        for name in LIMITS:
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, as_limit(name, value))

    @classmethod
    def parse(cls, text: str) -> Budget:
        """The budget that ``name=limit`` pairs describe, separated by commas.

        >>> Budget.parse("macs=5M, memory=20MB")
        Budget(macs=5000000, memory=20000000)
        """
        limits: dict[str, WidthLike] = {}
        for part in text.split(","):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or not name or not value:
                raise FedtailorError(
                    f"budget {text!r}: {part.strip()!r} is not of the form name=limit, as in macs=5M,memory=20MB"
                )
            if name not in LIMITS:
                raise unknown("limit", name, LIMITS, hint=f" (in budget {text!r})")
            if name in limits:
                raise FedtailorError(f"budget {text!r}: {name} is limited twice")
            limits[name] = value
        return cls(**limits)

    @property
    def limits(self) -> dict[str, Limit]:
        """The limits that are set, by name, in their exact form."""
        return {name: getattr(self, name) for name in LIMITS if getattr(self, name) is not None}

    def __repr__(self) -> str:
        return f"Budget({', '.join(f'{name}={_exact(name, limit)}' for name, limit in self.limits.items())})"


LIMITS = tuple(item.name for item in fields(Budget))


def as_limit(name: str, value: object) -> Limit:
    """The exact form of a limit that a person wrote; what cannot be one is refused in a sentence.

    >>> as_limit("macs", "1.5M"), as_limit("memory", "20MiB"), as_limit("params", "50%")
    (1500000, 20971520, Fraction(1, 2))
    """
    number, unit = _split(value)
    share = None if number is None else number / 100 if unit == "%" else number if unit == "" else None
    if share is not None and 0 < share <= 1:
        return share
    if name not in UNITS:
        raise FedtailorError(
            f"{name} = {value!r}: expected a number above 0 and at most 1, such as 0.25, '1/4' or '25%'"
        )
    if unit not in ("", "%", *UNITS[name]):
        raise FedtailorError(f"{name} = {value!r}: {unknown('unit', unit, UNITS[name])}")
    # Without a unit only whole numbers are absolute; of a time that is written so, nobody could tell the unit.
    plain = unit == "" and share is not None and share.denominator == 1
    if plain and name == "step_time":
        plain = isinstance(value, int)  # nanoseconds, as ``limits`` gives them
    absolute = (
        number * UNITS[name][unit] if number is not None and unit in UNITS[name] else share if plain else None
    )
    if absolute is None or absolute < 2:
        kind = "a time with its unit" if name == "step_time" else "a whole number above 1"
        raise FedtailorError(
            f"{name} = {value!r}: expected {kind}, or a share of the full model above 0 and at most 1, "
            f"such as '{EXAMPLES[name]}' or '50%'"
        )
    return int(absolute)


def _split(value: object) -> tuple[Fraction | None, str]:
    """The number and its unit; no number where the value is none."""
    if isinstance(value, str):
        text = value.strip()
        if "/" in text:
            return _fraction(text), ""
        found = NUMBER_AND_UNIT.fullmatch(text)
        return (_fraction(found[1].replace("_", "")), found[2]) if found else (None, "")
    if isinstance(value, bool):
        return None, ""
    if isinstance(value, float):
        # A float stands for the decimal that a person wrote, as in ``as_width``.
        return (_fraction(f"{value:.12g}") if isfinite(value) else None), ""
    return (Fraction(value), "") if isinstance(value, Integral | Rational) else (None, "")


def _fraction(text: str) -> Fraction | None:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None


def _exact(name: str, limit: Limit) -> str:
    if name == "step_time" and isinstance(limit, int):
        return amount(name, limit).replace(" ", "")
    return str(limit)


def limit_text(name: str, limit: Limit) -> str:
    """A limit as a person reads it.

    >>> limit_text("memory", 20_000_000), limit_text("macs", Fraction(1, 2))
    ('20 MB', '50 %')
    """
    if isinstance(limit, Fraction):
        return f"{float(100 * limit):.4g} %"
    return amount(name, limit)


def amount(name: str, value: float | Fraction) -> str:
    """A cost with its unit, four digits.

    >>> amount("macs", 490_942), amount("memory", 1_234_567), amount("step_time", 2_500_000), amount("params", 7)
    ('490.9 k', '1.235 MB', '2.5 ms', '7')
    """
    units = {
        unit: size for unit, size in UNITS[name].items() if "i" not in unit and unit not in ("K", "KB", "us")
    }
    fitting = [unit for unit, size in units.items() if value >= size]
    unit = max(fitting, key=units.__getitem__) if fitting else min(units, key=units.__getitem__)
    if not fitting and name in ("macs", "params"):
        return f"{float(value):.4g}"
    return f"{float(value / units[unit]):.4g} {unit}"
