"""Writing files so that nobody ever sees half of one."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sosampler.errors import InvalidArgument


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name beside `path`; rename it to `path` on success, remove it on failure.

    The suffix is kept, because writers choose the format by it.
    """
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


_CONFIG = "config.json"


def saved_kind(path: Any) -> str | None:
    """The kind that a folder's config.json tells: "" where it tells none, None where there is no such file."""
    if not isinstance(path, (str, Path)) or not (Path(path) / _CONFIG).is_file():
        return None
    try:
        told = json.loads((Path(path) / _CONFIG).read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return ""
    kind = told.get("kind") if isinstance(told, dict) else None
    return kind if isinstance(kind, str) else ""


def check_place(folder: Path, kind: str, what: str) -> None:
    """Something of a kind may be written into a folder, but not over what something else saved there.

    `what`: how it is called in a sentence, "sampler".
    """
    if folder.exists() and not folder.is_dir():
        raise InvalidArgument(f"{folder} is a file; give a folder to save the {what} in")
    there = saved_kind(folder)
    if there in (None, kind):
        return
    held = f"a saved {there}" if there else f"a {_CONFIG} that is not a {what}'s"
    raise InvalidArgument(
        f"{folder} holds {held}, which would be lost; "
        f"give another folder to save the {what} in, or remove that one first"
    )


def at(path: Path, line: int) -> str:
    """How a place in a file is called in every message."""
    return f"{path}, line {line}"


def read_text(path: Path) -> str:
    """The whole file as text; `.gz` is unpacked."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{path}: cannot be read ({error.strerror}); check the path") from error
    if path.suffix.lower() == ".gz":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise InvalidArgument(f"{path}: is not a whole gzip file ({error}); download it again") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InvalidArgument(
            f"{at(path, line)}: byte {data[error.start]:#04x} is not UTF-8; save the file as UTF-8"
        ) from error


def filled_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, text without surrounding blanks) of every line that is not blank."""
    # Not splitlines(): it also breaks at characters that may stand inside a name.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        stripped = line.strip()
        if stripped:
            yield number, stripped


def csv_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(number of the line it ends on, cells) of every row of a CSV that is not blank."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise InvalidArgument(
                f"{at(path, reader.line_num)}: is not CSV ({error}); check the quotes of this line"
            ) from error
        if any(cell.strip() for cell in cells):
            yield reader.line_num, cells


def parse_json(text: str, where: str) -> Any:
    """JSON in which no key stands twice in one object; otherwise the last would win silently."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise InvalidArgument(f"{where}: the key {twice!r} stands twice in one object; remove one of them")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        place = f", line {error.lineno}" if "\n" in text else ""
        raise InvalidArgument(
            f"{where}{place}: is not JSON ({error.msg} at column {error.colno}); check the file"
        ) from error
    except (RecursionError, ValueError) as error:
        # Nested too deeply, or a number of thousands of digits.
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"{where}: the JSON cannot be read ({error}); check the file") from error


def checksum_path(shard: Path) -> Path:
    return shard.with_suffix(".sha256")


def checksum_text(shard: Path, called: str) -> str:
    """The line of `sha256sum`, under the name that the shard has or will have."""
    with open(shard, "rb") as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {called}\n"
