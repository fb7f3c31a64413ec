"""Files: written whole or not at all, and read with messages that name the file and the line."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sosampler.errors import InvalidArgument, MissingDependency


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; rename it to `path` on success, remove it on failure.

    The suffix stays the same, because writers choose the format by it.
    """
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
        config = json.loads((Path(path) / _CONFIG).read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return ""
    kind = config.get("kind") if isinstance(config, dict) else None
    return kind if isinstance(kind, str) else ""


def check_place(folder: Path, kind: str, what: str) -> None:
    """Check that a folder holds nothing, or something of the same kind.

    Args:
        kind: what will be in its config.json.
        what: how messages call it, "sampler".
    """
    if folder.exists() and not folder.is_dir():
        raise InvalidArgument(f"{folder} is a file; give a folder to save the {what} in")
    saved = saved_kind(folder)
    if saved in (None, kind):
        return
    held = f"a saved {saved}" if saved else f"a {_CONFIG} that is not a {what}'s"
    raise InvalidArgument(
        f"{folder} holds {held}, which would be lost; "
        f"give another folder to save the {what} in, or remove that one first"
    )


def at(path: Path, line: int) -> str:
    """Return how messages call a line of a file."""
    return f"{path}, line {line}"


def read_text(path: Path) -> str:
    """Return a file as text; `.gz` is unpacked."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{path}: cannot be read ({error.strerror}); check the path") from error
    if path.suffix.lower() == ".gz":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise InvalidArgument(f"{path}: is not a complete gzip file ({error}); download it again") from error
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
        stripped = line.strip()
        if stripped:
            yield number, stripped


def csv_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of the line it ends on, cells) of every row of a CSV that is not blank."""
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
    """Parse JSON in which no key occurs twice in one object; otherwise the last would win silently."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise InvalidArgument(f"{where}: the key {twice!r} occurs twice in one object; remove one of them")
        return values

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if "\n" in text else ""
        raise InvalidArgument(
            f"{where}{line}: is not JSON ({error.msg} at column {error.colno}); check the file"
        ) from error
    except (RecursionError, ValueError) as error:
        # Nested too deeply, or a number of thousands of digits.
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"{where}: the JSON cannot be read ({error}); check the file") from error


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
