"""Which policies choose how many of how many, and what they are measured against."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sosampler.auto_frames import AUTO
from sosampler.checks import whole_number
from sosampler.errors import InvalidArgument
from sosampler.evaluation.choosers import AutoChooser, Chooser, RedundancyChooser
from sosampler.evaluation.clips import Clips
from sosampler.evaluation.policies import ChooserMaker
from sosampler.evaluation.rows import Cell
from sosampler.evaluation.scorers import Scorer
from sosampler.evaluation.systems import whole_frames

Pair = tuple[int | None, int]  # N, T; None where the policy decides on N


def pairs_of(num_frames: Any, num_candidates: Any, pairs: Any = None) -> list[Pair]:
    """(N, T) to be evaluated: the given pairs, or all combinations; None for "auto".

    >>> pairs_of([1, "auto"], 10), pairs_of(6, 10, pairs=[(8, 30)])
    ([(1, 10), (None, 10)], [(8, 30)])
    """
    found: list[Pair]
    if pairs is None:
        wanted = [_number_or_auto(value) for value in _listed("num_frames", num_frames)]
        offered = [whole_number("num_candidates", value) for value in _listed("num_candidates", num_candidates)]
        found = [(frames, candidates) for candidates in offered for frames in wanted]
    elif isinstance(pairs, Iterable) and not isinstance(pairs, str):
        found = [_pair(pair) for pair in pairs]
    else:
        raise InvalidArgument(
            f"pairs={pairs!r} is not allowed; give a list of (num_frames, num_candidates), for example [(8, 30)]"
        )
    if not found:
        raise InvalidArgument("pairs are empty; give at least one pair of num_frames and num_candidates")
    for frames, candidates in found:
        if frames is not None and frames > candidates:
            raise InvalidArgument(
                f"num_frames={frames} is more than num_candidates={candidates}; ask for at most as many frames as "
                "there are candidates, or name the combinations as pairs"
            )
    return list(dict.fromkeys(found))


def _listed(name: str, given: Any) -> list[Any]:
    values = list(given) if isinstance(given, (list, tuple, range)) else [given]
    if not values:
        raise InvalidArgument(f"{name} is empty; give at least one whole number")
    return values


def _number_or_auto(given: Any) -> int | None:
    return None if isinstance(given, str) and given == AUTO else whole_number("num_frames", given)


def _pair(given: Any) -> Pair:
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise InvalidArgument(f"pairs hold {given!r}; give (num_frames, num_candidates), for example (8, 30)")
    return _number_or_auto(given[0]), whole_number("num_candidates", given[1])


class Plan:
    """All cells of an evaluation: those that are shown, and those that are only measured against.

    With N = None stands each of `by_themselves`, samplers that decide on N.

    Uniform and semi-optimal choices are measured beside any policy where that costs no run of the classifier, and the
    optimal ones where there are few subsets.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        choosers: Sequence[Chooser],
        by_themselves: Sequence[AutoChooser],
        maker: ChooserMaker,
        clips: Clips,
        note: Callable[[str], None],
    ) -> None:
        self.candidates = list(dict.fromkeys(count for _, count in pairs))
        self.frames_of = {count: [frames for frames, same in pairs if same == count] for count in self.candidates}
        self.shown: list[tuple[Cell, Chooser]] = []
        self.cells: dict[Cell, Chooser] = {}
        self._maker, self._clips, self._note = maker, clips, note
        self._as_many: dict[Cell, int] = {}  # of who decides on N: N of the uniform choice that has no fewer frames
        if not choosers:
            return  # systems alone, which are measured against uniform as soon as it is known how much they look at
        names = {chooser.name for chooser in choosers}
        references = [maker.named(name) for name in ("uniform", "semi-optimal") if name not in names]
        unseen = [] if clips.needs_frames else references
        if clips.needs_frames and references:
            missing = " and ".join(repr(reference.name) for reference in references)
            note(f"no comparison with {missing}, which the classifier would have to be run for: add it to the policies")
        for count in self.candidates:
            for frames in self.frames_of[count]:
                if frames is None:
                    self.shown += [(Cell(chooser.name, None, count), chooser) for chooser in by_themselves]
                    continue
                shown = [chooser for chooser in choosers if chooser.name != "all"]
                self.shown += [(Cell(chooser.name, frames, count), chooser) for chooser in shown]
                hidden = list(unseen)
                if "optimal" not in names:
                    if clips.enumerable(count, frames):
                        hidden.append(maker.named("optimal"))
                    else:
                        note(
                            f"no fidelity for {frames} of {count}: add the policy 'optimal', whose search takes a while"
                        )
                self.cells |= {Cell(chooser.name, frames, count): chooser for chooser in hidden}
            # All candidates are the same clip for every N, so they have one row.
            self.shown += [(Cell(one.name, count, count), one) for one in choosers if one.name == "all"]
        self.cells |= dict(self.shown)

    def compare(self, mean_frames: Mapping[Cell, float]) -> None:
        """Let who decides on N be measured against uniform with as many frames as it takes in the mean, rounded up."""
        missing: dict[int, dict[str, int]] = {}  # by T and the name of the row
        for cell, mean in mean_frames.items():
            frames = whole_frames(mean, cell.num_candidates)
            uniform = Cell("uniform", frames, cell.num_candidates)
            if uniform not in self.cells:
                if self._clips.needs_frames:
                    missing.setdefault(cell.num_candidates, {})[cell.policy] = frames
                    continue
                self.cells[uniform] = self._maker.named("uniform")
            self._as_many[cell] = frames
        for count, wanted in missing.items():
            self._note(
                f"no comparison of {', '.join(wanted)} with 'uniform', which the classifier would have to be run for: "
                f"add it to the policies with num_frames={','.join(map(str, sorted(set(wanted.values()))))} of {count}"
            )

    @property
    def scorers(self) -> list[Scorer]:
        """Everybody who looks at pictures, once."""
        found = {chooser.scorer.key: chooser.scorer for chooser in self.cells.values() if chooser.scorer is not None}
        return list(found.values())

    def numbers_a_video(self, a_candidate: int) -> int:
        """Numbers in float32 that the views of one video take, with `a_candidate` of them for each candidate."""
        kernels = any(isinstance(chooser, RedundancyChooser) for chooser in self.cells.values())
        # Likeness of all pairs in float32 and, with what is factored from it, in float64.
        return sum(count * a_candidate + (6 * count * count if kernels else 0) for count in self.candidates)

    def against(self, cell: Cell) -> int | None:
        """N of the uniform and semi-optimal choices that a cell is compared with; None where several would do."""
        if cell.num_frames is None:
            return self._as_many.get(cell)
        if cell.policy != "all":
            return cell.num_frames
        wanted = [frames for frames in self.frames_of[cell.num_candidates] if frames is not None]
        return wanted[0] if len(wanted) == 1 else None
