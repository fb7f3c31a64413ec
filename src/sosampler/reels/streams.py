"""Streams: plans of untrimmed videos composed from video clips of one class and of background. Pure arithmetic.

A stream is a sequence of shots, each a part of a clip with its own motion. `StreamRecipe` has the settings,
`plan_stream` draws a stream, `sosampler.reels.clips` says which clips there are, `sosampler.reels.make_streams` writes
files.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sosampler._util.validation import check_float, check_int
from sosampler.errors import InvalidArgument
from sosampler.reels.recipe import DISTRACTOR, ShotSequence, number_or_pair, pair_of

MIN_SECONDS = 1.0
"""A shot lasts at least so long, so shorter clips are not shown."""


@dataclass(frozen=True)
class StreamRecipe:
    """Settings of streams; with clips and seed they decide every frame. A range is (low, high) or one number."""

    num_shots: int | tuple[int, int] = 10
    """Shots of a stream; from a range each stream draws."""
    share: float | tuple[float, float] = (0.25, 0.6)
    """Share of a stream's time that shows the class; from a range each stream draws."""
    seconds_per_shot: float | tuple[float, float] = (1.0, 6.0)
    """Each shot draws its length; it is shorter where its clip is, and where the share of the class requires it."""
    fades: float = 0.25
    """Share of the cuts that are dissolves."""
    seconds_per_fade: float | tuple[float, float] = (0.2, 0.8)
    """Each dissolve draws its length; it takes at most half of a shot at each end."""
    size: int | tuple[int, int] = (160, 208)
    """(height, width) of the frames, or the side of squares; clips are scaled to cover it, and their centre is shown.
    Bars beside clips of another shape would tell the sampler where a clip comes from."""
    fps: int = 25
    """Frames per second; of each clip the frame is shown that is on screen at that time."""

    def __post_init__(self) -> None:
        given: dict[str, Any] = {
            "num_shots": number_or_pair("num_shots", self.num_shots, at_least=1, whole=True),
            "share": number_or_pair("share", self.share, at_least=0.01, maximum=1),
            "seconds_per_shot": number_or_pair("seconds_per_shot", self.seconds_per_shot, at_least=MIN_SECONDS),
            "fades": check_float("fades", self.fades, at_least=0),
            "seconds_per_fade": number_or_pair("seconds_per_fade", self.seconds_per_fade, at_least=0),
            "size": self.size if isinstance(self.size, int) else tuple(self.size),
            "fps": check_int("fps", self.fps),
        }
        if given["fades"] > 1:
            raise InvalidArgument(f"fades={self.fades:g} must be a number from 0 to 1")
        sides = pair_of(given["size"])
        if len(sides) != 2 or any(check_int("size", side, at_least=16) % 2 for side in sides):
            raise InvalidArgument(
                f"size={self.size} cannot be written as mp4; give (height, width), both an even number of pixels"
            )
        for name, value in given.items():
            object.__setattr__(self, name, value)  # plain numbers and tuples, whatever they were read from

    @property
    def height_width(self) -> tuple[int, int]:
        return pair_of(self.size)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


STREAM_PRESETS: dict[str, StreamRecipe] = {
    # About half a minute; for ten candidates.
    "streams": StreamRecipe(),
    # Three to five minutes; for 32 or 100 candidates.
    "long-streams": StreamRecipe(num_shots=60, share=(0.1, 0.25), seconds_per_shot=(3.0, 6.0)),
}


@dataclass(frozen=True, slots=True)
class Clip:
    """A video, or a part of one, that streams may show."""

    path: str
    name: str  # the path as given, for records
    label: int  # the class, or DISTRACTOR for background
    group: str  # the video that it was cut from, or whatever clips have in common
    start: float  # seconds of the timestamps, where it begins in its file
    seconds: float

    def num_frames(self, fps: int) -> int:
        """How many frames of a stream it fills."""
        return math.floor(self.seconds * fps + 1e-6)


@dataclass(frozen=True, eq=False)
class ClipPool:
    """The clips that the streams of one split show."""

    of_class: tuple[tuple[Clip, ...], ...]  # [class]; a class may have none
    background: tuple[Clip, ...]

    @property
    def labels(self) -> list[int]:
        """The classes of which there are clips."""
        return [label for label, clips in enumerate(self.of_class) if clips]


@dataclass(frozen=True, slots=True)
class StreamShot:
    """A part of a clip."""

    clip: Clip
    clip_frame: int  # where it begins in the clip, in frames of the stream
    first_frame: int  # in the stream
    num_frames: int
    fade: float  # frames over which the shot before dissolves into this one, half of them on each side of the cut

    @property
    def shows_class(self) -> bool:
        return self.clip.label != DISTRACTOR


@dataclass(frozen=True, repr=False)
class Stream(ShotSequence):
    """The plan of one video that is composed from clips."""

    recipe: StreamRecipe
    seed: int
    number: int
    label: int
    shots: tuple[StreamShot, ...]

    @property
    def class_share(self) -> float:
        """The share of its time that shows the class."""
        return sum(shot.num_frames for shot in self.shots if shot.shows_class) / self.total_num_frames


def plan_stream(recipe: StreamRecipe, clips: ClipPool, *, seed: int, number: int) -> Stream:
    """Plan one stream, which depends on recipe, clips, seed and number alone.

    It draws its class, the share of the class, and the length of each shot. The class gets as many shots as bring it
    nearest to that share; then the shots of what is too long (class or background) are shortened evenly. No clip is
    shown twice while others are left: a class of few clips has a smaller share instead, down to the smallest allowed.
    """
    rng = np.random.default_rng([seed, number])
    if not clips.labels:
        raise InvalidArgument("no class has a clip; give clips with labels")
    label = int(rng.choice(clips.labels))
    low, high = pair_of(recipe.share)
    if low < 1 and not clips.background:
        raise InvalidArgument(f"there is no background for share={recipe.share}; give some, or share=1")
    target = float(rng.uniform(low, high))
    count = int(rng.integers(*pair_of(recipe.num_shots), endpoint=True))
    of_class, background = clips.of_class[label], clips.background
    shown, others = _in_turn(of_class, count, rng), _in_turn(background, count, rng)
    lengths = _lengths(recipe, shown, rng), _lengths(recipe, others, rng)
    class_frames, other_frames = _balanced(recipe, *lengths, target, num_distinct=len(of_class))
    is_class = np.zeros(count, dtype=np.bool_)
    is_class[rng.permutation(count)[: len(class_frames)]] = True
    class_shots = zip(shown, class_frames, strict=False)  # clips beyond what the share requires are not shown
    other_shots = zip(others, other_frames, strict=False)
    chosen = [next(class_shots if flag else other_shots) for flag in is_class.tolist()]
    return Stream(recipe=recipe, seed=seed, number=number, label=label, shots=_cut(recipe, chosen, rng))


def _in_turn(clips: Sequence[Clip], count: int, rng: np.random.Generator) -> list[Clip]:
    """Return `count` clips in random order: all once before any comes twice, and those of one group far apart."""
    order: list[Clip] = []
    while clips and len(order) < count:
        taken: Counter[str] = Counter()
        ranked = []
        place = {group: rank for rank, group in enumerate(rng.permutation(sorted({clip.group for clip in clips})))}
        for index in rng.permutation(len(clips)).tolist():
            clip = clips[index]
            ranked.append((taken[clip.group], place[clip.group], clip))
            taken[clip.group] += 1
        ranked.sort(key=lambda entry: entry[:2])
        turn = [clip for _, _, clip in ranked]
        if order and order[-1] == turn[0] and len(turn) > 1:  # the same clip twice in a row would look like one shot
            turn[0], turn[-1] = turn[-1], turn[0]
        order += turn
    return order[:count]


def _lengths(recipe: StreamRecipe, clips: Sequence[Clip], rng: np.random.Generator) -> list[int]:
    """Return the frames of each shot, before the share of the class is considered."""
    shortest, longest = pair_of(recipe.seconds_per_shot)
    drawn = rng.uniform(shortest, longest, len(clips)) * recipe.fps
    return [min(round(frames), clip.num_frames(recipe.fps)) for frames, clip in zip(drawn, clips, strict=True)]


def _balanced(
    recipe: StreamRecipe, of_class: list[int], of_background: list[int], target: float, *, num_distinct: int
) -> tuple[list[int], list[int]]:
    """Return the frames of the shots of the class and of background, of which the class has the target's share."""
    low, high = pair_of(recipe.share)
    count, minimum = len(of_class), math.ceil(MIN_SECONDS * recipe.fps)
    if not of_background:
        return of_class, []

    def share(num_class: int) -> float:
        shown = sum(of_class[:num_class])
        return shown / (shown + sum(of_background[: count - num_class]))

    if num_distinct < count:
        target = min(target, max(low, share(num_distinct)))
    # The number of shots that needs to be shortened least; another where shots would have to be too short.
    for num_class in sorted(range(1, count + 1), key=lambda number: abs(share(number) - target)):
        shortened = _shortened(of_class[:num_class], of_background[: count - num_class], target, minimum)
        shown, total = sum(shortened[0]), sum(map(sum, shortened))
        if low * total - 1 <= shown <= high * total + 1:  # within a frame
            return shortened
    raise InvalidArgument(
        f"share={recipe.share} cannot be reached by {count} shots of at least {MIN_SECONDS:g} s; give more shots, or "
        "another share"
    )


def _shortened(
    of_class: list[int], of_background: list[int], target: float, minimum: int
) -> tuple[list[int], list[int]]:
    """Shorten the shots of the class, or those of background, until the class has the target's share."""
    if not of_background or target >= 1:
        return of_class, of_background
    wanted = round(sum(of_background) * target / (1 - target))  # frames of the class
    if wanted <= sum(of_class):
        return _shorten(of_class, wanted, minimum), of_background
    return of_class, _shorten(of_background, round(sum(of_class) * (1 - target) / target), minimum)


def _shorten(lengths: list[int], total: int, minimum: int) -> list[int]:
    """Take from each as much of what it has beyond the minimum as brings the sum down to `total`, if that is possible.

    >>> _shorten([50, 30, 25], 90, 25), _shorten([50, 30], 20, 25)
    ([37, 28, 25], [25, 25])
    """
    spare = sum(lengths) - minimum * len(lengths)
    kept = max(total - minimum * len(lengths), 0)
    if not spare:
        return lengths
    # Sums of what was before, so that rounding does not add up.
    before = np.cumsum([0] + [length - minimum for length in lengths]) * kept // spare
    return [minimum + int(extra) for extra in np.diff(before)]


def _cut(recipe: StreamRecipe, chosen: Sequence[tuple[Clip, int]], rng: np.random.Generator) -> tuple[StreamShot, ...]:
    """Put shots (clip, number of frames) one after another, with cuts and dissolves between them."""
    draws = rng.random((len(chosen), 3))
    shortest, longest = (seconds * recipe.fps for seconds in pair_of(recipe.seconds_per_fade))
    fades = [0.0] * (len(chosen) + 1)  # before each shot, and after the last
    for number in range(1, len(chosen)):
        if draws[number, 0] < recipe.fades:
            drawn = shortest + (longest - shortest) * float(draws[number, 1])
            fades[number] = min(drawn, chosen[number - 1][1], chosen[number][1])
    shots: list[StreamShot] = []
    first_frame = 0
    for number, (clip, num_frames) in enumerate(chosen):
        # In a dissolve a clip is seen before its shot begins and after it ends, and moves if it is long enough.
        spare = clip.num_frames(recipe.fps) - num_frames
        earliest = min(math.ceil(fades[number] / 2), spare)
        latest = max(spare - math.ceil(fades[number + 1] / 2), earliest)
        clip_frame = earliest + int(draws[number, 2] * (latest - earliest + 1))
        shots.append(StreamShot(clip, clip_frame, first_frame, num_frames, fades[number]))
        first_frame += num_frames
    return tuple(shots)
