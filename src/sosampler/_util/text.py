"""Text of strangers, such as names of files and classes, made safe to print and to open in a spreadsheet."""

from __future__ import annotations

import logging
import unicodedata
from typing import Any

# With these a spreadsheet takes a cell for a formula.
_FORMULA = ("=", "+", "-", "@")


def escaped(text: str, *, lines: bool = False) -> str:
    """Return text in which nothing moves a terminal's cursor, changes its colours or turns the direction of reading.

    Control characters, also newlines unless there may be several `lines`, and bytes that are not UTF-8 become escape
    sequences.

    >>> escaped("a\\x1b[31m\\n\\u202eb\\udcff é 日本"), escaped("one\\ntwo\\r", lines=True)
    ('a\\\\x1b[31m\\\\n\\\\u202eb\\\\xff é 日本', 'one\\ntwo\\\\r')
    """
    if text.isprintable():
        return text
    return "".join(letter if _is_safe(letter) or (lines and letter == "\n") else _escape(letter) for letter in text)


def _is_safe(letter: str) -> bool:
    return letter.isprintable() or unicodedata.category(letter) == "Zs"  # spaces of all widths


def _escape(letter: str) -> str:
    if "\udc80" <= letter <= "\udcff":  # how Python keeps a byte of a file name that is not UTF-8
        return f"\\x{ord(letter) - 0xDC00:02x}"
    return letter.encode("unicode_escape").decode("ascii")


def csv_cell(value: Any) -> Any:
    """Return a value for a cell of a CSV: texts in one line, and never a formula.

    >>> csv_cell("=HYPERLINK(1)"), csv_cell("a\\nb"), csv_cell(-1.5)
    ("'=HYPERLINK(1)", 'a\\\\nb', -1.5)
    """
    if not isinstance(value, str):
        return value
    text = escaped(value)
    return f"'{text}" if text.startswith(_FORMULA) else text


class _Escaping(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = escaped(record.getMessage()), ()
        return True


log = logging.getLogger("sosampler")
"""The package's log; what it is given is escaped."""
log.addFilter(_Escaping())
