"""Videos for the decode benchmark: a natural clip, looped to minutes and re-encoded with a known keyframe layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

from sosampler.errors import VideoError
from sosampler.files import replacing

FPS = 30
# A chunk that holds a whole number of 250- and of 30-frame groups is encoded once and repeated packet by packet without
# a keyframe out of place, so that minutes of video cost the encoding of seconds. The shorter tail makes 8750 frames of
# the whole: of 9000, the middles of 6 and of 10 segments fall on keyframes every time, which no real video grants.
CHUNK_FRAMES, CHUNK_REPEATS, TAIL_FRAMES = 1500, 5, 1250

# What x264 is told about keyframes. None leaves its own choice: at most 250 apart, and at scene cuts.
KEYFRAME_LAYOUTS: dict[str, int | None] = {"gop250": 250, "default": None, "gop30": 30}


def looped_video(clip: Path, out: Path, *, keyframe_interval: int | None, width: int = 1280, height: int = 720) -> Path:
    """Write `clip`, looped to 8750 frames (4:52) at 30 fps, as H.264 (x264 preset medium, crf 23) to `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    chunk, tail = out.with_name(f"{out.stem}.chunk.mp4"), out.with_name(f"{out.stem}.tail.mp4")
    try:
        for part, frames in ((chunk, CHUNK_FRAMES), (tail, TAIL_FRAMES)):
            encode_chunk(clip, part, frames=frames, keyframe_interval=keyframe_interval, width=width, height=height)
        with replacing(out) as temporary:
            join_packets([chunk] * CHUNK_REPEATS + [tail], temporary)
    finally:
        chunk.unlink(missing_ok=True)
        tail.unlink(missing_ok=True)
    return out


def encode_chunk(clip: Path, out: Path, *, frames: int, keyframe_interval: int | None, width: int, height: int) -> None:
    import av

    options = {"preset": "medium", "crf": "23"}
    if keyframe_interval is not None:
        fixed = f"keyint={keyframe_interval}:min-keyint={keyframe_interval}:scenecut=0"
        options["x264-params"] = fixed
    with av.open(str(out), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number, frame in enumerate(itertools.islice(_frames_forever(clip), frames)):
            picture = frame.reformat(width=width, height=height, format="yuv420p", interpolation="BICUBIC")
            picture.pts, picture.time_base, picture.pict_type = number, Fraction(1, FPS), 0
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))


def _frames_forever(clip: Path) -> Iterator:  # yields av.VideoFrame
    import av

    while True:
        frames_before = 0
        with av.open(str(clip)) as container:
            for frame in container.decode(video=0):
                frames_before += 1
                yield frame
        if not frames_before:
            raise VideoError(f"{clip}: no frame could be decoded; give a video that plays")


def join_packets(parts: list[Path], out: Path) -> None:
    """Put videos of the same encoding one after the other without encoding again."""
    import av

    with av.open(str(parts[0])) as first, av.open(str(out), "w") as container:
        copy = container.add_stream_from_template(first.streams.video[0])
        offset = 0  # ticks
        for part in parts:
            with av.open(str(part)) as source:
                stream = source.streams.video[0]
                assert stream.time_base is not None
                for packet in source.demux(stream):
                    if packet.dts is None or packet.pts is None:
                        continue  # the empty packet that ends the stream
                    packet.pts += offset
                    packet.dts += offset
                    packet.stream = copy
                    container.mux(packet)
                offset += round(stream.frames / FPS / stream.time_base)
