"""The limits, and what the documents say about them."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

import pytest

from sosampler._util import limits
from sosampler._util.limits import check_below, check_count
from sosampler.cli.ui import ui_command
from sosampler.errors import InvalidArgument
from sosampler.inference.options import WATCH_IDLE, WATCH_RECONNECTS
from sosampler.video import limits as video_limits
from sosampler.video import remote, streams
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


def test_the_document_lists_the_limits_of_videos_streams_and_the_page() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    given = video_limits.Limits()
    most = (video_limits.MAX_BYTES >> 30, video_limits.MAX_BYTES_PER_FILE_BYTE, video_limits.MIN_MAX_BYTES >> 20)
    rows = {
        "max_pixels": f"{given.max_pixels:,} (two 8K images)",
        "max_frames": f"{given.max_frames:,}",
        "max_duration": f"{given.max_duration:,.0f} ({given.max_duration / 3600:g} hours)",
        "max_bytes": "{} GiB, and {:,} times the file where that is less, but at least {} MiB".format(*most),
        "timeout": f"{given.timeout:g}; on the page {video_limits.PAGE_TIMEOUT:g}",
        "max_read": f"{given.max_read >> 30} GiB",
        "retries": f"{given.retries}",
    }
    assert set(rows) == {field.name for field in fields(given)}
    for name, default in rows.items():
        assert re.search(
            rf"^\| [^|]+ \| {re.escape(default)} \| `--{name.replace('_', '-')}`, `{name}` \|$", text, re.M
        )
    for constant in ("MAX_STALL_SECONDS", "MAX_PACKET_SECONDS"):
        assert f"| {getattr(video_limits, constant):g} | `{constant}` in `sosampler.video.limits` |" in text
    times = f"{video_limits.MAX_PACKET_BYTES_PER_FILE_BYTE} times the file"
    assert f"| {times} | `MAX_PACKET_BYTES_PER_FILE_BYTE` in `sosampler.video.limits` |" in text
    assert f"| {remote.LISTING_SECONDS:g} | `LISTING_SECONDS` in `sosampler.video.remote` |" in text
    assert f"| {WATCH_IDLE:g} | `--idle`, `idle=` |" in text
    assert f"| {WATCH_RECONNECTS} | `--reconnects`, `reconnects=` |" in text
    assert f"| {streams._MAX_SILENT}, or {streams._MAX_FAILED} that do not decode | `sosampler.video.streams` |" in text
    page = inspect.signature(ui_command).parameters
    assert f"| bytes of an upload | {page['max_upload'].default.replace('GB', ' GB')} | `--max-upload` |" in text
    assert f"| videos on the page | {page['max_videos'].default} | `--max-videos` |" in text


def test_messages_name_the_constant_which_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_count("threads", 7, "MAX_THREADS") == 7
    monkeypatch.setattr(limits, "MAX_THREADS", 6)
    with pytest.raises(InvalidArgument, match=r"^threads=7 must be at most 6 \(limits\.MAX_THREADS\)$"):
        check_count("threads", 7, "MAX_THREADS")
    with pytest.raises(InvalidArgument, match="threads=0 must be an int of at least 1"):
        check_count("threads", 0, "MAX_THREADS")
    with pytest.raises(InvalidArgument, match="fps=a number of thousands of digits must be at most"):
        check_below("fps", 10**5000, "MAX_FPS")
