"""Frames that were chosen once, for the benchmarks of Video-LLMs: lmms-eval and VLMEvalKit.

Both sample frames themselves, each model in its own way. Here they get the frames of `select --out rows.jsonl` (or
.csv, .parquet, a folder of Parquet files) instead, the same for every model. Neither package is imported.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sosampler._util.files import import_parquet
from sosampler._util.limits import check_count
from sosampler.errors import InvalidArgument
from sosampler.inference.many import write_image
from sosampler.video.limits import Size
from sosampler.video.source import open_video

_NEEDED = ("video", "frame_indices")


class ChosenFrames:
    """The frames that a file of rows lists for each video.

    Args:
        rows: what `sosampler select --out` wrote: .jsonl, .csv, .parquet, or a folder of Parquet files.
        size: of the images: None for the stored size, the short side, or (height, width).

    Videos are found by their path, or by the name of the file, with or without its ending, where that is unique.

    >>> import tempfile
    >>> import sosampler as so
    >>> from sosampler.video.synthetic import numbered_video
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.mp4").write_bytes(numbered_video(num_frames=90))
    >>> row = so.select(folder / "a.mp4", 2, policy="uniform").to_dict()
    >>> _ = (folder / "rows.jsonl").write_text(json.dumps(row))
    >>> chosen = ChosenFrames(folder / "rows.jsonl")
    >>> chosen.frame_indices("a"), len(chosen.images("a"))
    ([22, 67], 2)
    """

    def __init__(self, rows: str | os.PathLike[str], *, size: Size = None) -> None:
        self._path, self._size = Path(rows), size
        self._indices: dict[str, list[int]] = {}  # by path
        for row in _read(self._path):
            if not all(name in row for name in _NEEDED):
                raise InvalidArgument(
                    f"{self._path}: has rows without {' or '.join(_NEEDED)}; give what `sosampler select --out` wrote"
                )
            self._indices[os.path.abspath(row["video"])] = [int(index) for index in row["frame_indices"]]
        self._by_name: dict[str, list[str]] = {}
        for path in self._indices:
            for name in {os.path.basename(path), Path(path).stem}:
                self._by_name.setdefault(name, []).append(path)

    def __len__(self) -> int:
        return len(self._indices)

    def video(self, video: str | os.PathLike[str]) -> str:
        """Return the path that the rows have for a video."""
        given = os.fspath(video)
        path = os.path.abspath(given)
        if path in self._indices:
            return path
        for name in (os.path.basename(given), Path(given).stem):
            found = self._by_name.get(name, [])
            if len(found) == 1:
                return found[0]
            if found:
                raise InvalidArgument(
                    f"{given}: {len(found)} videos of {self._path} have this name; give the path as in the rows"
                )
        raise InvalidArgument(f"{given}: has no row in {self._path}; run `sosampler select` on it")

    def frame_indices(self, video: str | os.PathLike[str]) -> list[int]:
        """Return the numbers of the frames that were chosen, in time order."""
        return list(self._indices[self.video(video)])

    def images(self, video: str | os.PathLike[str]) -> list[Image.Image]:
        """Return the chosen frames as images; they are decoded at each call."""
        path = self.video(video)
        reader = open_video(path if os.path.exists(path) else os.fspath(video))  # rows may be of another machine
        try:
            batch = reader.read(np.array(self._indices[path]), size=self._size)
        finally:
            reader.close()
        return [Image.fromarray(frame) for frame in batch.frames]

    # ---- lmms-eval

    def doc_to_visual(self, original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """Wrap a task's `doc_to_visual` so that it gives images in place of the videos that it names.

        What is no path, such as an image, stays as it is. A video without a row is an error: that a model samples some
        videos by itself would go unnoticed.
        """

        @wraps(original)  # lmms-eval counts its parameters
        def chosen(*args: Any, **kwargs: Any) -> list[Any]:
            visuals: list[Any] = []
            for visual in original(*args, **kwargs):
                visuals += self.images(visual) if isinstance(visual, (str, os.PathLike)) else [visual]
            return visuals

        return chosen

    # ---- VLMEvalKit

    def write_for_vlmevalkit(
        self, frame_root: str | os.PathLike[str], *, num_frames: int, videos: Iterable[str] | None = None
    ) -> list[Path]:
        """Write frames where VLMEvalKit keeps those that it has sampled, so that it takes them instead.

        Args:
            frame_root: `images/DATASET` below its folder of data, $LMUData or ~/LMUData.
            num_frames: the `nframe` of the data set: it finds its files by this number, so every video must have so
                many.
            videos: names as in the data set's column `video`; all of the rows by the names of their files if not given.
        """
        check_count("num_frames", num_frames, "MAX_CANDIDATES")
        names = [Path(path).stem for path in self._indices] if videos is None else list(videos)
        for name in names:
            if (number := len(self.frame_indices(name))) != num_frames:
                raise InvalidArgument(
                    f"{name}: has {number} frames in {self._path}, but num_frames={num_frames}; select with "
                    f"-n {num_frames}"
                )
        paths = []
        for name in names:
            folder = Path(frame_root) / name
            folder.mkdir(parents=True, exist_ok=True)
            for number, image in enumerate(self.images(name), 1):
                paths.append(folder / f"frame-{number}-of-{num_frames}.jpg")
                write_image(image, paths[-1], quality=95)
        return paths


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file or folder as dictionaries."""
    suffix = path.suffix.lower()
    if not path.exists():
        raise InvalidArgument(f"{path}: no such file; give what `sosampler select --out` wrote")
    if path.is_dir() or suffix == ".parquet":
        _, parquet = import_parquet()
        parts = sorted(path.glob("part-*.parquet")) if path.is_dir() else [path]
        columns = list(_NEEDED)
        return [row for part in parts for row in parquet.read_table(part, columns=columns).to_pylist()]
    try:
        with open(path, encoding="utf-8", newline="") as file:
            if suffix == ".csv":
                lists = {name: json.loads for name in _NEEDED[1:]}
                return [
                    {name: lists.get(name, str)(row[name]) for name in _NEEDED if name in row}
                    for row in csv.DictReader(file)
                ]
            return [json.loads(line) for line in file if line.strip()]
    except ValueError as error:
        raise InvalidArgument(
            f"{path}: cannot be read ({error}); give a .jsonl, .csv or .parquet file of `sosampler select --out`"
        ) from error
