"""Lists of videos in files: a CSV, a JSONL or a Parquet with a column of paths."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from sosampler.data.text import at, csv_lines, parse_json, read_text
from sosampler.errors import InvalidArgument
from sosampler.video.inputs import expand

LIST_SUFFIXES = (".csv", ".jsonl", ".parquet")
# The column of paths: as in a manifest, or as in the rows that `select` and `classify` write.
_COLUMNS = ("path", "video")


def listed_videos(paths: Sequence[str], *, leave_out: Path | None = None) -> list[Path]:
    """All videos that the paths name, in order, each once. A list stands for the videos in it, others as in `expand`.

    Relative paths of a list start at its folder.
    """
    if not any(is_list(Path(text)) for text in paths):
        return expand(paths, leave_out=leave_out)
    found: dict[str, Path] = {}
    for text in paths:
        path = Path(text)
        named = read_list(path) if is_list(path) else expand([text], leave_out=leave_out)
        for video in named:
            found.setdefault(os.path.abspath(video), Path(video))
    return list(found.values())


def is_list(path: Path) -> bool:
    return path.suffix.lower() in LIST_SUFFIXES and not path.is_dir()


def read_list(path: Path) -> list[str]:
    """The paths that the file names."""
    read = {".csv": _csv_paths, ".jsonl": _jsonl_paths, ".parquet": _parquet_paths}[path.suffix.lower()]
    found = [os.path.join(path.parent, name) for name in read(path)]
    if not found:
        raise InvalidArgument(f"{path}: names no video; write a line for each")
    return found


def _column(names: Iterable[str], where: str) -> str:
    known = list(names)
    for name in _COLUMNS:
        if name in known:
            return name
    told = ", ".join(known) or "nothing"
    raise InvalidArgument(
        f"{where}: the column 'path' is missing, found: {told}; name the column of the videos' paths so"
    )


def _checked(name: object, where: str) -> str:
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise InvalidArgument(f"{where}: the path {name!r} is empty or no path; name the video's file")
    return name


def _csv_paths(path: Path) -> Iterator[str]:
    lines = csv_lines(path)
    line, names = next(lines, (1, []))
    header = [name.strip().lower() for name in names]
    place = header.index(_column(header, at(path, line)))
    for line, cells in lines:
        yield _checked(cells[place] if place < len(cells) else "", at(path, line))


def _jsonl_paths(path: Path) -> Iterator[str]:
    for line, content in enumerate(read_text(path).split("\n"), start=1):
        if not content.strip():
            continue
        entry = parse_json(content, at(path, line))
        if not isinstance(entry, dict):
            raise InvalidArgument(f"{at(path, line)}: is not a JSON object; write one {{...}} with path a line")
        yield _checked(entry[_column(entry, at(path, line))], at(path, line))


def _parquet_paths(path: Path) -> Iterator[str]:
    from sosampler.integrations.columns import import_parquet

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
        raise InvalidArgument(f"{path}: is no Parquet file that can be read ({error}); write it again") from error
