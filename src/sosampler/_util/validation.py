"""Checks of single arguments, shared so that every message has one wording."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Iterable
from typing import Any

from sosampler.errors import InvalidArgument


def check_int(name: str, value: Any, *, at_least: int = 1, at_most: int | None = None) -> int:
    """Return `value` as int if it is one within its bounds, which the message names."""
    is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_int or value < at_least or (at_most is not None and value > at_most):
        bounds = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise InvalidArgument(f"{name}={short_repr(value)} must be an int {bounds}")
    return int(value)


def short_repr(value: Any) -> str:
    """Return a value for a message; Python refuses to print numbers of thousands of digits.

    >>> short_repr("a"), short_repr(10**5000), len(short_repr("a" * 1000))
    ("'a'", 'a number of thousands of digits', 203)
    """
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 200 else f"{text[:200]}..."


def check_float(name: str, value: Any, *, above: float = -math.inf, at_least: float = -math.inf) -> float:
    """Return `value` as a finite float if it is one within its bounds, which the message names."""
    bound = f" above {above:g}" if above > -math.inf else f" of at least {at_least:g}" if at_least > -math.inf else ""
    good = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        number = float(value) if good else math.nan
    except OverflowError:  # an int of hundreds of digits
        number = math.inf
    if not math.isfinite(number) or number <= above or number < at_least:
        raise InvalidArgument(f"{name}={short_repr(value)} must be a number{bound}")
    return number


def check_bool(name: str, value: Any) -> bool:
    """Return `value` if it is True or False; texts such as "no" would count as true."""
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name}={short_repr(value)} must be True or False")
    return value


def one_of(name: str, value: Any, allowed: Iterable[str]) -> str:
    """Return `value` if it is one of the allowed words."""
    words = list(allowed)
    if value not in words:
        raise InvalidArgument(f"{name}={short_repr(value)} is unknown; choose one of: {', '.join(words)}")
    return str(value)


def check_range(name: str, value: Any) -> tuple[float, float]:
    """Return two numbers above 0 of which the first is not the larger one."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise InvalidArgument(f"{name}={value!r} must be two numbers, the smaller one first")
    low, high = (check_float(f"{name}[{index}]", number, above=0.0) for index, number in enumerate(value))
    if low > high:
        raise InvalidArgument(f"{name}={value!r} must have the smaller number first")
    return low, high


def check_fraction(name: str, value: Any) -> float:
    """Return a number from 0 to below 1."""
    if check_float(name, value, at_least=0.0) >= 1:
        raise InvalidArgument(f"{name}={value!r} must be at least 0 and below 1")
    return float(value)


def copy_json(name: str, value: Any) -> dict[str, Any]:
    """Return a copy of a dict of JSON values."""
    try:
        copy = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"{name}={value!r} must be a dict of JSON values ({error}); give strings, finite numbers, lists and dicts"
        ) from error
    if not isinstance(copy, dict) or list(copy) != list(value):
        raise InvalidArgument(f"{name}={value!r} must be a dict of JSON values, or {{}}")
    return copy
