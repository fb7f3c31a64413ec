"""Files: written whole or not at all, and read with messages that name the file and the line."""

from __future__ import annotations

import csv
import errno
import gzip
import hashlib
import io
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape as glob_escape
from pathlib import Path
from typing import Any

from sosampler._util import limits
from sosampler.errors import InvalidArgument, MissingDependency, first_line

FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
"""Errors of the system when nothing more can be written: no space, largest file, quota."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; rename it to `path` on success, remove it on failure.

    The suffix stays the same, because writers choose the format by it. A killed process leaves the temporary file; see
    `remove_leftovers`.
    """
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        if error.errno is not None and error.filename in (None, temporary, str(temporary)):
            error.filename = str(path)  # a write that fails does not name its file, for the message
        raise
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(*paths: Path, only_of_dead: bool = False) -> None:
    """Remove what killed processes left of `replacing` these files.

    `only_of_dead`: where no lock keeps other processes away, leave the files of those that live.
    """
    for path in paths:
        for leftover in path.parent.glob(f".{glob_escape(path.stem)}.*.part{glob_escape(path.suffix)}"):
            if not only_of_dead or not _is_alive(leftover.name[len(path.stem) + 2 :].partition(".")[0]):
                leftover.unlink(missing_ok=True)


def _is_alive(pid: str) -> bool:
    if not pid.isdecimal() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True  # of another user
    return True


def write_text(path: Path, text: str | Iterable[str]) -> None:
    """Replace a file by this text, or these lines, in UTF-8; what is there stays until the new file is complete."""
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="\n") as file:
        file.writelines([text] if isinstance(text, str) else text)
        file.flush()
        os.fsync(file.fileno())  # a name must not outlive its contents when the power fails


_CONFIG = "config.json"


def saved_kind(path: Any) -> str | None:
    """Return the "kind" in a folder's config.json: "" where it has none, None where there is no such file."""
    if not isinstance(path, (str, Path)) or not (Path(path) / _CONFIG).is_file():
        return None
    try:
        kind = load_json(Path(path) / _CONFIG)["kind"]
    except (ValueError, OSError, KeyError, TypeError):
        return ""
    return kind if isinstance(kind, str) else ""


def check_place(folder: Path, kind: str, what: str) -> None:
    """Check that a folder holds nothing, or something of the same kind; messages call it `what`."""
    if folder.exists() and not folder.is_dir():
        raise InvalidArgument(f"{folder} is a file; give a folder to save the {what} in")
    saved = saved_kind(folder)
    if saved not in (None, kind):
        held = f"a saved {saved}" if saved else f"a {_CONFIG} that is not a {what}'s"
        raise InvalidArgument(
            f"{folder} holds {held}, which would be lost; "
            f"give another folder to save the {what} in, or remove that one first"
        )


def at(path: Path, line: int) -> str:
    """Return how messages call a line of a file."""
    return f"{path}, line {line}"


def read_bytes(path: Path, limit: str) -> bytes:
    """Return a file that has at most as many bytes as the limit of this name, also where it is a pipe without end.

    `.gz` is unpacked. Raises `InvalidArgument`, or OSError where the file cannot be read.
    """
    most: int = getattr(limits, limit)
    with open(path, "rb") as file:
        if path.suffix.lower() != ".gz":
            data = file.read(most + 1)
        else:
            try:
                data = gzip.GzipFile(fileobj=file).read(most + 1)
            except (OSError, EOFError, zlib.error) as error:
                raise InvalidArgument(f"{path}: is not a complete gzip file ({error}); download it again") from error
    if len(data) > most:
        raise InvalidArgument(f"{path}: has more than {most} bytes (limits.{limit}); give a smaller file")
    return data


def read_text(path: Path, limit: str = "MAX_LIST_BYTES") -> str:
    """Return a file as text; `.gz` is unpacked."""
    try:
        data = read_bytes(path, limit)
    except OSError as error:
        raise InvalidArgument(f"{path}: cannot be read ({error.strerror}); check the path") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InvalidArgument(
            f"{at(path, line)}: byte {data[error.start]:#04x} is not UTF-8; save the file as UTF-8"
        ) from error


def filled_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, stripped text) of every line that is not blank."""
    # Not splitlines(): it also breaks at characters that may be part of a name.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            yield number, line.strip()


def csv_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of the line it ends on, cells) of every row of a CSV that is not blank."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield reader.line_num, cells
    except csv.Error as error:
        raise InvalidArgument(
            f"{at(path, reader.line_num)}: is not CSV ({error}); check the quotes of this line"
        ) from error


def load_json(path: Path, limit: str = "MAX_TEXT_BYTES") -> Any:
    """Return the JSON of a file, for callers that describe what they expected.

    Raises OSError where it cannot be read, and ValueError with the reason where it is too large, nested too deeply or
    not JSON.
    """
    return parse_line(read_bytes(path, limit).decode("utf-8-sig"))


def parse_line(text: str | bytes) -> Any:
    """Return a JSON value; raise ValueError with the reason where it is nested too deeply or not JSON."""
    too_deep = f"nested too deeply, more than {limits.MAX_DEPTH} levels (limits.MAX_DEPTH)"
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(too_deep) from error
    if _is_too_deep(text, value):
        raise ValueError(too_deep)
    return value


def parse_json(text: str, where: str) -> Any:
    """Parse JSON in which no key occurs twice in one object; otherwise the last would win silently."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise InvalidArgument(f"{where}: the key {twice!r} occurs twice in one object; remove one of them")
        return values

    too_deep = (
        f"{where}: lists and objects are nested too deeply; at most {limits.MAX_DEPTH} levels are read "
        "(limits.MAX_DEPTH)"
    )
    try:
        value = json.loads(text, object_pairs_hook=unique)
    except InvalidArgument:
        raise
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if "\n" in text else ""
        raise InvalidArgument(
            f"{where}{line}: is not JSON ({error.msg} at column {error.colno}); check the file"
        ) from error
    except RecursionError as error:
        raise InvalidArgument(too_deep) from error
    except ValueError as error:  # a number of thousands of digits
        raise InvalidArgument(f"{where}: the JSON cannot be read ({first_line(error)}); check the file") from error
    if _is_too_deep(text, value):
        raise InvalidArgument(too_deep)
    return value


def _is_too_deep(text: str | bytes, value: Any) -> bool:
    """Return whether a value has too many levels; counting the brackets of its text first is cheap."""
    brackets = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    return sum(map(text.count, brackets)) > limits.MAX_DEPTH and _depth(value) > limits.MAX_DEPTH  # type: ignore[arg-type]


def _depth(value: Any) -> int:
    """Return how many lists and objects of a JSON value lie inside each other.

    >>> _depth(1), _depth([]), _depth({"a": [1, {}]})
    (0, 1, 3)
    """
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, (list, dict))]:
        depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth


def checksum_path(shard: Path) -> Path:
    """Return where the checksum of a shard lies."""
    return shard.with_suffix(".sha256")


def checksum_text(shard: Path, name: str) -> str:
    """Return the line of `sha256sum` for a shard, under the name that it has or will have."""
    with open(shard, "rb") as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n"


def import_parquet() -> tuple[Any, Any]:
    """Return pyarrow and pyarrow.parquet."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependency(
            "Parquet needs pyarrow; install it with: pip install 'sosampler[parquet]', or write .jsonl or .csv"
        ) from error
    return pyarrow, pyarrow.parquet


# ---- files that a command may replace


def check_replaceable(path: Path, what: str, is_own: Callable[[Path], bool], *, overwrite: bool = False) -> None:
    """Refuse to replace a file that the command did not write; an empty file holds nothing that could be lost.

    `is_own`: whether the file holds what the command writes; errors of reading it mean that it does not.
    """
    if overwrite or not path.is_file() or path.stat().st_size == 0:
        return
    with suppress(OSError, ValueError, LookupError, TypeError):
        if is_own(path):
            return
    raise InvalidArgument(f"{path}: exists and does not hold {what}; give another name, or add --overwrite")


def starts_with(text: str) -> Callable[[Path], bool]:
    """Return a function for `check_replaceable`: whether a file begins with this text."""

    def begins(path: Path) -> bool:
        with open(path, "rb") as file:
            return file.read(len(text.encode())) == text.encode()

    return begins


def is_json_with(*keys: str) -> Callable[[Path], bool]:
    """Return a function for `check_replaceable`: whether a file holds a JSON object with these keys."""

    def has_keys(path: Path) -> bool:
        content = parse_json(read_text(path), str(path))
        return isinstance(content, dict) and content.keys() >= set(keys)

    return has_keys


# ---- settings


def differences(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return what differs between two settings, as "name=saved, now given".

    >>> differences({"size": 256, "fps": None}, {"size": 128})
    ['size=256, now 128']
    """
    changed = [name for name in sorted({*saved, *given}) if saved.get(name) != given.get(name)]
    return [f"{name}={saved.get(name)!r}, now {given.get(name)!r}" for name in changed]


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as they will be read back from JSON: lists for tuples."""
    values: dict[str, Any] = json.loads(json.dumps(settings))
    return values


def read_settings(file: Path) -> Any:
    """Return the saved settings; None where the work has not begun."""
    if not file.is_file():
        return None
    try:
        return load_json(file)
    except ValueError as error:
        raise InvalidArgument(f"{file}: is not JSON ({error}); give another folder") from error


def begin(file: Path, settings: Mapping[str, Any]) -> None:
    """Save the settings in a folder that must hold no files of something else; hidden files do not count."""
    folder = file.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"{folder}: the folder cannot be made ({error.strerror}); give another") from error
    foreign = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    if foreign:
        raise InvalidArgument(f"{folder}: holds other files ({', '.join(foreign[:3])}); give a new folder")
    write_text(file, json.dumps(settings, indent=1) + "\n")
