"""What the general sampler is judged by, on dev and on test alike.

Reels with a classifier, golf swings, films with faults, slide shows, clips of a single shot, streams of action clips,
and talks of written slides.

Each set gives candidates, frames [T, H, W, 3] a video, and a way to judge a choice. The pictures and clips of test were
never seen in training or when settings were chosen.
"""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

import sosampler as so
from benchmarks.accuracy.realvid import events_of, manifest_of
from benchmarks.general_sampler.general_data import DEV, square, train_clips, train_pictures
from benchmarks.general_sampler.general_films import Film, Material, judge, make_films, make_stills, make_talks
from benchmarks.paper.golf_events import within
from sosampler.datasets.segments import SEGMENTS_FILE, read_segments

REEL_SIZE, REEL_SHOTS = 192, 10
CLASS_SHARE = (0.25, 0.65)  # of a reel's shots
REEL_NUMBERS, GOLF_NUMBERS, FILM_NUMBERS = (1, 3, 6), (2, 4, 6, 8), (4, 8)
GOLF_CANDIDATES, FILM_CANDIDATES = 16, 32
SINGLE_SHOTS = {"ucf101": 40, "msvd": 30, "airtlab": 20, "yoga": 20}  # clips of each set, or as many as there are
SINGLE_FRAMES = 48  # that a clip must have, so that 32 candidates are different ones
BUNCHED = 0.06  # of the clip: neighbouring choices that are nearer to each other show the same moment

Frames = NDArray[np.uint8]
Choose = Callable[[Frames, int], Sequence[int]]  # candidates and N -> positions


class Places(NamedTuple):
    """Where everything lies."""

    pictures: Path
    clips: Path
    films: Path  # a few videos of any kind, for test alone
    fonts: Path  # other ones than in training
    classifier: Path
    actions: Path  # manifest of action clips, split by groups
    streams: Path  # of `sosampler reels ACTIONS --to mp4 --preset streams`
    work: Path
    scenedetect: Path | None = None


class Reel(NamedTuple):
    label: int
    pictures: NDArray[np.int64]  # [T], numbers of pictures


class Reels:
    """Pictures of one class among distractors. What the classifier says of a shot is what it says of its picture."""

    def __init__(self, places: Places, split: str, count: int, seed: int) -> None:
        self.places, self.split = places, split
        self.classes = sorted(entry.name for entry in (places.pictures / "train").iterdir())
        self.files = self._files()
        self.labels = np.array([self._label(file) for file in self.files])
        draw = np.random.default_rng(seed)
        self.reels = [self._reel(draw) for _ in range(count)]

    def _files(self) -> list[Path]:
        if self.split == "dev":
            return [file for file, part in train_pictures(self.places.pictures) if part == DEV]
        folders = [*sorted((self.places.pictures / "test").iterdir()), self.places.pictures / "distractors" / "test"]
        return [file for folder in folders for file in sorted(folder.glob("*.jpg"))]

    def _label(self, file: Path) -> int:
        return self.classes.index(file.parent.name) if file.parent.name in self.classes else -1

    def _reel(self, draw: np.random.Generator) -> Reel:
        label = int(draw.integers(len(self.classes)))
        shows = draw.random(REEL_SHOTS) < draw.uniform(*CLASS_SHARE)
        drawn = [draw.choice(np.flatnonzero(self.labels == which), REEL_SHOTS, replace=False) for which in (label, -1)]
        return Reel(label, np.where(shows, *drawn))

    @cached_property
    def frames(self) -> Frames:
        """[P, S, S, 3], one frame a picture."""
        found = []
        for file in self.files:
            with Image.open(file) as picture:
                found.append(square(picture, REEL_SIZE))
        return np.stack(found)

    @cached_property
    def logits(self) -> NDArray[np.float32]:
        """What the classifier says of each picture [P, C]; computed once and kept."""
        classifier = so.create_classifier(self.places.classifier)
        kept = self.places.work / f"answers-{self.split}-{classifier.fingerprint()}.npy"
        if not kept.is_file():
            rows = torch.from_numpy(self.frames).permute(0, 3, 1, 2)[:, None]  # [P, 1, 3, S, S]
            said = [classifier.clip_probs(some).clamp_min(1e-9).log() for some in rows.split(32)]
            np.save(kept, torch.cat(said).float().numpy())
        return np.load(kept)

    def right(self, reel: Reel, shots: Sequence[int]) -> bool:
        """Whether the mean over the chosen shots gives the class."""
        return bool(self.logits[reel.pictures[list(shots)]].mean(0).argmax() == reel.label)


class Swing(NamedTuple):
    path: Path
    indices: NDArray[np.int64]  # [T] frames of the clip
    frames: Frames
    near: NDArray[np.bool_]  # [E, T], which candidates show which moment


def swings(places: Places, split: str) -> Iterator[Swing]:
    """Golf swings and their eight moments; what counts as shown is golf_events.py's."""
    result = events_of(places.clips, "golfdb")
    assert result is not None
    for item in manifest_of(places.clips, "golfdb").items:
        if item.split == split:
            path = places.clips / item.path
            found = so.select(path, GOLF_CANDIDATES, policy="uniform", on_short="fewer", threads=1)
            assert found.frames is not None
            near = within(
                list(found.frame_indices * result["native_frames_a_frame"]), result["events"][item.path][1:-1]
            )
            yield Swing(path, found.frame_indices, found.frames, near)


def material(places: Places, split: str) -> Material:
    """Pictures and clips of a split; films of any kind come into test alone."""
    fonts = sorted(places.fonts.glob("*.ttf"))
    if split == "dev":
        pictures = [file for file, part in train_pictures(places.pictures) if part == DEV]
        return Material(pictures, [file for file, part in train_clips(places.clips) if part == DEV], fonts)
    folders = [*sorted((places.pictures / "test").iterdir()), places.pictures / "distractors" / "test"]
    clips = [
        places.clips / item.path
        for name in ("airtlab", "yoga", "golfdb")
        for item in manifest_of(places.clips, name).items
        if item.split == "test"
    ]
    others = sorted(file for file in places.films.iterdir() if file.suffix in (".mp4", ".avi", ".mkv"))
    # As often as all the others together, because there are few.
    repeated = others * max(1, len(clips) // (3 * len(others)))
    return Material([file for folder in folders for file in sorted(folder.glob("*.jpg"))], [*clips, *repeated], fonts)


def films(places: Places, split: str, count: int) -> list[Film]:
    return make_films(material(places, split), count, places.work / f"films-{split}", seed=1 if split == "dev" else 2)


def stills(places: Places, split: str, count: int) -> list[Film]:
    return make_stills(material(places, split), count, places.work / f"stills-{split}", seed=3)


def talks(places: Places, split: str, count: int) -> list[Film]:
    return make_talks(material(places, split), count, places.work / f"talks-{split}", seed=4 if split == "dev" else 5)


class Candidates(NamedTuple):
    """Evenly spread frames of a file."""

    indices: NDArray[np.int64]  # [T]
    frames: Frames
    total: int  # frames of the file


def candidates_of(path: Path, num_candidates: int = FILM_CANDIDATES) -> Candidates:
    found = so.select(path, num_candidates, policy="uniform", on_short="fewer", threads=1)
    assert found.frames is not None
    return Candidates(found.frame_indices, found.frames, found.metadata.total_num_frames)


def single_shots(places: Places, split: str) -> list[Path]:
    """Real clips of one shot, the same ones each time."""
    with places.actions.open(newline="", encoding="utf-8") as lines:
        files = [places.actions.parent / row["path"] for row in csv.DictReader(lines) if row["split"] == split]
    of = {name: [file for file in files if name in file.parts] for name in ("ucf101", "msvd")}
    for name in ("airtlab", "yoga"):
        of[name] = [places.clips / item.path for item in manifest_of(places.clips, name).items if item.split == split]
    draw, found = np.random.default_rng(5), []
    for name, count in SINGLE_SHOTS.items():
        some = sorted(of[name])
        found += [some[place] for place in sorted(draw.permutation(len(some))[:count])]
    lengths = [so.select(file, 1, decode=False).metadata.total_num_frames for file in found]
    return [file for file, length in zip(found, lengths, strict=True) if length >= SINGLE_FRAMES]


def judge_spread(chosen: Sequence[int], total: int) -> dict[str, float]:
    """The largest part of a clip without a choice, its ends too, and the share of neighbours that are bunched.

    >>> {name: round(value, 3) for name, value in judge_spread([10, 13, 50], 100).items()}
    {'largest gap': 0.495, 'bunched': 0.5}
    """
    places = (np.sort(chosen) + 0.5) / total
    steps = np.diff(places)
    return {
        "largest gap": float(max(steps.max(), places[0], 1 - places[-1])),
        "bunched": float((steps < BUNCHED).mean()),
    }


class Stream(NamedTuple):
    """Shots of clips, some of which show an action."""

    path: Path
    ends: NDArray[np.float64]  # [S] seconds
    shows: NDArray[np.bool_]  # [S] whether a shot shows the action
    fps: float


def streams(places: Places, split: str) -> list[Stream]:
    with (places.streams / "manifest.csv").open(newline="", encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row["split"] == split]
    segments = read_segments(places.streams / SEGMENTS_FILE, [row["id"] for row in rows])
    found = []
    for row in rows:
        path, shots = places.streams / row["path"], segments[row["id"]]
        fps = so.select(path, 1, decode=False).metadata.fps
        ends, shows = (np.array([getattr(shot, name) for shot in shots]) for name in ("end", "shows_class"))
        found.append(Stream(path, ends, shows, fps))
    return found


def judge_stream(stream: Stream, chosen: Sequence[int]) -> dict[str, float]:
    """Of the clips of the action and of all shots, the share that is shown, of at most N."""
    seconds = (np.asarray(chosen) + 0.5) / stream.fps
    shown = np.unique(np.searchsorted(stream.ends, seconds).clip(max=len(stream.ends) - 1))
    return {
        "actions shown": float(stream.shows[shown].sum() / min(len(chosen), stream.shows.sum())),
        "shots shown": len(shown) / min(len(chosen), len(stream.ends)),
    }


# ---- PySceneDetect


def scenes(places: Places, detector: str, videos: Sequence[Path]) -> list[list[tuple[int, int]]]:
    """Scenes of each video as frame numbers, by the Python that has PySceneDetect."""
    script = Path(__file__).with_name("general_scenes.py")
    command = [str(places.scenedetect), str(script), detector, *map(str, videos)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [[(first, last) for first, last in json.loads(done.stdout)[str(video)]] for video in videos]


def middles(found: Sequence[tuple[int, int]], total: int, num_frames: int) -> list[int]:
    """Middle frames of N scenes that are evenly spread; where there are fewer, the longest are divided further.

    >>> middles([(0, 10), (10, 50), (50, 60)], 60, 2), middles([], 60, 3)
    ([5, 55], [10, 30, 50])
    """
    parts = {scene: 1 for scene in (found or [(0, total)])}
    while sum(parts.values()) < num_frames:
        parts[max(parts, key=lambda scene: (scene[1] - scene[0]) / parts[scene])] += 1
    places = [
        first + (last - first) * (2 * part + 1) // (2 * count)
        for (first, last), count in parts.items()
        for part in range(count)
    ]
    picked = ((np.arange(num_frames) + 0.5) * len(places) / num_frames).astype(int)
    return [min(places[place], total - 1) for place in picked]


__all__ = ["Places", "Reels", "candidates_of", "films", "judge", "middles", "scenes", "stills", "swings", "talks"]
