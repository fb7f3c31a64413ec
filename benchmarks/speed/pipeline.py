"""From a file to a label: speed on natural clips and accuracy on reels as mp4, by the same networks, in one file.

    python benchmarks/speed/pipeline.py CLIP... --pictures PICTURES --classifier CLASSIFIER --sampler RUN \\
        --work WORK --out benchmarks/results/pipeline.json

PICTURES are the images of samplers.py, CLASSIFIER the folder of the classifier that it trained, RUN that of a sampler
that learned from its outputs. Reels are made of the test images, which neither has seen, and encoded by x264 with its
own choice of keyframes. Without the three, only speed is measured, with random weights. All rounds are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import sosampler as so
from sosampler.bench.pipeline import bench_pipeline, table

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.common import Results
from benchmarks.speed.pipeline_memory import watch_hour, watch_many


def reels_of(pictures: Path, work: Path, count: int) -> Path:
    """Make test reels as files; existing ones are used again."""
    folder = work / f"reels_{count}"
    so.make_reels(pictures, folder, to="mp4", preset="sports22", counts={"test": count})
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clips", nargs="+", type=Path, help="natural videos")
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--classifier", type=Path)
    parser.add_argument("--sampler", type=Path)
    parser.add_argument("--reels", type=int, default=600, help="how many")
    parser.add_argument("--work", type=Path, default=Path(".bench"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streamed", type=int, default=24)
    parser.add_argument("--many", type=int, default=10_000)
    parser.add_argument("--no-hour", action="store_true")
    parser.add_argument("--device")
    parser.add_argument("--keep", nargs="*", default=[], help="keys of the file that stay, as accuracy and hour")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    reels = None if given.pictures is None else reels_of(given.pictures, given.work, given.reels)
    result = bench_pipeline(
        given.clips,
        sampler=given.sampler,
        classifier=given.classifier,
        reels=reels,
        work=given.work,
        rounds=given.rounds,
        streamed=given.streamed,
        device=given.device,
        say=print,
    )
    if given.many:
        print(f"watching memory over {given.many} small videos")
        result["memory"] = watch_many(given.work, given.many)
    if not given.no_hour:
        result["hour"] = watch_hour(given.clips[0], given.work, print)
    before = json.loads(given.out.read_text(encoding="utf-8")) if given.keep and given.out.is_file() else {}
    kept = {key: before[key] for key in given.keep if key in before and key not in result}
    if kept:
        result |= kept | {"kept": {"keys": list(kept), "date": before["date"], "versions": before["versions"]}}
    given.out.unlink(missing_ok=True)  # figures of one run, and what was to be kept
    Results(given.out).put(**result)
    print(table(result))


if __name__ == "__main__":
    main()
