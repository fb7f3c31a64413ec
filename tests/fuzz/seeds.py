"""Small sound files to damage, one for each kind of container and codec that PyAV can write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av

from sosampler.video.synthetic import numbered_video
from tests.clips import index_first

_X264 = {"x264-params": "keyint=8:min-keyint=8:scenecut=0:log-level=error"}
_FAST = {"deadline": "realtime", "cpu-used": "8"}
# Name with the suffix of its file -> how it is encoded: 24 frames of 96x64, a keyframe every 8.
_SEEDS: dict[str, dict[str, Any]] = {
    "h264.mp4": {},
    "no_b_frames.mp4": {"codec_options": {"bf": "0"}},
    "open_gop.mp4": {"codec_options": {"x264-params": _X264["x264-params"] + ":open-gop=1:bframes=3"}},
    "fragmented.mp4": {"container_options": {"movflags": "frag_keyframe+empty_moov"}},
    "variable_rate.mp4": {"pts": [number * number for number in range(24)]},
    "rotated.mp4": {"rotation": 90},
    "hevc.mp4": {"codec": "libx265", "codec_options": {"x265-params": "log-level=none:keyint=8:min-keyint=8"}},
    "mpeg4.mov": {"codec": "mpeg4", "container_format": "mov"},
    "h264.mkv": {"container_format": "matroska"},
    "vp9.webm": {"codec": "libvpx-vp9", "container_format": "webm", "codec_options": _FAST},
    "vp8.webm": {"codec": "libvpx", "container_format": "webm", "codec_options": _FAST},
    "mjpeg.avi": {"codec": "mjpeg", "container_format": "avi", "pix_fmt": "yuvj420p"},
    "mpeg4.avi": {"codec": "mpeg4", "container_format": "avi"},
    "h264.flv": {"container_format": "flv"},
    "h264.ts": {"container_format": "mpegts"},
    "mpeg2.vob": {"codec": "mpeg2video", "container_format": "vob"},
    "mpeg2.mxf": {"codec": "mpeg2video", "container_format": "mxf"},
    "wmv2.wmv": {"codec": "wmv2", "container_format": "asf"},
    "raw.h264": {"container_format": "h264"},
    "moving.gif": {"codec": "gif", "container_format": "gif", "pix_fmt": "rgb8"},
}


_INDEX_FIRST = "index_first.mp4"


def write_seeds(folder: Path) -> None:
    """Encode the seeds that this machine's FFmpeg can."""
    for name, how in _SEEDS.items():
        path = folder / name
        if how.get("codec", "libx264") in av.codecs_available and not path.exists():
            numbered_video(path, num_frames=24, width=96, height=64, gop=8, **how)
    (folder / _INDEX_FIRST).write_bytes(index_first((folder / "h264.mp4").read_bytes()))


def read_seeds(folder: Path) -> dict[str, bytes]:
    names = {*_SEEDS, _INDEX_FIRST}
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name in names}
