"""Ways to measure, in a module of their own: the process of each imports no more than this."""

from __future__ import annotations

import os
from typing import Any


def good_way(number: int) -> Any:
    return (lambda: number), (lambda: {"number": number})


def bad_way(_: int) -> Any:
    raise ValueError("cannot be built\nat all")


def dying_way(_: int) -> Any:
    return (lambda: os._exit(7)), dict
