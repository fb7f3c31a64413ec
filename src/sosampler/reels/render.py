"""Render reels: single frames, the candidates for a bank, or mp4 files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from sosampler._util.arrays import Frames
from sosampler._util.validation import check_int
from sosampler.errors import InvalidArgument
from sosampler.reels.images import Picture, Pictures
from sosampler.reels.recipe import Box, Reel, ReelRecipe, ShotSequence, plan_reels
from sosampler.video.synthetic import encode_video

Frame = NDArray[np.uint8]
"""[H, W, 3] RGB."""

_MIN_BLUR = 0.1  # pixels; less is not visible
# Rows of a frame that are cropped together: their buffers stay in the cache and are not allocated anew.
_ROWS_PER_STEP = 40
# Increased when the same plan gives other pixels, so that older files are not taken for current ones.
RENDER_VERSION = 2


def plan_from(pictures: Pictures, recipe: ReelRecipe, *, count: int, seed: int) -> list[Reel]:
    _check_size(pictures, recipe)
    return plan_reels(
        recipe,
        pictures_per_class=pictures.per_class,
        num_distractors=pictures.num_distractors,
        count=count,
        seed=seed,
    )


def frames_of(reel: Reel, pictures: Pictures) -> Iterator[Frame]:
    """Yield all frames of a reel in order, for a video."""
    renderer = Renderer(reel, pictures)
    return (renderer.frame(index) for index in range(reel.total_num_frames))


def candidate_frames(reel: Reel, pictures: Pictures) -> Frames:
    """Render the frames at `reel.candidate_indices`, for a bank: [T, H, W, 3] uint8."""
    renderer = Renderer(reel, pictures)
    return np.stack([renderer.frame(index) for index in reel.candidate_indices.tolist()])


def check_file_options(size: int, crf: int) -> None:
    """Refuse what x264 cannot encode."""
    if size % 2:
        raise InvalidArgument(f"size={size} cannot be written as mp4; it must be an even number of pixels")
    check_int("crf", crf, at_least=0, at_most=51)


def write_reel(path: Path, reel: Reel, pictures: Pictures, *, crf: int = 18) -> None:
    """Write a reel as mp4; `crf` is x264's quality, 0 (lossless) to 51."""
    check_file_options(reel.recipe.size, crf)
    write_mp4(path, frames_of(reel, pictures), fps=reel.recipe.fps, crf=crf)


def write_mp4(path: Path, frames: Iterable[Frame], *, fps: int, crf: int) -> None:
    """Encode frames; the same frames always give the same bytes."""
    # Keyframes every four seconds and at cuts, as in videos from the web.
    # mbtree=0: with it x264 does not give the same bytes every time, even in one thread.
    parameters = f"keyint={4 * fps}:min-keyint=1:mbtree=0:log-level=error"
    options = {"preset": "veryfast", "crf": str(crf), "x264-params": parameters}
    encode_video(frames, path, fps=fps, codec_options=options)


def _check_size(pictures: Pictures, recipe: ReelRecipe) -> None:
    if pictures.size != recipe.picture_size:
        raise InvalidArgument(
            f"the pictures are {pictures.size} px wide, the recipe has picture_size={recipe.picture_size}; "
            "open the pictures with that size, or change the recipe"
        )


def layers(reel: ShotSequence, frame_index: int) -> list[tuple[int, float]]:
    """Return the shots that are visible in a frame with their weights, which sum to 1: one, or two in a fade.

    The frame's own shot has more than half. Fades never overlap, since each takes at most half of a shot.
    """
    number = int(reel.shot_numbers(frame_index))
    time = frame_index + 0.5  # the middle of the time for which it is shown
    for incoming in (number, number + 1):
        if not 0 < incoming < len(reel.shots):
            continue
        shot = reel.shots[incoming]
        if abs(time - shot.first_frame) < shot.fade / 2:
            weight = (time - shot.first_frame) / shot.fade + 0.5
            return [(incoming - 1, 1 - weight), (incoming, weight)]
    return [(number, 1.0)]


class Renderer:
    """Renders frames of one reel; views of still shots are cached."""

    def __init__(self, reel: Reel, pictures: Pictures) -> None:
        _check_size(pictures, reel.recipe)
        self._reel, self._pictures = reel, pictures
        self._still: dict[int, Frame] = {}  # by shot

    def frame(self, index: int) -> Frame:
        visible = layers(self._reel, index)
        if len(visible) == 1:
            return self._view(visible[0][0], index)
        mixed = sum(np.float32(weight) * self._view(number, index) for number, weight in visible)
        return np.asarray(np.rint(mixed).astype(np.uint8))

    def _view(self, number: int, index: int) -> Frame:
        """Return the camera's view in one shot; in a fade the frame may be outside of the shot."""
        if number in self._still:
            return self._still[number]
        shot, size = self._reel.shots[number], self._reel.recipe.size
        progress = min(max((index + 0.5 - shot.first_frame) / shot.num_frames, 0.0), 1.0)
        left, top, side = (a + (b - a) * progress for a, b in zip(shot.start, shot.end, strict=True))
        view = crop(self._pictures.get(shot.label, shot.picture), (left, top, side), size, flip=shot.flip)
        radius = (shot.blur[0] + (shot.blur[1] - shot.blur[0]) * progress) * size
        if radius >= _MIN_BLUR:
            view = np.asarray(Image.fromarray(view).filter(ImageFilter.GaussianBlur(radius)))
        if shot.is_still:
            self._still[number] = view
        return view


def crop(picture: Picture, box: Box, size: int, *, flip: bool = False) -> Frame:
    """Crop the square `box` of a picture [S, S, 3] to `size` x `size` pixels by bilinear sampling.

    Two taps per direction, as torch's grid_sample; the recipe prevents pictures from being much finer than frames.
    """
    left, top, side = box
    stored = picture.shape[0]
    step = side * stored / size  # stored pixels per frame pixel
    centres = (np.arange(size) + 0.5) * step - 0.5
    row, next_row, down = _taps(centres + top * stored, stored)
    column, next_column, right = _taps((centres[::-1] if flip else centres) + left * stored, stored)
    values = picture.reshape(stored, -1)  # [S, S * 3]: long rows, of which each value is gathered
    here, beyond = (np.add.outer(3 * columns, np.arange(3)).ravel() for columns in (column, next_column))
    across, down = np.repeat(right, 3), down[:, None]
    frame = np.empty((size, size * 3), dtype=np.uint8)
    for begin in range(0, size, _ROWS_PER_STEP):
        part = slice(begin, begin + _ROWS_PER_STEP)
        rows = _between(values[row[part]].astype(np.float32), values[next_row[part]].astype(np.float32), down[part])
        frame[part] = np.rint(_between(rows[:, here], rows[:, beyond], across))
    return frame.reshape(size, size, 3)


def _between(first: NDArray[np.float32], second: NDArray[np.float32], weight: NDArray[np.float32]) -> Any:
    """Return first + weight * (second - first), computed in place in `second`."""
    second -= first
    second *= weight
    second += first
    return second


def _taps(
    positions: NDArray[np.float64], stored: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Return the two stored pixels around each position, and the weight of the second; positions are clipped."""
    inside = np.clip(positions, 0, stored - 1)
    before = np.floor(inside).astype(np.int64)
    return before, np.minimum(before + 1, stored - 1), (inside - before).astype(np.float32)
