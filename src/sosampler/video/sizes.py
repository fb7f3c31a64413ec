"""How large a decoded frame should be."""

from __future__ import annotations

from typing import Any

from sosampler.checks import whole_number
from sosampler.errors import InvalidArgument

Size = int | tuple[int, int] | None
"""None: as stored; an int: the short side, aspect ratio kept; (height, width): exactly that."""


def check_size(size: Any) -> Size:
    if size is None:
        return None
    if isinstance(size, (tuple, list)):
        if len(size) != 2:
            raise InvalidArgument(f"size={size!r} is not allowed; give the short side, or (height, width)")
        height, width = size
        return whole_number("size (height)", height), whole_number("size (width)", width)
    return whole_number("size", size)


def target_size(width: int, height: int, size: Size) -> tuple[int, int]:
    """(width, height) after resizing an upright frame of `width` x `height`."""
    if size is None:
        return width, height
    if isinstance(size, tuple):
        return size[1], size[0]
    # Truncation of the long side, not rounding: what torchvision's Resize(short side) does.
    if width <= height:
        return size, max(1, int(size * height / width))
    return max(1, int(size * width / height)), size
