"""What a video may be given as, and which reader opens it."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sosampler._util.validation import check_float, check_int, one_of
from sosampler.errors import InvalidArgument, VideoError
from sosampler.video.limits import Limits
from sosampler.video.remote import is_address, open_address, shown_address

if TYPE_CHECKING:
    from sosampler.video.reader import VideoReader


Decoder = Literal["pyav", "torchcodec"]
DECODERS: tuple[Decoder, ...] = ("pyav", "torchcodec")

VIDEO_SUFFIXES = frozenset(
    {".3gp", ".asf", ".avi", ".flv", ".gif", ".h264", ".h265", ".hevc", ".ivf", ".m2ts", ".m4v", ".mkv", ".mov"}
    | {".mp4", ".mpeg", ".mpg", ".mts", ".mxf", ".ogv", ".ts", ".vob", ".webm", ".wmv"}
)
IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp"})


def open_video(
    source: Any,
    *,
    decoder: Decoder | None = None,
    threads: int | None = None,
    limits: Limits | None = None,
    folder_fps: float | None = None,
    schemes: Sequence[str] = (),
) -> VideoReader:
    """Open a path, bytes, a file-like object, a folder of frame images, an address or a torchcodec `VideoDecoder`.

    Args:
        decoder: "pyav" (the default) or "torchcodec"; a given `VideoDecoder` is used as it is.
        threads: for one video; None takes what the machine has. Give 1 where many videos are read side by side.
        limits: guards against hostile files.
        folder_fps: the rate at which the images of a folder were taken; None takes 25 and says so in a note.
        schemes: of the addresses that may be opened: "https", "http", "s3", "gs", "hf"; none unless given.

    Examples:
        >>> import sosampler as so
        >>> from sosampler.video.synthetic import numbered_video
        >>> reader = so.open_video(numbered_video(num_frames=90))
        >>> reader.metadata.total_num_frames, reader.keyframe_indices().tolist()
        (90, [0, 30, 60])
        >>> reader.close()
    """
    limits = limits or Limits()
    if decoder is not None:
        one_of("decoder", decoder, DECODERS)
    threads = min(os.cpu_count() or 1, 8) if threads is None else check_int("threads", threads)
    if folder_fps is not None:
        check_float("folder_fps", folder_fps, above=0)

    if is_torchcodec_decoder(source):
        from sosampler.video.torchcodec_reader import OpenTorchcodecReader

        return OpenTorchcodecReader(source, limits=limits)
    if is_address(source):
        return _open_address(source, decoder, threads, limits, schemes)
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if path.is_dir():
            from sosampler.video.folder_reader import FolderReader

            return FolderReader(path, fps=folder_fps, limits=limits)
        _check_file(path)
        source = path
    elif isinstance(source, (bytes, bytearray, memoryview)):
        source = bytes(source)
        if not source:
            raise VideoError("<bytes>: zero bytes were given; give the contents of a video file")
    elif not (hasattr(source, "read") and hasattr(source, "seek")):
        raise InvalidArgument(
            f"a {type(source).__name__} is not a video source; give a path, bytes, a binary file-like object that can "
            "seek, a folder of frame images or a torchcodec VideoDecoder"
        )
    elif isinstance(source, io.TextIOBase):
        raise InvalidArgument(f"{source!r} is opened as text; open it in binary mode, open(path, 'rb')")
    _refuse_manifest(source)

    if decoder == "torchcodec":
        from sosampler.video.torchcodec_reader import TorchcodecReader

        return TorchcodecReader(source, name=source_name(source), threads=threads, limits=limits)
    from sosampler.video.pyav_reader import PyavReader

    return PyavReader(source, name=source_name(source), threads=threads, limits=limits)


def _open_address(
    address: str, decoder: Decoder | None, threads: int, limits: Limits, schemes: Sequence[str]
) -> VideoReader:
    if decoder == "torchcodec":
        raise VideoError(f"{shown_address(address)}: torchcodec opens no addresses; use decoder='pyav', or download it")
    from sosampler.video.pyav_reader import PyavReader

    file = open_address(address, schemes=schemes, limits=limits)
    try:
        _refuse_manifest(file)
        reader = PyavReader(file, name=file.name, threads=threads, limits=limits)
    except BaseException:
        file.close()
        raise
    file.notes.extend(reader.notes)
    reader.notes = file.notes  # one list: the file may add to it while it is read
    return reader


def source_name(source: Any) -> str:
    """How a source is called in messages and results; of an address without what may be secret."""
    if is_address(source):
        return shown_address(source)
    if isinstance(source, (str, os.PathLike)):
        return str(source)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return "<bytes>"
    if is_torchcodec_decoder(source):
        return "<VideoDecoder>"
    name = getattr(source, "name", None)
    if not isinstance(name, str):
        return f"<{type(source).__name__}>"
    return shown_address(name) if is_address(name) else name  # of a file that another library opened


def is_torchcodec_decoder(source: Any) -> bool:
    # By name: importing torchcodec to ask would cost seconds and need it installed.
    return any(
        cls.__name__ == "VideoDecoder" and cls.__module__.startswith("torchcodec") for cls in type(source).__mro__
    )


def _check_file(path: Path) -> None:
    try:
        path.stat()
    except FileNotFoundError:
        pass  # reported below
    except OSError as error:
        raise VideoError(f"{path}: cannot be read ({error.strerror}); check the name and its permissions") from error
    if ":/" in os.fspath(path)[:8]:
        scheme = os.fspath(path).partition(":")[0]
        raise VideoError(f"{scheme}:...: `select` and `classify` open addresses, given as text; otherwise download it")
    if not path.exists():
        raise VideoError(f"{path}: no such file or folder; check the path")
    if not path.is_file():
        raise VideoError(f"{path}: is neither a file nor a folder; give a video file or a folder of frame images")
    if not path.stat().st_size:
        raise VideoError(f"{path}: the file is empty (zero bytes); download or copy it again")


def frame_images(folder: Path) -> list[Path]:
    """The images of a frame dump, in the order of the last number in their names: img_2.jpg before img_10.jpg."""
    numbered: list[tuple[int, str, Path]] = []
    for entry in os.scandir(folder):
        digits = re.findall(r"\d+", os.path.splitext(entry.name)[0])
        if digits and os.path.splitext(entry.name)[1].lower() in IMAGE_SUFFIXES and entry.is_file():
            numbered.append((int(digits[-1]), entry.name, Path(entry.path)))
    return [path for _, _, path in sorted(numbered)]


# FFmpeg's decoders of letters and of art made of letters: .txt, .asc, .nfo, .diz, .ans, .bin, .xb, .idf.
_LETTERS = frozenset({"ansi", "bintext", "idf", "xbin"})


def refuse_text(name: str, codec: str) -> None:
    """Refuse text by its codec, not by its name: a video whose name ends with .txt is a video."""
    if codec in _LETTERS:
        raise VideoError(f"{name}: a text file, not a video; give a video file such as .mp4, .mkv or .webm")


# How manifests and playlists begin or what they hold, in lower case: DASH, HLS, concat, IMF, SDP, VobSub. FFmpeg goes
# by these words, whatever the file is called, and opens the files that they name.
_MANIFEST = re.compile(
    rb"\s*#extm3u|\s*ffconcat version|.*<mpd[\s>]|.*<(\w+:)?(assetmap|packinglist|compositionplaylist)[\s>]"
    rb"|(.*\n)?c=in ip|# ?(vobsub|vidsub) index",
    re.DOTALL,
)
_PROBED_BYTES = 1 << 20  # as far as FFmpeg looks


def _refuse_manifest(source: Any) -> None:
    """Refuse text that names other files."""
    if is_manifest(_text_at_start(source)):
        raise VideoError(
            f"{source_name(source)}: a playlist or manifest, which names other files, not a video; give the videos "
            "themselves"
        )


def is_manifest(head: bytes) -> bool:
    """Return whether text, the beginning of a file, names other files."""
    return _MANIFEST.match(head.lower()) is not None


def _text_at_start(source: Path | bytes | Any) -> bytes:
    """The beginning of a file up to its first zero byte, of which text has none and videos have one soon."""
    if isinstance(source, bytes):
        return source[:_PROBED_BYTES].partition(b"\0")[0]
    if isinstance(source, Path):
        with open(source, "rb") as file:
            return _text_at_start(file)
    source.seek(0)
    head: bytes = source.read(256)
    if b"\0" not in head:
        head += source.read(_PROBED_BYTES)
    source.seek(0)
    return head.partition(b"\0")[0]
