"""Films with known faults, as mp4 files: shots of images and clips, and between them frames that should not be chosen.

Every frame has a label: a good one of some shot, or black, white, blurred, a title, or half way between two shots.
Shots of pictures either stand still, so that two of their frames are the same, or the camera moves a little.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

import sosampler as so
from benchmarks.general_sampler.general_defects import convolve, disc_kernels, motion_kernels

WIDTH, HEIGHT, FPS = 256, 192, 12
KINDS = ("good", "black", "white", "blurred", "title", "transition")
SHOTS = (7, 11)
SHOT_SECONDS = (1.5, 3.5)
STILLS, STILL_SECONDS = 8, (1.5, 12.0)  # pictures of a slide show, and how long each stands
SLIDES, SLIDE_SECONDS = 8, (2.0, 10.0)  # of a talk; the time is shared by the lines that come one by one
TALK_SIZE = (426, 240)  # so that text can be read

Frames = NDArray[np.uint8]
Draw = np.random.Generator


class Part(NamedTuple):
    """A stretch of a film: [n, H, W, 3], a kind a frame, and which shot it shows."""

    frames: Frames
    kinds: list[str]
    shot: int  # -1 for none


class Film(NamedTuple):
    """A file and what is in it, frame by frame."""

    path: Path
    kinds: list[str]
    shots: list[int]
    still: list[int]  # shots whose frames are all the same


class Material(NamedTuple):
    """What films are made of."""

    pictures: Sequence[Path]
    clips: Sequence[Path]
    fonts: Sequence[Path]


def make_films(material: Material, count: int, folder: Path, seed: int) -> list[Film]:
    """Write them once; what is there is taken as it is."""
    return _kept(folder, count, seed, lambda path, draw: _film(material, path, draw))


def _kept(folder: Path, count: int, seed: int, make: Callable[[Path, Draw], Film]) -> list[Film]:
    folder.mkdir(parents=True, exist_ok=True)
    listed = folder / "films.json"
    if not listed.is_file():
        result = [make(folder / f"{number:03d}.mp4", np.random.default_rng([seed, number])) for number in range(count)]
        listed.write_text(json.dumps([{**film._asdict(), "path": film.path.name} for film in result]), encoding="utf-8")
    return [Film(**{**row, "path": folder / row["path"]}) for row in json.loads(listed.read_text(encoding="utf-8"))]


def make_stills(material: Material, count: int, folder: Path, seed: int) -> list[Film]:
    """Slide shows: pictures that stand still for very different times, so that the same one is easily taken twice."""
    return _kept(folder, count, seed, lambda path, draw: _stills(material, path, draw))


def _stills(material: Material, path: Path, draw: Draw) -> Film:
    chosen = draw.choice(len(material.pictures), STILLS, replace=False)
    lengths = np.exp(draw.uniform(*np.log(STILL_SECONDS), STILLS)) * FPS
    frames: list[Frames] = []
    shots: list[int] = []
    for shot, (number, length) in enumerate(zip(chosen, lengths.round().astype(int).tolist(), strict=True)):
        frames += list(_of_picture(material.pictures[number], length, False, draw))
        shots += [shot] * length
    _encode(frames, path)
    return Film(path, ["good"] * len(frames), shots, list(range(STILLS)))


def make_talks(material: Material, count: int, folder: Path, seed: int) -> list[Film]:
    """Talks: slides whose lines come one by one, blank ones, and the speaker for a while. Text is the content."""
    return _kept(folder, count, seed, lambda path, draw: _talk(material, path, draw))


def _talk(material: Material, path: Path, draw: Draw) -> Film:
    """Only a slide with all of its lines is good; blank slides are called white, and the speaker a transition."""
    paper, ink = draw.integers(200, 256, 3), draw.integers(0, 90, 3)
    if draw.random() < 0.4:
        paper, ink = ink, paper
    font = material.fonts[draw.integers(len(material.fonts))]
    frames: list[Frames] = []
    kinds: list[str] = []
    shots: list[int] = []

    def add(some: Frames, kind: str, shot: int) -> None:
        frames.extend(some)
        kinds.extend([kind] * len(some))
        shots.extend([shot] * len(some))

    pauses = set(draw.choice(SLIDES, 3, replace=False).tolist())
    for shot in range(SLIDES):
        lines = [" ".join(_word(draw) for _ in range(draw.integers(2, 5))) for _ in range(draw.integers(2, 6))]
        seconds = draw.uniform(*SLIDE_SECONDS)
        for shown in range(1, len(lines) + 1):
            # The whole slide stands for half of the time.
            share = 0.5 if shown == len(lines) else 0.5 / (len(lines) - 1)
            slide = _slide(lines[:shown], paper, ink, font)
            length = max(1, round(seconds * share * FPS))
            add(np.repeat(slide[None], length, axis=0), "good" if shown == len(lines) else "title", shot)
        if shot in pauses:
            length = round(draw.uniform(1.0, 3.0) * FPS)
            if draw.random() < 0.5:
                add(np.repeat(_slide([], paper, ink, font)[None], length, axis=0), "white", -1)
            else:
                some = _of_clip(material.clips[draw.integers(len(material.clips))], length, draw)
                add(np.stack([np.asarray(Image.fromarray(one).resize(TALK_SIZE)) for one in some]), "transition", -1)
    _encode(frames, path)
    return Film(path, kinds, shots, list(range(SLIDES)))


def _word(draw: Draw) -> str:
    return "".join(chr(97 + number) for number in draw.integers(0, 26, draw.integers(2, 10)))


def _slide(lines: Sequence[str], paper: NDArray[np.int64], ink: NDArray[np.int64], font: Path) -> Frames:
    canvas = Image.new("RGB", TALK_SIZE, tuple(paper.tolist()))
    pen = ImageDraw.Draw(canvas)
    pen.rectangle((0, 0, TALK_SIZE[0], 8), fill=tuple(ink.tolist()))  # the same on each slide
    for place, line in enumerate(lines):
        size = 30 if place == 0 else 20
        text = line.title() if place == 0 else f"- {line}"
        pen.text((20, 24 + 40 * place), text, fill=tuple(ink.tolist()), font=ImageFont.truetype(str(font), size))
    return np.asarray(canvas)


def _film(material: Material, path: Path, draw: Draw) -> Film:
    parts: list[Part] = []
    still: list[int] = []
    num_shots = int(draw.integers(SHOTS[0], SHOTS[1] + 1))
    blurred_shots = set(draw.choice(num_shots, 2, replace=False).tolist())
    for shot in range(num_shots):
        count = round(draw.uniform(*SHOT_SECONDS) * FPS)
        if draw.random() < 0.6:
            moves = draw.random() < 0.5
            frames = _of_picture(material.pictures[draw.integers(len(material.pictures))], count, moves, draw)
            if not moves:
                still.append(shot)
        else:
            frames = _of_clip(material.clips[draw.integers(len(material.clips))], count, draw)
        kinds = ["good"] * count
        if shot in blurred_shots:
            frames, kinds = _with_blur(frames, draw)
        parts.append(Part(frames, kinds, shot))
    for maker in (_title, _title, _black, _white if draw.random() < 0.5 else _black):
        parts.insert(int(draw.integers(0, len(parts) + 1)), maker(material, draw))
    joined = _joined(parts, draw)
    _encode([frame for frame, _, _ in joined], path)
    return Film(path, [kind for _, kind, _ in joined], [shot for _, _, shot in joined], still)


# ---- shots


def _covering(picture: Image.Image, scale: float, across: float, down: float) -> Frames:
    """The part of a picture that fills the frame; scale 1 is as much as possible."""
    fit = min(picture.width / WIDTH, picture.height / HEIGHT) * scale
    width, height = WIDTH * fit, HEIGHT * fit
    left, top = (picture.width - width) * across, (picture.height - height) * down
    box = (left, top, left + width, top + height)
    return np.asarray(picture.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC, box=box))


def _of_picture(path: Path, count: int, moves: bool, draw: Draw) -> Frames:
    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    begin = np.array([0.95, 0.5, 0.5])
    if not moves:
        return np.repeat(_covering(picture, *begin)[None], count, axis=0)
    end = np.array([draw.uniform(0.7, 1.0), draw.random(), draw.random()])
    return np.stack([_covering(picture, *(begin + (end - begin) * step)) for step in np.linspace(0, 1, count)])


def _of_clip(path: Path, count: int, draw: Draw) -> Frames:
    length = so.select(path, 1, decode=False).metadata.duration
    begin = draw.uniform(0, max(0.0, length - 8))
    chosen = so.select(
        path,
        count,
        policy="uniform",
        start=begin if length > 9 else None,
        end=begin + 8 if length > 9 else None,
        threads=1,
    )
    assert chosen.frames is not None
    return np.stack([_covering(Image.fromarray(frame), 1.0, 0.5, 0.5) for frame in chosen.frames])


def _with_blur(frames: Frames, draw: Draw) -> tuple[Frames, list[str]]:
    """The camera sweeps or loses focus at one end of the shot."""
    count = min(len(frames) - FPS // 2, round(draw.uniform(0.7, 1.3) * FPS))
    places = np.arange(count) if draw.random() < 0.5 else np.arange(len(frames) - count, len(frames))
    some = torch.from_numpy(frames[places]).permute(0, 3, 1, 2).float() / 255
    if draw.random() < 0.5:
        lengths = torch.full((count,), draw.uniform(18, 38))
        kernels = motion_kernels(lengths, torch.full((count,), draw.uniform(0, np.pi)))
    else:
        kernels = disc_kernels(torch.full((count,), draw.uniform(6, 13)))
    soft = (convolve(some, kernels).clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    out = frames.copy()
    out[places] = soft
    inside = set(places.tolist())
    return out, ["blurred" if place in inside else "good" for place in range(len(frames))]


# ---- what is no shot


def _title(material: Material, draw: Draw) -> Part:
    count = round(draw.uniform(1.0, 2.5) * FPS)
    dark = draw.random() < 0.6
    back = draw.integers(0, 70, 3) if dark else draw.integers(150, 256, 3)
    canvas = Image.new("RGB", (WIDTH, HEIGHT), tuple(int(value) for value in back))
    pen = ImageDraw.Draw(canvas)
    size = int(draw.integers(14, 34))
    font = ImageFont.truetype(str(material.fonts[draw.integers(len(material.fonts))]), size)
    words = (
        "The",
        "Final",
        "Part",
        "Two",
        "Highlights",
        "Season",
        "2024",
        "Directed by",
        "A. Miller",
        "Chapter",
        "One",
    )
    lines = [" ".join(draw.choice(words, draw.integers(1, 4))) for _ in range(draw.integers(1, 5))]
    ink = (235, 235, 225) if dark else (20, 20, 40)
    for place, line in enumerate(lines):
        left = (WIDTH - pen.textlength(line, font=font)) / 2
        pen.text((left, HEIGHT / 2 + (place - len(lines) / 2) * size * 1.3), line, fill=ink, font=font)
    return Part(np.repeat(np.asarray(canvas)[None], count, axis=0), ["title"] * count, -1)


def _plain(level: int, kind: str, draw: Draw) -> Part:
    count = round(draw.uniform(0.7, 1.8) * FPS)
    return Part(np.full((count, HEIGHT, WIDTH, 3), level, dtype=np.uint8), [kind] * count, -1)


def _black(material: Material, draw: Draw) -> Part:
    return _plain(int(draw.integers(0, 12)), "black", draw)


def _white(material: Material, draw: Draw) -> Part:
    return _plain(int(draw.integers(235, 256)), "white", draw)


# ---- from part to part


def _joined(parts: Sequence[Part], draw: Draw) -> list[tuple[Frames, str, int]]:
    """All frames in turn, with cuts, cross-fades, wipes and fades through black."""
    film: list[tuple[Frames, str, int]] = []
    for place, part in enumerate(parts):
        rows = [(frame, kind, part.shot) for frame, kind in zip(part.frames, part.kinds, strict=True)]
        length = int(draw.integers(FPS // 2, FPS + 1))
        kind = draw.choice(["cut", "fade", "wipe", "black"], p=[0.4, 0.35, 0.1, 0.15])
        both_shots = place > 0 and part.shot >= 0 and parts[place - 1].shot >= 0
        if not both_shots or kind == "cut" or min(len(rows), len(parts[place - 1].frames)) < 2 * length:
            film += rows
            continue
        before, after = film[-length:], rows[:length]
        del film[-length:]
        film += _through_black(before, after) if kind == "black" else _mixed(before, after, kind == "wipe", draw)
        film += rows[length:]
    return film


def _mixed(before: list, after: list, wipe: bool, draw: Draw) -> list[tuple[Frames, str, int]]:
    ramp = np.linspace(0, 1, WIDTH)[None, :, None] if draw.random() < 0.5 else np.linspace(0, 1, HEIGHT)[:, None, None]
    made = []
    for step, (old, new) in enumerate(zip(before, after, strict=True), start=1):
        share = step / (len(before) + 1)
        weight = (ramp < share).astype(float) if wipe else share
        frame = (old[0] * (1 - weight) + new[0] * weight).round().astype(np.uint8)
        nearer = new if share > 0.5 else old
        clear = min(share, 1 - share) < 0.1
        made.append((frame, nearer[1] if clear else "transition", nearer[2]))
    return made


def _through_black(before: list, after: list) -> list[tuple[Frames, str, int]]:
    made = []
    for rows, light in ((before, np.linspace(1, 0, len(before))), (after, np.linspace(0, 1, len(after)))):
        for (frame, kind, shot), level in zip(rows, light, strict=True):
            result = "black" if level < 0.15 else "transition" if level < 0.6 else kind
            made.append(((frame * level).astype(np.uint8), result, shot))
    return made


def _encode(frames: Sequence[Frames], path: Path) -> None:
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=Fraction(FPS), options={"preset": "veryfast", "crf": "26"})
        stream.width, stream.height, stream.pix_fmt = frames[0].shape[1], frames[0].shape[0], "yuv420p"
        stream.codec_context.thread_count = 1
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode(None))


# ---- judging


def judge(film: Film, chosen: Sequence[int]) -> dict[str, float]:
    """Of the chosen frames, by number: the share of each kind and of repeats; of the shots, the share that is shown."""
    kinds = [film.kinds[number] for number in chosen]
    shares = {kind: kinds.count(kind) / len(kinds) for kind in KINDS}
    good = [film.shots[number] for number, kind in zip(chosen, kinds, strict=True) if kind == "good"]
    repeats = sum(good.count(shot) - 1 for shot in set(good) if shot in set(film.still))
    num_shots = max(film.shots) + 1
    return {
        **shares,
        "faulty": 1 - shares["good"],
        "repeated": repeats / len(kinds),
        "shots shown": len(set(good)) / min(num_shots, len(kinds)),
    }
