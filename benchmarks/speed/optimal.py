"""How many videos a second the optimal policy gets through; the same as `sosampler bench optimal`.

python benchmarks/speed/optimal.py --out benchmarks/results/optimal.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sosampler._util.files import replacing
from sosampler.bench.optimal import bench_optimal, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--classes", type=int, nargs="+", default=[22, 200])
    parser.add_argument("--videos", type=int, default=1000)
    parser.add_argument("--certified-videos", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    result = bench_optimal(
        classes=tuple(arguments.classes),
        videos=arguments.videos,
        certified_videos=arguments.certified_videos,
        rounds=arguments.rounds,
        say=print,
    )
    with replacing(arguments.out) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()
