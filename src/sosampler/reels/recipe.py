"""Reels: plans of untrimmed videos composed from labelled pictures and distractors. Pure arithmetic, no pixels.

A reel is a sequence of shots. Some show a picture of the reel's class, the others a distractor, so that it pays to
choose frames. `ReelRecipe` has the settings, `plan_reels` draws reels, `sosampler.reels.render` renders them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sosampler._util.arrays import Indices, Seconds
from sosampler._util.validation import check_float, check_int, one_of
from sosampler.errors import InvalidArgument
from sosampler.video.candidates import grid_indices

DISTRACTOR = -1
"""The label of a shot that does not show the reel's class."""

Draws = Literal["numpy", "torch"]
Box = tuple[float, float, float]
"""Left, top and side of a square crop, as shares of the picture's side."""

_Number = TypeVar("_Number", int, float)

# Max. ratio of the sides of pictures and frames: frames are sampled without anti-aliasing.
_MAX_SHRINK = 1.5


def number_or_pair(name: str, given: Any, *, at_least: float, maximum: float = math.inf, whole: bool = False) -> Any:
    """Return a checked number, or a checked (low, high)."""
    is_pair = isinstance(given, (tuple, list))
    if is_pair and len(given) != 2:
        raise InvalidArgument(f"{name}={given!r} must be one number, or (low, high)")
    low, high = (
        check_int(name, value, at_least=int(at_least)) if whole else check_float(name, value, at_least=at_least)
        for value in (given if is_pair else (given, given))
    )
    if low > high or high > maximum:
        bound = f" <= {maximum:g}" if math.isfinite(maximum) else ""
        raise InvalidArgument(f"{name}={given!r} must be (low, high) with low <= high{bound}")
    return (low, high) if is_pair else low


def pair_of(value: _Number | tuple[_Number, _Number]) -> tuple[_Number, _Number]:
    return value if isinstance(value, tuple) else (value, value)


@dataclass(frozen=True)
class ReelRecipe:
    """Settings of reels; with pictures and seed they decide every frame. A range is (low, high) or one number."""

    num_shots: int | tuple[int, int] = 10
    """Shots of a reel; from a range each reel draws."""
    share: float | tuple[float, float] = (0.25, 0.65)
    """Each reel draws its share from here; each of its shots then shows the class with that probability."""
    min_class_shots: int = 0
    """With 0 a reel may show its class nowhere: about one reel in a hundred at ten shots and the default share."""
    num_candidates: int = 10
    """Frames of a reel in a bank: the centres of so many equal parts of the reel."""
    size: int = 176
    """Side of a frame in pixels."""
    picture_size: int = 192
    """Side of the square pictures from which frames are cropped."""
    crop_area: float | tuple[float, float] = (0.6, 1.0)
    """A shot shows a square of this share of the picture's area, anywhere in it."""
    flip: float = 0.5
    """Share of the shots that are mirrored."""
    seconds_per_shot: float | tuple[float, float] = 1.0
    """From a range each shot draws."""
    fps: int = 4
    """Frames per second; shots last an integer number of frames."""
    pan: float = 0.0
    """In a shot the camera moves by at most this share of its view, within the picture. 0: still."""
    zoom: float = 0.0
    """In a shot the camera's view grows or shrinks by at most this share. 0: still."""
    blur: float = 0.0
    """A shot begins and ends with Gaussian blurs of at most this share of the frame's side. 0: sharp."""
    fade: float = 0.0
    """A shot dissolves into the next over at most this share of the shorter of the two. 0: cuts."""
    draws: Draws = "numpy"
    """The generator of labels, shots and pictures: "torch" gives those of torch.Generator().manual_seed(seed)."""

    def __post_init__(self) -> None:
        shots = self._range("num_shots", at_least=1, maximum=math.inf, whole=True)
        self._range("share", at_least=0, maximum=1)
        self._range("crop_area", at_least=1e-4, maximum=1)
        self._range("seconds_per_shot", at_least=1e-3, maximum=math.inf)
        self._keep("min_class_shots", check_int("min_class_shots", self.min_class_shots, at_least=0))
        for name in ("num_candidates", "size", "picture_size", "fps"):
            self._keep(name, check_int(name, getattr(self, name)))
        for name, maximum in (("flip", 1.0), ("pan", 1.0), ("zoom", 0.9), ("blur", 0.5), ("fade", 1.0)):
            strength = check_float(name, getattr(self, name), at_least=0)
            if strength > maximum:
                raise InvalidArgument(f"{name}={strength:g} must be a number from 0 to {maximum:g}")
            self._keep(name, strength)
        one_of("draws", self.draws, ("numpy", "torch"))
        if self.min_class_shots > shots[0]:
            raise InvalidArgument(
                f"min_class_shots={self.min_class_shots} is more than the {shots[0]} shots a reel may have; "
                "lower it, or raise num_shots"
            )
        if self.picture_size > _MAX_SHRINK * self.size:
            raise InvalidArgument(
                f"picture_size={self.picture_size} with size={self.size} must be at most "
                f"{int(_MAX_SHRINK * self.size)}; lower it, or make larger frames"
            )
        if self.draws == "torch" and (shots[0] != shots[1] or self.min_class_shots):
            raise InvalidArgument(
                f'draws="torch" cannot be used with num_shots={self.num_shots} and min_class_shots='
                f'{self.min_class_shots}; give one number of shots and min_class_shots=0, or draws="numpy"'
            )

    def _range(self, name: str, *, at_least: float, maximum: float, whole: bool = False) -> tuple[float, float]:
        """Check a number or a pair, store it as such, and return the pair."""
        self._keep(name, number_or_pair(name, getattr(self, name), at_least=at_least, maximum=maximum, whole=whole))
        return pair_of(getattr(self, name))

    def _keep(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # plain numbers and tuples, whatever they were read from

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


PRESETS: dict[str, ReelRecipe] = {
    # The project's first measurement on 22 sports. With its seeds, labels, order of shots and pictures are exactly the
    # same. Its crops came from a GPU's generator: here they have the same distribution, not the same values. Its frames
    # were not rounded to 8 bits.
    "sports22": ReelRecipe(draws="torch"),
    # Small, with a moving camera and unequal shots: for procedural pictures on a laptop.
    "demo": ReelRecipe(
        num_shots=(8, 14),
        share=(0.15, 0.5),
        min_class_shots=1,
        num_candidates=16,
        size=112,
        picture_size=120,
        seconds_per_shot=(0.5, 1.5),
        fps=12,
        pan=0.25,
        zoom=0.25,
        blur=0.04,
        fade=0.4,
    ),
}


@dataclass(frozen=True)
class ReelSet:
    """One side of a benchmark: pictures [start, stop) of each class of a folder, and the reels planned from them."""

    folder: str  # one folder a class, below the benchmark's root
    distractors: str  # below the root
    start: int
    stop: int | None
    count: int = 0  # reels; 0 where the pictures have another purpose
    seed: int = 0


SPORTS22: dict[str, ReelSet] = {
    # Reels for the sampler show pictures on which the classifier was not trained.
    "classifier": ReelSet("train", "distractors/train", 0, 50),
    "train": ReelSet("train", "distractors/train", 50, None, count=3000, seed=1),
    "test": ReelSet("test", "distractors/test", 0, None, count=3000, seed=2),
}


@dataclass(frozen=True, slots=True)
class Shot:
    """One picture, shown for some frames."""

    label: int  # the class, or DISTRACTOR
    picture: int  # index among the pictures of that class, or among the distractors
    first_frame: int  # in the reel
    num_frames: int
    start: Box  # the camera's view at the beginning
    end: Box  # and at the end
    flip: bool
    blur: tuple[float, float]  # Gaussian radius first and last, as shares of the frame's side
    fade: float  # frames over which the shot before dissolves into this one, half of them on each side of the cut

    @property
    def shows_class(self) -> bool:
        return self.label != DISTRACTOR

    @property
    def is_still(self) -> bool:
        """All its frames are equal, apart from fades."""
        return self.start == self.end and self.blur[0] == self.blur[1]


class ShotSequence:
    """The plan of one video: a class, and shots without gaps between them, each with its `first_frame`, `num_frames`,
    `fade` and `shows_class`."""

    recipe: Any
    seed: int
    number: int
    label: int
    shots: tuple[Any, ...]

    def __repr__(self) -> str:
        shown = "".join("#" if shot.shows_class else "." for shot in self.shots)
        return f"{type(self).__name__}({self.id}, class {self.label}, shots {shown}, {self.duration:g} s)"

    @property
    def id(self) -> str:
        return f"{self.seed}-{self.number:06d}"

    @property
    def total_num_frames(self) -> int:
        return int(self.shots[-1].first_frame + self.shots[-1].num_frames)

    @property
    def duration(self) -> float:
        """Seconds."""
        return float(self.total_num_frames / self.recipe.fps)

    @cached_property
    def _starts(self) -> Indices:
        return np.array([shot.first_frame for shot in self.shots], dtype=np.int64)

    def shot_numbers(self, frame_indices: ArrayLike) -> Indices:
        frames = np.asarray(frame_indices, dtype=np.int64)
        if frames.size and (frames.min() < 0 or frames.max() >= self.total_num_frames):
            raise InvalidArgument(
                f"frames {frames.tolist()} are out of range; {self.id} has 0..{self.total_num_frames - 1}"
            )
        return np.asarray(np.searchsorted(self._starts, frames, side="right") - 1, dtype=np.int64)

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.id} | asdict(cast(Any, self))

    def digest(self, *more: str | int) -> str:
        """Return eight hex digits that change with anything in the plan and with `more`."""
        text = json.dumps([self.to_dict(), more], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


@dataclass(frozen=True, repr=False)
class Reel(ShotSequence):
    """The plan of one video that is composed from pictures."""

    recipe: ReelRecipe
    seed: int
    number: int
    label: int
    shots: tuple[Shot, ...]

    @cached_property
    def candidate_indices(self) -> Indices:
        """[T] indices of the candidates; repeats in shorter reels. One per shot if T shots are equally long."""
        return grid_indices(self.total_num_frames, self.recipe.num_candidates)

    @property
    def candidate_seconds(self) -> Seconds:
        """[T] when they are shown; a reel begins at 0 and has a constant rate."""
        return self.candidate_indices / self.recipe.fps


def plan_reels(
    recipe: ReelRecipe, *, pictures_per_class: Sequence[int], num_distractors: int, count: int, seed: int
) -> list[Reel]:
    """Plan `count` reels; reel i depends on the seed and on i alone, not on how many are planned.

    A reel draws its class, its share of class shots, then for each shot whether it shows the class and which picture,
    with repeats. The camera is drawn separately: the same seed gives the same pictures with and without its moves.

    Args:
        pictures_per_class: how many pictures each class has.
        num_distractors: how many distractors there are.
        count: reels.
        seed: 0 to 2**32 - 1.

    Examples:
        >>> plan_reels(PRESETS["sports22"], pictures_per_class=[50] * 22, num_distractors=400, count=2, seed=1)
        [Reel(1-000000, class 11, shots ##.#.#..#., 10 s), Reel(1-000001, class 16, shots .....#...., 10 s)]
    """
    if not pictures_per_class:
        raise InvalidArgument("pictures_per_class is empty; give the number of pictures of each class")
    for number in pictures_per_class:
        check_int("pictures_per_class", number)
    check_int("num_distractors", num_distractors, at_least=0)
    if not num_distractors and pair_of(recipe.share)[0] < 1:
        raise InvalidArgument(
            f"num_distractors=0 cannot be used with share={recipe.share}; give distractors, or share=(1, 1)"
        )
    check_int("count", count, at_least=0)
    check_int("seed", seed, at_least=0, at_most=2**32 - 1)
    sequence = _TorchSequence(seed) if recipe.draws == "torch" else None
    reels = []
    for number in range(count):
        rng = sequence or _NumpySequence(np.random.default_rng([seed, number, 0]))
        label = rng.below(len(pictures_per_class))
        shown = [  # (label or DISTRACTOR, picture) of each shot
            (label, rng.below(pictures_per_class[label])) if is_on else (DISTRACTOR, rng.below(num_distractors))
            for is_on in rng.shots_on(recipe).tolist()
        ]
        shots = _film(recipe, shown, np.random.default_rng([seed, number, 1]))
        reels.append(Reel(recipe=recipe, seed=seed, number=number, label=label, shots=shots))
    return reels


class _NumpySequence:
    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def below(self, end: int) -> int:
        return int(self._rng.integers(end))

    def shots_on(self, recipe: ReelRecipe) -> NDArray[np.bool_]:
        """Draw which shots show the class."""
        share = self._rng.uniform(*pair_of(recipe.share))
        low, high = pair_of(recipe.num_shots)
        chance = self._rng.random(int(self._rng.integers(low, high, endpoint=True)))
        on = chance < share
        # The shots that were nearest to showing the class do, until there are enough.
        on[np.argsort(chance, kind="stable")[: recipe.min_class_shots]] = True
        return on


class _TorchSequence:
    """The numbers of torch's generator on the CPU, without torch: both use the same Mersenne Twister."""

    def __init__(self, seed: int) -> None:
        self._twister = np.random.RandomState(seed)

    def _words(self, count: int) -> NDArray[np.uint32]:
        return np.asarray(self._twister.randint(0, 2**32, size=count, dtype=np.uint32))

    def below(self, end: int) -> int:
        """torch.randint(end, (1,))"""
        return int(self._words(1)[0]) % end

    def floats(self, count: int) -> NDArray[np.float32]:
        """torch.rand(count): 24 bits each."""
        return (self._words(count) & np.uint32(0xFFFFFF)).astype(np.float32) * np.float32(2**-24)

    def shots_on(self, recipe: ReelRecipe) -> NDArray[np.bool_]:
        """Draw which shots show the class, in single precision, as torch does."""
        chance = self.floats(pair_of(recipe.num_shots)[0])
        low, high = pair_of(recipe.share)
        return chance < np.float32(low) + np.float32(high - low) * self.floats(1)


def _film(recipe: ReelRecipe, shown: list[tuple[int, int]], rng: np.random.Generator) -> tuple[Shot, ...]:
    # The same number of draws whatever the strengths are, so that each move can be switched on alone.
    draws = rng.random((len(shown), 11))
    shortest, longest = pair_of(recipe.seconds_per_shot)
    smallest, largest = pair_of(recipe.crop_area)
    shots: list[Shot] = []
    for (label, picture), draw in zip(shown, draws.tolist(), strict=True):
        duration, area, left, top, mirrored, right, down, wider, first_blur, last_blur, fade = draw
        num_frames = max(1, round((shortest + (longest - shortest) * duration) * recipe.fps))
        side = math.sqrt(smallest + (largest - smallest) * area)
        start = (left * (1 - side), top * (1 - side), side)
        before = shots[-1] if shots else None
        shots.append(
            Shot(
                label=label,
                picture=picture,
                first_frame=before.first_frame + before.num_frames if before else 0,
                num_frames=num_frames,
                start=start,
                end=_moved(start, recipe, right * 2 - 1, down * 2 - 1, wider * 2 - 1),
                flip=mirrored < recipe.flip,
                blur=(first_blur * recipe.blur, last_blur * recipe.blur),
                fade=fade * recipe.fade * min(before.num_frames, num_frames) if before else 0.0,
            )
        )
    return tuple(shots)


def _moved(start: Box, recipe: ReelRecipe, right: float, down: float, wider: float) -> Box:
    """Return the camera's last view, given its directions in -1..1; it never leaves the picture."""
    if not (recipe.pan or recipe.zoom):
        return start
    left, top, side = start
    new_side = min(1.0, side * (1 + recipe.zoom * wider))
    shift = (side - new_side) / 2  # a zoom keeps the centre
    left, top = (
        min(max(corner + shift + recipe.pan * side * direction, 0.0), 1.0 - new_side)
        for corner, direction in ((left, right), (top, down))
    )
    return left, top, new_side
