"""How alike adjacent frames are at several frame rates, on sets of real videos that are kept apart.

    python benchmarks/accuracy/independence.py --resnet50 WEIGHTS --set clips FOLDER --set yoga FOLDER --out OUT.json

Features are those of ResNet-50 (stride on the first 1x1 convolution) before its class layer. With --figures each set
also gets its figure.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from sosampler._util.environment import circumstances
from sosampler.evaluation.independence import independence, independence_figure


def measure(name: str, videos: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    begin = time.perf_counter()
    found = independence(
        videos,
        classifiers="resnet50_v1",
        weights=arguments.resnet50,
        rates=arguments.rates,
        moments=arguments.moments,
        max_videos=arguments.max_videos,
    )
    print(f"{name}: {found.videos} videos\n{found.table()}")
    for note in found.notes:
        print(f"  note: {note}")
    if arguments.figures is not None:
        arguments.figures.mkdir(parents=True, exist_ok=True)
        independence_figure(found, arguments.figures / f"independence_{name}.png")
    summary = found.to_dict()
    summary["settings"]["videos"] = [Path(video).name for video in summary["settings"]["videos"]]
    return summary | {"seconds": round(time.perf_counter() - begin, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resnet50", type=Path, required=True, help="weights of resnet50_v1")
    parser.add_argument("--set", nargs=2, action="append", required=True, metavar=("NAME", "VIDEOS"))
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.2, 0.5, 1, 2, 5, 10, 25])
    parser.add_argument("--moments", type=int, default=16)
    parser.add_argument("--max-videos", type=int, default=10)
    parser.add_argument("--figures", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    result = {
        "what": "kernels between adjacent frames at several frame rates, features of ResNet-50 trained on ImageNet",
        **circumstances(("torch", "timm", "av")),
        "sets": {name: measure(name, Path(videos), arguments) for name, videos in arguments.set},
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
