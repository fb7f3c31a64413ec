"""num_frames="auto" in an evaluation: rows NAME+auto of samplers that decide on N, one for each tolerance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sosampler.auto_frames import AUTO, AutoFrames, auto_of
from sosampler.checks import real_number
from sosampler.errors import InvalidArgument
from sosampler.evaluation.choosers import AutoChooser, Chooser, ScoreChooser
from sosampler.evaluation.dials import AUTO_SUFFIX
from sosampler.evaluation.scorers import SamplerScorer
from sosampler.samplers.expecting import why_no_number


def autos_of(
    pairs: Sequence[tuple[int | None, int]], least: int | None, most: int | None, tolerance: Any
) -> dict[str, AutoFrames]:
    """By what stands behind a sampler's name how it decides; nothing where nobody is to decide.

    >>> list(autos_of([(None, 10)], 1, 4, [0.01, 0.05]))
    ['+auto@0.01', '+auto@0.05']
    """
    several = isinstance(tolerance, (list, tuple)) and len(tolerance) != 1
    listed = list(tolerance) if isinstance(tolerance, (list, tuple)) else [tolerance]
    if not listed:
        raise InvalidArgument("auto_tolerance is empty; give a number, or leave it out")
    if all(wanted is not None for wanted, _ in pairs):
        auto_of(None, least, most, listed[0])  # says that it goes with "auto" alone
        return {}
    found: dict[str, AutoFrames] = {}
    for one in listed:
        value = None if one is None else real_number("auto_tolerance", one, at_least=0)
        auto = auto_of(AUTO, least, most, value)
        assert auto is not None, "auto was asked for"
        found[f"{AUTO_SUFFIX}@{auto.tolerance:g}" if several else AUTO_SUFFIX] = auto
    return found


def by_themselves(
    choosers: Sequence[Chooser], autos: Mapping[str, AutoFrames], pairs: Sequence[tuple[int | None, int]]
) -> list[AutoChooser]:
    """The samplers among the choosers, once for each way to decide on N."""
    for chooser in choosers:
        if chooser.name.partition("@")[0].endswith(AUTO_SUFFIX):
            raise InvalidArgument(
                f"a sampler cannot be called {chooser.name!r}, as rows of num_frames={AUTO!r} are; give another name"
            )
    if not autos:
        return []
    found: list[AutoChooser] = []
    for chooser in choosers:
        why_not = _why_not(chooser)
        if why_not is None:
            assert isinstance(chooser, ScoreChooser), "checked"
            assert isinstance(chooser.scorer, SamplerScorer), "checked"
            chooser.scorer.wants_expected = True
            found += [AutoChooser(f"{chooser.name}{behind}", chooser, auto) for behind, auto in autos.items()]
        elif chooser.name != "all" and all(wanted is None for wanted, _ in pairs):
            raise InvalidArgument(f"{why_not}; add a number, for example num_frames=[3, {AUTO!r}], or leave it out")
    if choosers and not found:
        raise InvalidArgument(
            f"num_frames={AUTO!r} is for trained samplers, and there is none among the policies; add one"
        )
    return found


def _why_not(chooser: Chooser) -> str | None:
    """None for a sampler whose best frames are taken and that can decide how many."""
    if isinstance(chooser, ScoreChooser) and isinstance(chooser.scorer, SamplerScorer):
        lacks = why_no_number(chooser.scorer.sampler, chooser.name)
        return None if lacks is None else lacks.partition("; ")[0]
    return f"num_frames={AUTO!r} is for trained samplers, which know what a frame is worth, not for {chooser.name!r}"
