"""How many videos a second `prepare` gets through with 1 and 2 workers, against a plain loop in the same run.

python benchmarks/speed/prepare.py CLIP... --videos 6 --out benchmarks/results/prepare.json
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from sosampler import create_classifier, select
from sosampler._util.environment import circumstances, compare, in_turns
from sosampler.bank.prepare import prepare
from sosampler.datasets.manifest import Item, Manifest

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.common import RESULTS, write_result

_PLAIN = "plain loop"
# Required ratio to the plain loop on two cores, by number of workers; the others are reported only.
_BARS = {2: 1.6}


def bench_prepare(
    clips: list[Path],
    *,
    classifier: str = "resnet50",
    work: Path,
    videos: int = 12,
    num_candidates: int = 64,
    candidates: str = "exact",
    workers: tuple[int, ...] = (1, 2),
    rounds: int = 3,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Time `prepare` and the plain loop over `videos` videos, the clips in turns. The classifier's weights are random.

    The plain loop is what one writes first: decode a video, classify its frames, continue with the next. It keeps
    nothing; `prepare` also writes a bank, starts its processes, and begins from nothing each time.
    """
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="prepare-", dir=work) as folder:
        return _timed(
            clips, classifier, Path(folder) / "bank", videos, num_candidates, candidates, workers, rounds, say
        )


def _timed(
    clips: list[Path],
    classifier: str,
    out: Path,
    videos: int,
    num_candidates: int,
    candidates: str,
    workers: tuple[int, ...],
    rounds: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    net: Any = create_classifier(classifier)
    paths = [clips[number % len(clips)].resolve() for number in range(videos)]
    items = tuple(Item(id=str(number), path=str(path), labels=(0,)) for number, path in enumerate(paths))
    manifest = Manifest(items, net.class_names)

    def plain() -> None:
        for path in paths:
            chosen = select(
                path,
                num_candidates=num_candidates,
                policy="all",
                candidates=candidates,
                on_short="fewer",
                size=256,
                threads=1,
            )
            net.frame_probs(chosen.to_torch()[None])

    def ours(count: int) -> None:
        shutil.rmtree(out, ignore_errors=True)
        bank = prepare(
            manifest, net, out, num_candidates=num_candidates, candidates=candidates, workers=count, videos_per_shard=8
        )
        assert len(bank) == videos, bank.failures

    ways: dict[str, Callable[[], Any]] = {_PLAIN: plain}
    for count in workers:
        ways[_named(count)] = partial(ours, count)
    say(f"timing {', '.join(ways)} over {videos} videos, {rounds} rounds and one to warm up")
    seconds = in_turns(ways, rounds=rounds)
    num_bytes = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    return {
        "benchmark": "prepare",
        "what": f"videos a second: {num_candidates} {candidates} frames each in 256, and the classifier's word on each",
        **circumstances(("av", "torch", "torchvision", "timm", "numpy", "pillow", "pyarrow")),
        "clips": [clip.name for clip in clips],
        "classifier": classifier,
        "gmacs_a_frame": net.gmacs(1),
        "videos": videos,
        "rounds": rounds,
        "bytes_a_video": num_bytes // videos,
        "seconds": seconds,
        "videos_a_second": {name: videos / statistics.median(times) for name, times in seconds.items()},
        "comparisons": [_compared(seconds, count) for count in workers],
    }


def _named(workers: int) -> str:
    return f"prepare, {workers} worker{'s' if workers != 1 else ''}"


def _compared(seconds: dict[str, list[float]], workers: int) -> dict[str, Any]:
    row = compare(seconds, way=_named(workers), reference=_PLAIN)
    bar = _BARS.get(workers)
    return {**row, "bar": bar, "met": None if bar is None else row["times_faster"] >= bar}


def table(result: dict[str, Any]) -> str:
    """Return the rates and ratios as text."""
    lines = [f"{result['classifier']}, {result['videos']} videos of {', '.join(result['clips'])}"]
    lines += [f"  {name:<22}{rate:8.3f} videos a second" for name, rate in result["videos_a_second"].items()]
    for row in result["comparisons"]:
        bar = "" if row["bar"] is None else f", asked for {row['bar']:g}: {'met' if row['met'] else 'MISSED'}"
        low, high = row["times_faster_by_round"]
        lines.append(f"  {row['way']}: {row['times_faster']:.2f} times the plain loop ({low:.2f} to {high:.2f}){bar}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clips", nargs="+", type=Path, help="natural videos, used in turns")
    parser.add_argument("--classifier", default="resnet50", help="its weights are random")
    parser.add_argument("--videos", type=int, default=12, help="how many go into the bank")
    parser.add_argument("--work", type=Path, default=Path(".bench"), help="folder for the bank while it is timed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "prepare.json")
    given = parser.parse_args()
    options = {"classifier": given.classifier, "videos": given.videos, "rounds": given.rounds}
    result = bench_prepare(given.clips, work=given.work, say=print, **options)
    write_result(given.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
