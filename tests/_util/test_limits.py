"""The limits, and what the documents say about them."""

from __future__ import annotations

import re

import pytest

from sosampler._util import limits
from sosampler._util.limits import check_below, check_count
from sosampler.errors import InvalidArgument
from tests.doc_blocks import ROOT

UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def test_the_document_lists_every_limit_with_its_default() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) ?(\w*) \|", text, flags=re.MULTILINE)
    listed = {name: int(number.replace(",", "")) * UNITS[unit] for name, number, unit in rows}
    of_the_page = {"UPLOAD_SECONDS", "STALL_SECONDS"}
    there = {name: getattr(limits, name) for name in dir(limits) if name.isupper()}
    assert listed == {name: value for name, value in there.items() if name not in of_the_page}
    assert f"| seconds of an upload | {limits.UPLOAD_SECONDS:g} |" in text
    assert f"| seconds without a byte of an upload | {limits.STALL_SECONDS:g} |" in text


def test_messages_name_the_constant_which_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_count("threads", 7, "MAX_THREADS") == 7
    monkeypatch.setattr(limits, "MAX_THREADS", 6)
    with pytest.raises(InvalidArgument, match=r"^threads=7 must be at most 6 \(limits\.MAX_THREADS\)$"):
        check_count("threads", 7, "MAX_THREADS")
    with pytest.raises(InvalidArgument, match="threads=0 must be an int of at least 1"):
        check_count("threads", 0, "MAX_THREADS")
    with pytest.raises(InvalidArgument, match="fps=a number of thousands of digits must be at most"):
        check_below("fps", 10**5000, "MAX_FPS")
