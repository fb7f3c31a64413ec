"""Find videos: files, folders of videos, frame dumps, patterns, addresses and lists (CSV, JSONL, Parquet, text)."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from sosampler._util.files import at, csv_lines, filled_lines, import_parquet, parse_json
from sosampler.errors import InvalidArgument, VideoError
from sosampler.video.remote import expand_address, has_pattern, is_address, scheme_of, shown_address
from sosampler.video.source import VIDEO_SUFFIXES, frame_images, source_name

Video = Path | str
"""A path, or the text of an address."""


def expand(paths: Sequence[str], *, leave_out: Path | None = None) -> list[Path]:
    """Return all videos that the paths name, in order, each once.

    A folder stands for the videos below it; a folder with numbered images and no videos is itself one video. A file or
    a plain name is taken as it is, so that a misspelt one is reported. `leave_out` is a folder below which nothing is
    looked for: the one that saved frames go to.
    """
    return [Path(video) for video in listed_videos(paths, leave_out=leave_out, with_lists=False)]


def distinct(videos: Iterable[Video]) -> list[Video]:
    """Return each video once, by its name; two addresses of one name are refused."""
    by_path: dict[str, Video] = {}
    for video in videos:
        name = absolute_name(video)
        if by_path.setdefault(name, video) != video and is_address(video):
            raise InvalidArgument(
                f"{name}: two addresses differ only in what is not shown, such as their query, so their rows would "
                "have the same name; give them in different runs"
            )
    return list(by_path.values())


def absolute_name(video: str | os.PathLike[str]) -> str:
    """Return by what name a video is known, wherever one stands: its absolute path, or its address as it is shown."""
    return shown_address(video) if isinstance(video, str) and is_address(video) else os.path.abspath(video)


def _expanded(text: str, leave_out: Path | None, schemes: Sequence[str]) -> Sequence[Video]:
    if is_address(text):
        scheme_of(text, schemes)
        return expand_address(text, schemes, VIDEO_SUFFIXES) if has_pattern(text) else [text]
    path = Path(text)
    if not path.exists() and glob.has_magic(text):
        matches = [Path(match) for match in sorted(glob.glob(text, recursive=True))]
        if not matches:
            raise InvalidArgument(f"{text}: the pattern matches nothing; check it, and quote it against the shell")
        named = [video for match in matches for video in (_below(match, leave_out) if match.is_dir() else [match])]
        if not named:
            raise VideoError(f"{text}: the pattern matches only folders without videos or numbered frame images")
        return named
    if not path.is_dir():
        return [path]
    below = _below(path, leave_out)
    if not below:
        raise VideoError(
            f"{path}: a folder without videos or numbered frame images; "
            f"known video endings are {' '.join(sorted(VIDEO_SUFFIXES))}"
        )
    return below


def _below(folder: Path, leave_out: Path | None) -> list[Path]:
    videos: list[Path] = []
    excluded = None if leave_out is None else os.path.abspath(leave_out)
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if os.path.abspath(os.path.join(root, name)) != excluded)
        here = [Path(root, name) for name in sorted(files) if os.path.splitext(name)[1].lower() in VIDEO_SUFFIXES]
        videos += here
        if not here and files and frame_images(Path(root)):
            videos.append(Path(root))
    return videos


def labels(videos: Sequence[Video]) -> list[str]:
    """Return a short unique name for each video: its path below the common folder.

    >>> labels(["s3://bucket/a/1.mp4", "s3://bucket/b/../1.mp4"])
    ['a/1.mp4', 'b/%2E%2E/1.mp4']
    """
    absolute = [_as_path(video) for video in videos]
    if len(videos) == 1:
        return [os.path.basename(absolute[0])]
    common = os.path.commonpath([os.path.dirname(path) for path in absolute])
    return [os.path.relpath(path, common) for path in absolute]


def _as_path(video: Video) -> str:
    """Return an absolute path; that of an address never leads upwards."""
    name = absolute_name(video)
    if not is_address(name):
        return name
    parts = name.replace("://", "/", 1).split("/")
    return os.path.join(os.sep, *(part.replace(".", "%2E") if part in (".", "..") else part for part in parts))


def in_shard(video: Video, number: int, count: int) -> bool:
    """Return whether a video is in the part `number`, from 0, of `count`.

    By a hash of its name, so that parts stay as they are where a list grows or is in another order, and machines that
    list a store at different times neither miss a video nor do one twice.
    """
    digest = hashlib.sha256(os.fsencode(source_name(video))).digest()
    return int.from_bytes(digest[:8], "big") % count == number


LIST_SUFFIXES = (".csv", ".jsonl", ".parquet", ".txt")
# The column of paths: as in a manifest, or as in the rows that `select` and `classify` write.
_COLUMNS = ("path", "video")


def listed_videos(
    paths: Sequence[str],
    *,
    leave_out: Path | None = None,
    schemes: Sequence[str] = (),
    with_lists: bool = True,
) -> list[Video]:
    """Return all videos that the paths name, in order, each once.

    A list (.csv, .jsonl, .parquet, .txt) stands for the videos in it; other paths are taken as in `expand`.

    Relative paths of a list start at its folder; it may hold addresses, but lies in a file here. `schemes` are those of
    addresses that may be opened; in a store a pattern, or a folder with a slash at its end, stands for its videos.
    """
    return distinct(
        video
        for text in paths
        for video in (read_list(Path(text)) if with_lists and is_list(text) else _expanded(text, leave_out, schemes))
    )


def is_list(text: str | Path) -> bool:
    path = Path(text)
    if is_address(text) or path.suffix.lower() not in LIST_SUFFIXES or path.is_dir():
        return False
    return path.suffix.lower() != ".txt" or not path.is_file() or _names_a_video(path)


def _names_a_video(path: Path) -> bool:
    """Return whether the first lines of a text file name a video: else it is notes, or a video with an odd name."""
    try:
        with path.open("rb") as file:
            lines = file.read(65536).splitlines()[:100]
    except OSError:  # reading the list says why
        return True
    names = [os.fsdecode(line).strip() for line in lines if line.strip() and b"\0" not in line]
    return any(is_address(name) or os.path.exists(path.parent / name) for name in names)


def read_list(path: Path) -> list[Video]:
    """Return the paths in a list file."""
    read = _READERS[path.suffix.lower()]
    videos: list[Video] = [name if is_address(name) else path.parent / name for name in read(path)]
    if not videos:
        raise InvalidArgument(f"{path}: names no video; write one line per video")
    return videos


def _column(names: Iterable[str], where: str) -> str:
    known = list(names)
    for name in _COLUMNS:
        if name in known:
            return name
    columns = ", ".join(known) or "nothing"
    raise InvalidArgument(
        f"{where}: the column 'path' is missing, found: {columns}; call the column of video paths 'path'"
    )


def _checked(name: object, where: str) -> str:
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise InvalidArgument(f"{where}: the path {name!r} must be a non-empty path; give the path of a video")
    return name


def _csv_paths(path: Path) -> Iterator[str]:
    lines = csv_lines(path)
    line, names = next(lines, (1, []))
    header = [name.strip().lower() for name in names]
    column = header.index(_column(header, at(path, line)))
    for line, cells in lines:
        yield _checked(cells[column] if column < len(cells) else "", at(path, line))


def _jsonl_paths(path: Path) -> Iterator[str]:
    for line, content in filled_lines(path):
        entry = parse_json(content, at(path, line))
        if not isinstance(entry, dict):
            raise InvalidArgument(f"{at(path, line)}: is not a JSON object; write one {{...}} with path a line")
        yield _checked(entry[_column(entry, at(path, line))], at(path, line))


def _parquet_paths(path: Path) -> Iterator[str]:
    pa, pq = import_parquet()
    try:
        file = pq.ParquetFile(path)
        column = _column(file.schema_arrow.names, str(path))
        batches = file.iter_batches(columns=[column])
        row = 0
        for batch in batches:
            for name in batch.column(0).to_pylist():
                yield _checked(name, f"{path}, row {row}")
                row += 1
    except (OSError, pa.ArrowException) as error:
        raise InvalidArgument(f"{path}: cannot be read as Parquet ({error}); write it again") from error


def _text_paths(path: Path) -> Iterator[str]:
    """A path or an address a line."""
    for line, content in filled_lines(path):
        yield _checked(content.strip(), at(path, line))


_READERS = {".csv": _csv_paths, ".jsonl": _jsonl_paths, ".parquet": _parquet_paths, ".txt": _text_paths}
