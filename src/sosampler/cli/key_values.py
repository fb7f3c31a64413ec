"""KEY=VALUE on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sosampler.errors import InvalidArgument


def key_values(texts: Sequence[str]) -> dict[str, Any]:
    """Options of a classifier: whole numbers, numbers, true and false are read as such, the rest as text.

    >>> key_values(["head=frameexit", "num_frames=16", "drop_rate=0.5", "stride_on_1x1=true"])
    {'head': 'frameexit', 'num_frames': 16, 'drop_rate': 0.5, 'stride_on_1x1': True}
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key.isidentifier() or not value:
            raise InvalidArgument(f"--option {text!r} is not allowed; write KEY=VALUE, for example head=frameexit")
        found[key] = _value(value)
    return found


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
