"""How many videos a second the optimal policy gets through from stored logits: by enumeration and certified search.

python benchmarks/speed/optimal.py --out benchmarks/results/optimal.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sosampler._util.environment import circumstances, compare, in_turns
from sosampler.policies.optimal import beam_search, optimal_mean_logits
from sosampler.samplers.sosampler import log_confidence

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.common import RESULTS, write_result

ENUMERATED, CERTIFIED = (10, 6), (100, 32)  # T, N
# Videos a second on two cores.
_BARS = {"enumeration": 1000.0, "certified": 20.0}
_OURS, _PLAIN, _BEAM = "pi_o", "plain loop", "beam search"
_BEAM_WIDTH, _BEAM_VIDEOS = 4, 2  # videos: it is slow, and goes one by one


def bench_optimal(
    *,
    classes: tuple[int, ...] = (22, 200),
    videos: int = 1000,
    certified_videos: int = 200,
    rounds: int = 3,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Time pi_o on synthetic logits of a classifier that averages them, against what one would write first.

    A video has T frames; a share of them, drawn from .25 to .65, shows the true class with a margin drawn from N(4, 2),
    the others any class with a margin drawn from N(3, 2); all classes have unit noise.

    Enumeration is compared with a loop over videos that averages the logits of every subset. There is no plain loop
    over the subsets of 100 candidates; the certified search is compared with a beam search, which proves nothing.
    """
    rows = []
    for number in classes:
        for (candidates, frames), count in ((ENUMERATED, videos), (CERTIFIED, certified_videos)):
            say(f"{number} classes: {frames} of {candidates} candidates, {count} videos, {rounds} rounds")
            logits, labels = made_up(count, candidates, number, seed)
            rows.append(_row(logits, labels, frames, rounds))
    return {
        "benchmark": "optimal",
        "what": "videos a second of the optimal policy, from kept logits of a classifier that averages them",
        **circumstances(("torch", "numpy")),
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "seed": seed,
        "rows": rows,
    }


def made_up(videos: int, frames: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Logits [V, T, C] and multi-hot labels [V, C], as `bench_optimal` describes them."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (videos,), generator=generator)
    share = 0.25 + 0.4 * torch.rand(videos, 1, generator=generator)
    shows = torch.rand(videos, frames, generator=generator) < share
    named = torch.where(shows, labels[:, None], torch.randint(classes, (videos, frames), generator=generator))
    margin = torch.where(shows, 4.0, 3.0) + 2 * torch.randn(videos, frames, generator=generator)
    logits = torch.randn(videos, frames, classes, generator=generator)
    logits.scatter_add_(2, named[..., None], margin[..., None])
    return logits, torch.nn.functional.one_hot(labels, classes).bool()


def _row(logits: Tensor, labels: Tensor, num_frames: int, rounds: int) -> dict[str, Any]:
    videos, candidates, classes = logits.shape
    found = optimal_mean_logits(logits, labels, num_frames)
    reference, way, part = (
        (_PLAIN, plain_loop, slice(None)) if found.method == "enumeration" else (_BEAM, by_beam, slice(0, _BEAM_VIDEOS))
    )
    references = {reference: partial(way, logits[part], labels[part], num_frames)}
    other = references[reference]()
    # All of ours in one call, as evaluation does; the reference goes video by video, so that a part of them will do.
    seconds = in_turns({_OURS: partial(optimal_mean_logits, logits, labels, num_frames), **references}, rounds=rounds)
    scale = videos / len(logits[part])
    seconds[reference] = [value * scale for value in seconds[reference]]
    rate, bar = videos / statistics.median(seconds[_OURS]), _BARS[found.method]
    shortfall = found.log_confidence[part].exp() - other.exp()
    return {
        "num_candidates": candidates,
        "num_frames": num_frames,
        "classes": classes,
        "videos": videos,
        "method": found.method,
        "seconds": seconds,
        "videos_a_second": rate,
        "bar": bar,
        "met": rate >= bar,
        "largest_gap": float(found.gap.max()),
        "comparison": compare(seconds, way=_OURS, reference=reference),
        "reference_largest_shortfall": float(shortfall.max()),
    }


def plain_loop(logits: Tensor, labels: Tensor, num_frames: int) -> Tensor:
    """Log confidence [V] of the best subset: for each video the mean of every subset's logits, then softmax."""
    subsets = torch.tensor(list(combinations(range(logits.shape[1]), num_frames)))
    best = [
        rows.double()[subsets].mean(1).log_softmax(-1)[:, label].mean(-1).max()
        for rows, label in zip(logits, labels, strict=True)
    ]
    return torch.stack(best)


def by_beam(logits: Tensor, labels: Tensor, num_frames: int) -> Tensor:
    """Log confidence [V] of what a narrow beam search without exchanges finds, video by video."""
    best = []
    for rows, label in zip(logits.double(), labels, strict=True):

        def asked(positions: Tensor, rows: Tensor = rows, label: Tensor = label) -> Tensor:
            return log_confidence(rows[positions[0]].mean(1)[None], label[None])

        best.append(beam_search(asked, 1, len(rows), num_frames, width=_BEAM_WIDTH, swaps=False).log_confidence[0])
    return torch.stack(best)


def table(result: dict[str, Any]) -> str:
    """For reading."""
    lines = [f"{result['what']}; {result['threads']} threads"]
    for row in result["rows"]:
        ratio = row["comparison"]
        low, high = ratio["times_faster_by_round"]
        lines.append(
            f"  {row['num_frames']:>2} of {row['num_candidates']:>3}, {row['classes']:>4} classes, "
            f"{row['method']:<11} {row['videos_a_second']:9.0f} videos a second, asked for {row['bar']:g}: "
            f"{'met' if row['met'] else 'MISSED'}; {ratio['times_faster']:.1f} times the {ratio['reference']} "
            f"({low:.1f} to {high:.1f}); gap {row['largest_gap']:.1g}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "optimal.json")
    parser.add_argument("--classes", type=int, nargs="+", default=[22, 200])
    parser.add_argument("--videos", type=int, default=1000, help="for enumeration")
    parser.add_argument("--certified-videos", type=int, default=200, help="for the certified search")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    result = bench_optimal(
        classes=tuple(arguments.classes),
        videos=arguments.videos,
        certified_videos=arguments.certified_videos,
        rounds=arguments.rounds,
        say=print,
    )
    write_result(arguments.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
