"""Procedural pictures: a distinct shape on varied backgrounds among clutter.

Coordinates run from -1 to 1 over the picture, y downwards. A shape is a function of coordinates in its own frame,
where it has about unit radius; it returns the distance to its border, positive inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

Plane = NDArray[np.floating[Any]]  # [H, W]
Shape = Callable[[Plane, Plane], Plane]
Pixels = NDArray[np.uint8]  # [S, S, 3]


def _both(*planes: Plane) -> Plane:
    return np.asarray(reduce(np.minimum, planes))


def _either(*planes: Plane) -> Plane:
    return np.asarray(reduce(np.maximum, planes))


def _bar(x: Plane, y: Plane, half_width: float, half_height: float) -> Plane:
    return _both(half_width - np.abs(x), half_height - np.abs(y))


def _circle(x: Plane, y: Plane, radius: float | Plane) -> Plane:
    return np.asarray(radius - np.hypot(x, y))


def _triangle(x: Plane, y: Plane) -> Plane:
    angles = (np.pi / 2, np.pi / 2 + 2 * np.pi / 3, np.pi / 2 - 2 * np.pi / 3)  # of the normals of its sides
    return _both(*(0.5 - np.cos(angle) * x - np.sin(angle) * y for angle in angles))


def _star(x: Plane, y: Plane) -> Plane:
    tip, notch, step = 1.0, 0.42, np.pi / 5
    folded = np.abs((np.arctan2(x, -y) + step) % (2 * step) - step)  # angle from the nearest tip, 0..step
    radius = np.hypot(x, y)
    along, across = radius * np.cos(folded), radius * np.sin(folded)
    to_side, to_tip = tip - notch * np.cos(step), notch * np.sin(step)  # normal of the edge from tip to notch
    return np.asarray((to_tip * (tip - along) - to_side * across) / np.hypot(to_tip, to_side))


def _heart(x: Plane, y: Plane) -> Plane:
    lobes = _circle(np.abs(x) - 0.4, y + 0.3, 0.5)
    # The tip's edges touch the lobes at |x| = 0.754.
    tip = _both((0.808 - np.abs(x) - y) / np.sqrt(2), 0.754 - np.abs(x), y + 0.3)
    return _either(lobes, tip)


def _arrow(x: Plane, y: Plane) -> Plane:
    head = _both((0.95 - x - np.abs(y) * 0.8) / np.hypot(1, 0.8), x - 0.1)
    return _either(head, _bar(x + 0.4, y, 0.55, 0.22))


_SHAPES: dict[str, Shape] = {
    "disc": lambda x, y: _circle(x, y, 0.85),
    "square": lambda x, y: _bar(x, y, 0.78, 0.78),
    "triangle": _triangle,
    "plus": lambda x, y: _either(_bar(x, y, 0.28, 0.95), _bar(x, y, 0.95, 0.28)),
    "ring": lambda x, y: _both(_circle(x, y, 0.92), -_circle(x, y, 0.52)),
    "star": _star,
    "crescent": lambda x, y: _both(_circle(x, y, 0.9), -_circle(x - 0.42, y, 0.68)),
    "bow tie": lambda x, y: _both(0.85 - np.abs(x), (np.abs(x) + 0.1 - np.abs(y)) / np.sqrt(2)),
    "heart": _heart,
    "bars": lambda x, y: _either(*(_bar(x, y - middle, 0.85, 0.16) for middle in (-0.62, 0.0, 0.62))),
    "dumbbell": lambda x, y: _either(_circle(np.abs(x) - 0.6, y, 0.38), _bar(x, y, 0.6, 0.13)),
    "arrow": _arrow,
}
_NAMES = tuple(_SHAPES)

# Patterns in a second colour inside a shape: visible in large sharp pictures, lost in small or blurred ones.
_FILLS: tuple[tuple[str, Shape], ...] = (
    ("halved", lambda x, y: y),
    ("striped", lambda x, y: np.sin(11 * y) / 11),
    ("checked", lambda x, y: np.sin(9 * x) * np.sin(9 * y) / 9),
    ("barred", lambda x, y: np.sin(11 * x) / 11),
    ("dotted", lambda x, y: (np.cos(10 * x) + np.cos(10 * y) - 0.6) / 20),
    ("ringed", lambda x, y: np.sin(11 * np.hypot(x, y)) / 11),
)
MAX_CLASSES = 2 * len(_NAMES)  # each shape with two fills


def _fill(label: int) -> tuple[str, Shape]:
    return _FILLS[(label + 2 * (label // len(_NAMES))) % len(_FILLS)]


def class_name(label: int) -> str:
    """
    >>> class_name(0), class_name(1), class_name(12)
    ('halved disc', 'striped square', 'checked disc')
    """
    return f"{_fill(label)[0]} {_NAMES[label % len(_NAMES)]}"


def draw_picture(label: int | None, size: int, rng: np.random.Generator) -> Pixels:
    """Draw a picture [size, size, 3]: the shape of a class, or a distractor if there is no label."""
    canvas = _Canvas(size, rng)
    for _ in range(rng.integers(1, 4)):
        _paint_clutter(canvas, rng)
    if label is None:
        for _ in range(rng.integers(1, 3)):
            pose, shape = _main_pose(rng), _blob(rng)
            canvas.paint(pose, shape, canvas.colour(rng))
            if rng.random() < 0.5:  # patches in a second colour, as shapes have, but of no pattern
                canvas.paint(pose, _inside(shape, _blob(rng, waves=(3, 4, 7))), canvas.colour(rng))
    else:
        pose, shape, fill = _main_pose(rng), _SHAPES[_NAMES[label % len(_NAMES)]], _fill(label)[1]
        canvas.paint(pose, shape, canvas.colour(rng))
        canvas.paint(pose, _inside(shape, fill), canvas.colour(rng))
    if rng.random() < 0.4:  # something in front
        _paint_clutter(canvas, rng)
    light, grain = rng.uniform(0.75, 1.1), rng.uniform(1, 8)
    noise = rng.standard_normal(canvas.pixels.shape, dtype=np.float32)
    return np.clip(np.rint(canvas.pixels * np.float32(light) + noise * np.float32(grain)), 0, 255).astype(np.uint8)


@dataclass(frozen=True)
class _Pose:
    """Position, size and rotation of an object, in the picture's coordinates."""

    x: float
    y: float
    radius: float
    angle: float
    reach: float  # the object ends within so many radii


class _Canvas:
    """A picture that is being drawn: [S, S, 3] float32, values from 0 to 255."""

    def __init__(self, size: int, rng: np.random.Generator) -> None:
        self.size = size
        self._axis = ((np.arange(size) + 0.5) * (2 / size) - 1).astype(np.float32)
        self.pixels = self._background(rng)
        self._mean = self.pixels.mean(axis=(0, 1))

    def _background(self, rng: np.random.Generator) -> NDArray[np.float32]:
        """Return a gradient between two colours with soft waves."""
        first, second = rng.uniform(30, 225, (2, 3)).astype(np.float32)
        x, y = self._axis[None, :], self._axis[:, None]
        angle = rng.uniform(0, 2 * np.pi)
        mix = 0.5 + 0.35 * (np.cos(angle) * x + np.sin(angle) * y)
        for _ in range(3):
            turn, phase = rng.uniform(0, 2 * np.pi, 2)
            frequency, height = rng.uniform(2, 14), rng.uniform(0, 0.12)
            mix = mix + height * np.sin(frequency * (np.cos(turn) * x + np.sin(turn) * y) + phase)
        share = np.clip(mix, 0, 1).astype(np.float32)[..., None]
        return np.asarray(first * (1 - share) + second * share)

    def colour(self, rng: np.random.Generator) -> NDArray[np.float32]:
        """Return a colour that differs from the background by a contrast drawn between faint and strong."""
        wanted = rng.uniform(80, 230)  # Euclidean distance in RGB
        colours = rng.uniform(0, 255, (8, 3)).astype(np.float32)
        distance = np.linalg.norm(colours - self._mean, axis=1)
        return np.asarray(colours[np.argmin(np.abs(distance - wanted))])

    def paint(self, pose: _Pose, shape: Shape, colour: NDArray[np.float32]) -> None:
        """Lay a colour over the picture inside of the shape, with a soft border of about a pixel."""
        extent = pose.radius * pose.reach
        columns, rows = (
            slice(*np.searchsorted(self._axis, (middle - extent, middle + extent)).tolist())
            for middle in (pose.x, pose.y)
        )  # only where the object can be: most are small
        dx = (self._axis[None, columns] - np.float32(pose.x)) / np.float32(pose.radius)
        dy = (self._axis[rows, None] - np.float32(pose.y)) / np.float32(pose.radius)
        cos, sin = np.float32(np.cos(pose.angle)), np.float32(np.sin(pose.angle))
        inside = shape(cos * dx + sin * dy, cos * dy - sin * dx)
        cover = np.clip(inside * (pose.radius * self.size / 2) + 0.5, 0, 1).astype(np.float32)[..., None]
        window = self.pixels[rows, columns]
        window += cover * (colour - window)


def _main_pose(rng: np.random.Generator) -> _Pose:
    """Return the pose of the main object: large or small, fully visible, slightly rotated."""
    radius = rng.uniform(0.32, 0.7)
    x, y = rng.uniform(-1, 1, 2) * (1 - radius) * 0.85
    return _Pose(x, y, radius, rng.uniform(-0.45, 0.45), reach=1.5)


def _paint_clutter(canvas: _Canvas, rng: np.random.Generator) -> None:
    """Paint a small object: a stick, a blob or a piece of an arc."""
    kind = rng.integers(3)
    x, y = rng.uniform(-1, 1, 2)
    pose = _Pose(x, y, rng.uniform(0.06, 0.16), rng.uniform(0, 2 * np.pi), reach=(3.1, 1.5, 1.5)[kind])
    length, width, cut = rng.uniform(1.0, 3.0), rng.uniform(0.15, 0.35), rng.uniform(-0.3, 0.5)
    shapes: tuple[Shape, ...] = (
        lambda u, v: _bar(u, v, length, width),
        _blob(rng),
        lambda u, v: _both(_circle(u, v, 1.28), -_circle(u, v, 0.92), u - cut),
    )
    canvas.paint(pose, shapes[kind], canvas.colour(rng))


def _blob(rng: np.random.Generator, waves: tuple[int, int, int] = (2, 3, 5)) -> Shape:
    """Return an irregular outline that is none of the shapes."""
    heights, phases = rng.uniform(0.06, 0.15, 3), rng.uniform(0, 2 * np.pi, 3)

    def shape(u: Plane, v: Plane) -> Plane:
        angle = np.arctan2(v, u)
        bumps = zip(waves, heights, phases, strict=True)
        return _circle(u, v, 0.72 + sum(height * np.cos(count * angle + phase) for count, height, phase in bumps))

    return shape


def _inside(shape: Shape, fill: Shape) -> Shape:
    return lambda u, v: _both(shape(u, v) - 0.06, fill(u, v))
