"""FFmpeg draws some text files as a film of letters; nobody who asks for frames means that."""

from __future__ import annotations

from sosampler.errors import VideoError

# FFmpeg's decoders of letters and of art made of letters: .txt, .asc, .nfo, .diz, .ans, .bin, .xb, .idf.
_LETTERS = frozenset({"ansi", "bintext", "idf", "xbin"})


def refuse_text(name: str, codec: str) -> None:
    """Go by what FFmpeg found inside: a video whose name ends with .txt is a video."""
    if codec in _LETTERS:
        raise VideoError(f"{name}: a text file, not a video; give a video file such as .mp4, .mkv or .webm")
