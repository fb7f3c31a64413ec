"""The demonstration: a synthetic film, frames chosen from it, and a contact sheet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sosampler._select import select
from sosampler.errors import InvalidArgument
from sosampler.files import replacing
from sosampler.report.contact_sheet import write_contact_sheet
from sosampler.synthetic import encode_video, story_frames

_FPS = 24
_NUM_FRAMES = 8


def run_demo(out: Path) -> dict[str, Any]:
    """Write film.mp4, contact_sheet.png and selection.json into `out`; returns what selection.json holds."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"--out {out}: the folder cannot be made ({error.strerror}); give another") from error
    video, sheet, details = out / "film.mp4", out / "contact_sheet.png", out / "selection.json"
    encode_video(story_frames(_FPS), video, fps=_FPS, codec_options={"preset": "veryfast", "crf": "20"})
    selections = [
        select(video, _NUM_FRAMES, policy="uniform"),
        select(video, _NUM_FRAMES, policy="keyframe"),
        select(video, _NUM_FRAMES, policy="frame-difference", num_candidates=64),
    ]
    write_contact_sheet(selections, sheet)
    result = {
        "video": str(video),
        "contact_sheet": str(sheet),
        "json": str(details),
        "rows": [selection.to_dict() for selection in selections],
    }
    with replacing(details) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result
