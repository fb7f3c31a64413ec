"""How much faster the engine scores, chooses and classifies than the usual eager float32 code.

    python benchmarks/speed/frame_engine.py --device cpu --threads 2
    python benchmarks/speed/frame_engine.py --device cuda

T = 10 candidates of 340x256 in memory (on a GPU: in its memory), the sampler at 128 px, N = 6 of them to a ResNet-50 at
224 px, resizing and normalising included. The reference is the method as its authors wrote it (nearest resize for the
sampler, a Python loop to gather, nothing fused, channels first); all ways take turns, each in a process of its own.
Both devices are kept in one file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sosampler.bench.sampler import bench_sampler, table

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.common import RESULTS, Results

DEFAULT = RESULTS / "frame_engine.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    parser.add_argument("--threads", type=int, help="CPU threads of each process")
    parser.add_argument("--batch", type=int, nargs="*", help="videos at a time; 1 8 on the CPU, 1 8 128 on a GPU")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--videos", type=int, help="to compare chosen frames on; 100 on the CPU, 1000 on a GPU")
    parser.add_argument("--sampler", help="folder of a trained sampler; else random weights that tell frames apart")
    parser.add_argument("--pictures", help="folder of natural pictures to compare on")
    parser.add_argument("--ways", nargs="*", help="names of the ways to measure; all if not given")
    parser.add_argument("--out", type=Path, default=DEFAULT)
    given = parser.parse_args()
    on_cpu = given.device == "cpu"
    result = bench_sampler(
        sampler=given.sampler,
        batches=given.batch or ([1, 8] if on_cpu else [1, 8, 128]),
        device=given.device,
        threads=given.threads,
        rounds=given.rounds,
        videos=given.videos or (100 if on_cpu else 1000),
        pictures=given.pictures,
        ways=given.ways,
        say=print,
    )
    print(table(result))
    Results(given.out).put(**{"cpu" if on_cpu else "gpu": result})


if __name__ == "__main__":
    main()
