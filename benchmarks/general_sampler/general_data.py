"""What the general sampler learns from, as one file without labels: pictures, frames of clips, and written words.

All pictures are squares, kept as JPEGs. Which of them are held out for choosing settings (dev) is decided here; test
pictures, test groups of the clips and the fonts of the measurement never come into the file.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

SIDE = 192  # pixels of a stored square; cut-outs of it are larger than the 128 that the sampler sees
QUALITY = 82
PICTURES_FOR_TRAINING = 0.8  # the rest of each class's train pictures, the last ones, is dev
CLIP_SETS = ("airtlab", "yoga", "golfdb")
FRAMES_A_CLIP = 4
MASKS = 480
TRAIN, DEV = 0, 1

Picture = NDArray[np.uint8]


class Stored(NamedTuple):
    """The file in memory."""

    pictures: Tensor  # uint8 [P, 3, SIDE, SIDE]
    split: Tensor  # [P], TRAIN or DEV
    clip: Tensor  # [P], number of the clip that a frame is from; -1 for single pictures
    masks: Tensor  # uint8 [M, SIDE, SIDE], written words, white on black


def square(picture: Image.Image, side: int = SIDE) -> Picture:
    """The middle of a picture, brought to a size: [side, side, 3]."""
    short = min(picture.size)
    left, top = (picture.width - short) // 2, (picture.height - short) // 2
    box = (left, top, left + short, top + short)
    small = picture.convert("RGB").resize((side, side), Image.Resampling.BILINEAR, box=box, reducing_gap=3.0)
    return np.asarray(small)


def train_pictures(folder: Path) -> Iterator[tuple[Path, int]]:
    """Pictures of train/ and distractors/train with their split; the last fifth of each folder is dev."""
    for part in (*sorted((folder / "train").iterdir()), folder / "distractors" / "train"):
        files = sorted(part.glob("*.jpg"))
        border = int(PICTURES_FOR_TRAINING * len(files))
        yield from ((file, TRAIN if place < border else DEV) for place, file in enumerate(files))


def train_clips(clips: Path) -> Iterator[tuple[Path, int]]:
    """Clips of the train and dev groups with their split; those of test are not looked at."""
    from benchmarks.accuracy.realvid import manifest_of

    for name in CLIP_SETS:
        for item in manifest_of(clips, name).items:
            if item.split in ("train", "dev"):
                yield clips / item.path, TRAIN if item.split == "train" else DEV


def word_masks(count: int, fonts: Sequence[Path], seed: int, side: int = SIDE) -> NDArray[np.uint8]:
    """Words as title cards, captions and credits have them: [count, side, side], white on black."""
    draw = np.random.default_rng(seed)
    return np.stack([_words(draw, fonts, side) for _ in range(count)])


def _words(draw: np.random.Generator, fonts: Sequence[Path], side: int) -> NDArray[np.uint8]:
    canvas = Image.new("L", (side, side))
    pen = ImageDraw.Draw(canvas)
    lines = int(draw.integers(1, 8))
    height = int(np.clip(side * draw.uniform(0.5, 0.95) / lines, 8, side * draw.uniform(0.12, 0.32)))
    font = ImageFont.truetype(str(fonts[int(draw.integers(len(fonts)))]), height)
    top = draw.uniform(0, max(1, side - lines * height * 1.2))
    centred = draw.random() < 0.7
    for line in range(lines):
        text = " ".join(_word(draw) for _ in range(draw.integers(1, 4)))
        width = pen.textlength(text, font=font)
        left = (side - width) / 2 if centred else side * 0.06
        pen.text((left, top + line * height * 1.2), text, fill=255, font=font)
    return np.asarray(canvas)


def _word(draw: np.random.Generator) -> str:
    letters = "".join(chr(97 + number) for number in draw.integers(0, 26, draw.integers(2, 10)))
    kind = draw.random()
    if kind < 0.15:
        return str(draw.integers(0, 3000))
    return letters.upper() if kind < 0.5 else letters.capitalize() if kind < 0.8 else letters


def make(pictures: Path, clips: Path, fonts: Sequence[Path], out: Path) -> dict[str, Any]:
    """Write the file; return what is in it."""
    import sosampler as so

    found: list[bytes] = []
    split: list[int] = []
    clip_of: list[int] = []
    for file, part in train_pictures(pictures):
        with Image.open(file) as picture:
            found.append(_jpeg(square(picture)))
        split.append(part)
        clip_of.append(-1)
    num_pictures = len(found)
    for number, (file, part) in enumerate(train_clips(clips)):
        chosen = so.select(file, FRAMES_A_CLIP, policy="uniform", on_short="fewer", threads=1)
        assert chosen.frames is not None
        for frame in chosen.frames:
            found.append(_jpeg(square(Image.fromarray(frame))))
            split.append(part)
            clip_of.append(number)
    masks = [_jpeg(mask) for mask in word_masks(MASKS, fonts, seed=0)]
    np.savez(
        out,
        bytes=np.frombuffer(b"".join((*found, *masks)), dtype=np.uint8),
        lengths=np.array([len(one) for one in (*found, *masks)], dtype=np.int32),
        split=np.array(split, dtype=np.int8),
        clip=np.array(clip_of, dtype=np.int32),
    )
    return {
        "pictures": num_pictures,
        "frames of clips": len(found) - num_pictures,
        "dev": int(np.sum(split)),
        "masks": len(masks),
        "megabytes": round(out.stat().st_size / 2**20, 1),
    }


def read(path: Path) -> Stored:
    """The file, decoded."""
    with np.load(path) as stored:
        ends = np.cumsum(stored["lengths"])
        whole = stored["bytes"].tobytes()
        split, clip = torch.from_numpy(stored["split"]).long(), torch.from_numpy(stored["clip"]).long()
    opened = [Image.open(io.BytesIO(whole[end - length : end])) for end, length in _pieces(ends)]
    pictures = np.stack([np.asarray(one) for one in opened[: len(split)]])
    masks = np.stack([np.asarray(one) for one in opened[len(split) :]])
    return Stored(torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous(), split, clip, torch.from_numpy(masks))


def _pieces(ends: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    begin = 0
    for end in ends.tolist():
        yield end, end - begin
        begin = end


def _jpeg(picture: Picture) -> bytes:
    held = io.BytesIO()
    Image.fromarray(picture).save(held, "JPEG", quality=QUALITY, optimize=True)
    return held.getvalue()
