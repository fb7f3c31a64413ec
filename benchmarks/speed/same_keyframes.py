"""Keyframe candidates against torchcodec decoding the same keyframes, added to the file of `sosampler bench decode`.

    python benchmarks/speed/same_keyframes.py CLIP... --work .bench --out benchmarks/results/decode.json

`bench decode` measures this too, among much else; here it takes seconds a video. The videos of `bench decode` in WORK
are used again. Rows of `keyframe T=32` get `torchcodec_same_keyframes`: times as fast, with approximate and exact seek.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from sosampler._util.environment import circumstances, compare, in_turns
from sosampler.bench.decode import looped_videos, read_keyframes, read_torchcodec_indices

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.common import RESULTS, write_result

OURS, MODES = "keyframe T=32", ("approximate", "exact")


def ratios_of(video: Path, rounds: int) -> list[float]:
    """Return how many times as fast keyframes are read as torchcodec reads the same, with each seek mode."""
    indices = read_keyframes(video, 32, 1).frame_indices.tolist()
    seconds = in_turns(
        {
            OURS: lambda: read_keyframes(video, 32, 1),
            "approximate": lambda: read_torchcodec_indices(video, indices, "approximate"),
            "exact": lambda: read_torchcodec_indices(video, indices, "exact"),
        },
        rounds=rounds,
    )
    return [compare(seconds, way=OURS, reference=mode)["times_faster"] for mode in MODES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clips", nargs="+", type=Path, help="those of the file")
    parser.add_argument("--work", type=Path, default=Path(".bench"), help="folder for the videos")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "decode.json")
    given = parser.parse_args()
    result = json.loads(given.out.read_text(encoding="utf-8"))
    for video, clip, layout in looped_videos(given.clips, given.work, print):
        ratios = ratios_of(video, given.rounds)
        print(clip.name, layout, ", ".join(f"{mode} {ratio:.2f}" for mode, ratio in zip(MODES, ratios, strict=True)))
        for measured in result["videos"]:
            if (measured["clip"], measured["layout"]) == (clip.name, layout):
                row = next(row for row in measured["comparisons"] if row["way"] == OURS)
                row["torchcodec_same_keyframes"] = ratios
    result["same_keyframes"] = {"rounds": given.rounds, **circumstances(("av", "torchcodec", "torch"))}
    write_result(given.out, result)


if __name__ == "__main__":
    main()
