"""Clips whose pixels say which clip and which frame they are, and whether they show a class."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sosampler.video.synthetic import draw_number, encode_video, read_number

HEIGHT, WIDTH = 48, 192
CLASS_LEVEL, BACKGROUND_LEVEL = 220, 40
CLASSES = ("ant", "bee")
_FRAMES = 128  # of a clip, at most


class MadeClip(NamedTuple):
    """A clip as it was written."""

    number: int
    label: str
    group: str
    split: str
    fps: int
    num_frames: int


def clip_frame(number: int, frame: int, level: int, height: int, width: int) -> np.ndarray:
    """A frame [H, W, 3] whose centre, as large as it fits with the shape of a stream, carries its number."""
    pixels = np.full((height, width, 3), 128, dtype=np.uint8)
    scale = min(height / HEIGHT, width / WIDTH)
    inner_height, inner_width = round(HEIGHT * scale), round(WIDTH * scale)
    top, left = (height - inner_height) // 2, (width - inner_width) // 2
    inner = pixels[top : top + inner_height, left : left + inner_width]
    inner[inner_height // 2 :] = level
    draw_number(inner, number * _FRAMES + frame)
    return pixels


def write_clip(path: Path, clip: MadeClip, size: tuple[int, int] = (HEIGHT, WIDTH)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    level = CLASS_LEVEL if clip.label else BACKGROUND_LEVEL
    frames = (clip_frame(clip.number, frame, level, *size) for frame in range(clip.num_frames))
    encode_video(frames, path, fps=clip.fps, codec_options={"crf": "10", "preset": "veryfast"})


def read_frame(frame: np.ndarray) -> tuple[int, int]:
    """Return number and frame of the clip that a frame shows."""
    return divmod(read_number(frame), _FRAMES)


def class_weight(frame: np.ndarray) -> float:
    """Return how much of a frame is of the class: 1, 0, or between in a dissolve."""
    level = frame[HEIGHT // 2 + 6 : -6, 20:-20].mean()
    return float((level - BACKGROUND_LEVEL) / (CLASS_LEVEL - BACKGROUND_LEVEL))


def make_clips(folder: Path) -> dict[str, MadeClip]:
    """Write clips of three splits and `clips.csv`, in which rows without label are background; return them by path."""
    made: dict[str, MadeClip] = {}
    sizes = [(HEIGHT, WIDTH), (HEIGHT, WIDTH + 40), (2 * HEIGHT, 2 * WIDTH), (HEIGHT + 30, WIDTH)]
    groups = {"train": 4, "dev": 2, "test": 2}
    for split, count in groups.items():
        for label in (*CLASSES, ""):
            per_group = 2 if split == "train" else 1
            for member in range(per_group * count):
                number = len(made)
                fps = (10, 20, 15)[number % 3]
                seconds = 1.2 + 0.2 * (number % 5) + (1.5 if not label else 0)
                clip = MadeClip(number, label, f"{label}{split}{member // per_group}", split, fps, round(seconds * fps))
                path = f"{split}/{label or 'other'}{member}.mp4"
                write_clip(folder / path, clip, sizes[number % 4])
                made[path] = clip
    with open(folder / "clips.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", "group", "split"])
        writer.writerows([path, clip.label, clip.group, clip.split] for path, clip in made.items())
    return made
