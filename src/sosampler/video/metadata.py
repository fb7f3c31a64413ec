"""What is known of a video as a whole."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class VideoMetadata:
    """Figures of one video; counted from its packets or its container's index, not guessed from its header."""

    total_num_frames: int
    fps: float  # average: total_num_frames / duration
    duration: float  # seconds from the first frame's appearance to the last one's end
    start_seconds: float  # timestamp of the first frame; not always zero
    width: int  # pixels, upright
    height: int  # pixels, upright
    rotation: int  # degrees, counter-clockwise, already applied to width, height and frames
    codec: str
    num_keyframes: int
    decoder: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
