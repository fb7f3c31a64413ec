"""Bytes that 8 frames of an hour of video take over HTTP.

    python benchmarks/speed/addresses.py CLIP.mp4 --work WORK

The packets of a natural clip are repeated, without encoding them again, until the video is an hour long; its index lies
at the end and, in a copy, at the front. A web server on this machine counts what it sends.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import av
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

import sosampler as so
from benchmarks.common import RESULTS, write_result
from sosampler._util.environment import circumstances

SECONDS = 3600.0
MODES = ("keyframe", "exact")


def hour_of(clip: Path, out: Path, *, index: str) -> Path:
    """Write the packets of the clip's streams again and again until an hour is full."""
    options = {"movflags": "faststart"} if index == "front" else {}
    with av.open(clip) as source, av.open(out, "w", options=options) as target:
        kinds = [source.streams.video[0], *source.streams.audio[:1]]
        copies = {stream.index: target.add_stream_from_template(stream) for stream in kinds}
        packets = [packet for packet in source.demux(*kinds) if packet.dts is not None and packet.size]
        ends = [float((packet.dts + (packet.duration or 1)) * packet.time_base) for packet in packets]
        starts = [float(packet.dts * packet.time_base) for packet in packets]
        length, begin = max(ends) - min(starts), 0.0
        while begin < SECONDS:
            source.seek(0)
            for packet in source.demux(*kinds):
                if packet.dts is None or not packet.size:
                    continue
                shift = round(begin / packet.time_base)
                packet.pts, packet.dts = packet.pts + shift, packet.dts + shift
                packet.stream = copies[packet.stream.index]
                target.mux(packet)
            begin += length
    return out


class Server(ThreadingHTTPServer):
    """Serves one file by ranges, and counts."""

    daemon_threads = True

    def __init__(self, path: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.path, self.size = path, path.stat().st_size
        self.sent = self.requests = 0

    def __enter__(self) -> Server:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        last = min(last, self.server.size - 1)
        with open(self.server.path, "rb") as file:
            file.seek(first)
            data = file.read(last + 1 - first)
        self.server.sent += len(data)
        self.server.requests += 1
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{self.server.size}")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def measure(video: Path, mode: str) -> dict[str, Any]:
    """Choose 8 frames over HTTP, and compare them with those of the file."""
    with Server(video) as server:
        begin = time.perf_counter()
        sel = so.select(
            f"http://127.0.0.1:{server.server_address[1]}/", 8, candidates=mode, size=256, schemes=("http",)
        )
        seconds = time.perf_counter() - begin
        here = so.select(video, 8, candidates=mode, size=256)
        assert sel.frames is not None
        assert np.array_equal(sel.frames, here.frames)
        assert sel.transfer == {"bytes_read": server.sent, "file_bytes": server.size, "requests": server.requests}
    return {
        "candidates": mode,
        "num_candidates": sel.num_candidates,
        **sel.transfer,
        "percent": round(100 * server.sent / server.size, 3),
        "seconds": round(seconds, 2),
    }


def table(result: dict[str, Any]) -> str:
    """Return the sentence and the table of docs/addresses.md."""
    rows = result["rows"]
    shares = [100 * row["bytes_read"] / row["file_bytes"] for row in rows if row["candidates"] == "keyframe"]
    lines = [
        f"Choosing {result['frames']} frames of an hour of video among keyframes reads {min(shares):.1f} to "
        f"{max(shares):.1f} % of the file.",
        "",
        "| clip, repeated | its index | candidates | file | read | share | requests |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        read, size = row["bytes_read"], row["file_bytes"]
        lines.append(
            f"| `{row['clip']}` | at the {row['index']} | {row['num_candidates']} {row['candidates']} | "
            f"{size / 1e6:.0f} MB | {read / 1e6:.1f} MB | {100 * read / size:.1f} % | {row['requests']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clips", type=Path, nargs="+")
    parser.add_argument("--work", type=Path, required=True, help="folder for the long videos")
    parser.add_argument("--out", type=Path, default=RESULTS / "addresses.json")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    rows = []
    for clip in given.clips:
        for index in ("end", "front"):
            video = given.work / f"{clip.stem}_{index}.mp4"
            if not video.exists():
                hour_of(clip, video, index=index)
            with closing(so.open_video(video)) as reader:
                metadata = reader.metadata
            for mode in MODES if index == "end" else MODES[:1]:
                row = {"clip": clip.name, "index": index, "duration": round(metadata.duration), **measure(video, mode)}
                print(row)
                rows.append(row)
    result = {**circumstances(("av", "numpy")), "frames": 8, "rows": rows}
    write_result(given.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
