"""What Ray itself costs: the same videos by the local engine and by a cluster of this machine, turn by turn.

    python benchmarks/speed/ray_scale.py CLIP --videos 200 --rounds 3 --work WORK \\
        --out benchmarks/results/ray_scale.json

The clip is looped to five minutes of 720p with x264's keyframes, as in decode.json; each video is a link to it. Both
engines choose 6 of 10 keyframe candidates by how much the picture changes, with a short side of 256, one decoder a
core. Time counts from the row at which a tenth is done: starting an engine is not measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from sosampler._util.environment import circumstances, compare
from sosampler.bench.decode import looped_video
from sosampler.inference.decode import DecodeStep
from sosampler.inference.many import SelectJob
from sosampler.inference.options import SelectOptions
from sosampler.integrations.ray.cluster import RaySettings, connected
from sosampler.integrations.ray.rows import stream_rows

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.common import Results

OPTIONS = SelectOptions(
    num_frames=6, num_candidates=10, policy="frame-difference", candidates="keyframe", size=256, threads=1
)


def links(video: Path, count: int, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    made = [folder / f"{number:05d}.mp4" for number in range(count)]
    for link in made:
        if not link.is_symlink():
            link.symlink_to(video.resolve())
    return made


def seconds_a_video(results: Iterable[object], count: int) -> float:
    """Once a tenth is done."""
    warm, begin = max(1, count // 10), 0.0
    for number, _ in enumerate(results, start=1):
        if number == warm:
            begin = time.perf_counter()
    return (time.perf_counter() - begin) / (count - warm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clip", type=Path)
    parser.add_argument("--videos", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path(".bench"))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    video = given.work / f"{given.clip.stem}.default.mp4"
    if not video.exists():
        looped_video(given.clip, video, keyframe_interval=None)
    videos, cores = links(video, given.videos, given.work / "links"), os.cpu_count() or 1
    seconds: dict[str, list[float]] = {"local": [], "ray": []}
    job = SelectJob(OPTIONS, workers=cores)
    with connected("local"):
        for _ in range(given.rounds):
            local = job.rows(list(map(str, videos)))
            seconds["local"].append(seconds_a_video(local, len(videos)))
            rows = stream_rows(map(str, videos), DecodeStep(OPTIONS), None, RaySettings(decoders=cores))
            seconds["ray"].append(seconds_a_video(rows, len(videos)))
            print({name: round(1 / times[-1], 2) for name, times in seconds.items()}, "videos a second")
    given.out.unlink(missing_ok=True)  # figures of one run only
    Results(given.out).put(
        benchmark="ray_scale",
        what="seconds a video, of a 720p H.264 file of 8750 frames: 6 of 10 keyframe candidates chosen by their pixels",
        **circumstances(("ray", "av", "numpy", "pyarrow")),
        clip=given.clip.name,
        videos=given.videos,
        rounds=given.rounds,
        seconds=seconds,
        videos_a_second={name: 1 / median(times) for name, times in seconds.items()},
        comparisons=[compare(seconds, way="ray", reference="local")],
    )


if __name__ == "__main__":
    main()
