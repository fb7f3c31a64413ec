"""The sound around frames of a video: the audio track by PyAV, and its log-mel spectra by NumPy.

A spectrum covers the second around a frame, half of it before. It has a column for each 10 ms, of the 25 ms around
their middle, and a row for each of 64 mel bands. Values are log(1 + power / floor): 0 is silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from sosampler._util.arrays import Seconds
from sosampler.errors import VideoError
from sosampler.video.limits import Limits, TimeLimit
from sosampler.video.pyav_index import open_container

SAMPLE_RATE = 16_000  # samples a second, one channel
SECONDS = 1.0  # around each frame
BANDS, COLUMNS = 64, 100
WINDOW, HOP = 400, 160  # samples: 25 ms, 10 ms
LOW, HIGH = 50.0, 8000.0  # Hz, the ends of the lowest and the highest band
FLOOR = 1e-6  # power; a sine of full scale has 1e4
_FFT = 512
# The windows of the first and the last column reach beyond their 10 ms.
_MARGIN = (WINDOW - HOP) // 2
NUM_SAMPLES = COLUMNS * HOP + 2 * _MARGIN
"""Samples of one spectrum."""

# Timestamps of some containers are rounded to milliseconds; a larger step is a gap in the track.
_MAX_JITTER = 0.05  # seconds
# A part of a long video is reached by seeking. Decoders need some packets before their output is right.
_MIN_SEEK, _RUN_UP = 10.0, 1.0  # seconds
_MAX_RATE = 768_000

Samples = NDArray[np.float32]
Spectra = NDArray[np.float16]

NO_TRACK = "the file has no audio track"


@dataclass(frozen=True, eq=False)
class Sound:
    """What is heard around each of T frames."""

    spectra: Spectra  # [T, 64, 100]; zeros where nothing is heard
    has_audio: bool  # whether any of the file's audio could be decoded
    notes: tuple[str, ...] = ()


def silence(num_frames: int, *notes: str) -> Sound:
    return Sound(np.zeros((num_frames, BANDS, COLUMNS), dtype=np.float16), False, notes)


def mel_to_hertz(mel: Any) -> Any:
    return 700 * (10 ** (mel / 2595) - 1)


def hertz_to_mel(hertz: Any) -> Any:
    return 2595 * np.log10(1 + hertz / 700)


@cache
def mel_filters() -> NDArray[np.float64]:
    """Triangles of height 1 whose corners are evenly spaced in mel: [bins of the FFT, 64]."""
    corners = mel_to_hertz(np.linspace(hertz_to_mel(LOW), hertz_to_mel(HIGH), BANDS + 2))
    bins = np.arange(_FFT // 2 + 1)[:, None] * SAMPLE_RATE / _FFT
    left, peak, right = corners[:-2], corners[1:-1], corners[2:]
    return np.asarray(np.maximum(0, np.minimum((bins - left) / (peak - left), (right - bins) / (right - peak))))


def log_mel(samples: NDArray[Any]) -> Spectra:
    """Return the spectrum [64, 100] of 16,240 samples in -1..1: a second, and 7.5 ms on either side."""
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    windows = np.lib.stride_tricks.sliding_window_view(samples.astype(np.float64), WINDOW)[::HOP]  # [100, 400]
    power = np.square(np.abs(np.fft.rfft(windows * hann, _FFT)))  # [100, 257]
    return np.log1p(power @ mel_filters() / FLOOR).T.astype(np.float16)


def sound_around(path: Path, pts_seconds: Seconds, *, limits: Limits | None = None) -> Sound:
    """Return the spectra of the second around each of these times [T], which ascend, in seconds of the container.

    Only the windows at hand are held. What cannot be decoded is silent, and one note says so.
    """
    if path.is_dir():
        return silence(len(pts_seconds), "a folder of images has no sound")
    first = float(pts_seconds[0]) - SECONDS / 2 - _RUN_UP
    attempts = (first, None) if first > _MIN_SEEK else (None,)
    limits = limits or Limits()
    time = TimeLimit(str(path), limits)
    for begin in attempts:
        with time, open_container(path, name=str(path), limits=limits, time=time) as container:
            stream = _audio_stream(container)
            if stream is None:
                return silence(len(pts_seconds), NO_TRACK)
            track = _Track(container, stream, begin, time)
            windows = _Windows(pts_seconds)
            is_late = False
            for position, samples in track.pieces():
                # Not every format seeks exactly; then the track is read from its start.
                is_late = begin is not None and windows.is_empty and position > windows.starts[0]
                windows.add(position, samples)
                if is_late or windows.is_done:
                    break
            if not is_late:
                return Sound(windows.spectra(), track.num_decoded > 0, track.notes())
    raise AssertionError("the attempt from the start is never late")


def _audio_stream(container: Any) -> Any:
    """Return the track that players take; the others are not demuxed. None where there is none."""
    stream = container.streams.best("audio")
    if stream is None:
        return None
    context = stream.codec_context
    if context is None or not context.is_decoder:
        raise VideoError("its audio codec is unknown to the bundled FFmpeg")
    for other in container.streams:
        if other.index != stream.index:
            other.discard = av.stream.Discard.all
    return stream


class _Track:
    """Decodes an audio track to mono samples at 16 kHz, and counts what is damaged."""

    def __init__(self, container: Any, stream: Any, begin: float | None, time: TimeLimit) -> None:
        self._container, self._stream, self._begin, self._time = container, stream, begin, time
        self.num_decoded = self._num_damaged = 0  # frames, packets
        self._ended_early = False

    def notes(self) -> tuple[str, ...]:
        if not (self._num_damaged or self._ended_early):
            return ()
        many = self._num_damaged > 1
        what = "ends early" if self._ended_early else f"has {self._num_damaged} damaged packet{'s' if many else ''}"
        return (f"the audio track {what}; what could not be decoded is silent",)

    def pieces(self) -> Iterator[tuple[int, Samples]]:
        """Yield samples [n], and the position of the first one: the number of samples since time 0."""
        resampler, kind = None, None
        # Of the next sample that comes out, and of the next frame that goes in. A track without times starts at 0, and
        # where it was sought its place is unknown: too late.
        position = expected = 0.0 if self._begin is None else float(1 << 62)
        for frame in self._frames():
            found = expected if frame.pts is None else frame.pts * float(frame.time_base) * SAMPLE_RATE
            is_other = kind != (frame.format.name, frame.layout.name, frame.sample_rate)
            if resampler is None or is_other or abs(found - expected) > _MAX_JITTER * SAMPLE_RATE:
                if resampler is not None:
                    yield from _resampled(resampler, None, round(position))
                resampler = av.AudioResampler(format="fltp", layout=frame.layout, rate=SAMPLE_RATE)
                kind = frame.format.name, frame.layout.name, frame.sample_rate
                position = expected = found
            frame.pts = None  # it is placed here
            expected += frame.samples * SAMPLE_RATE / frame.sample_rate
            for start, samples in _resampled(resampler, frame, round(position)):
                yield start, samples
                position += len(samples)
        if resampler is not None:
            yield from _resampled(resampler, None, round(position))

    def _frames(self) -> Iterator[Any]:
        try:
            if self._begin is not None:
                self._container.seek(int(self._begin * 1e6), backward=True)
            for packet in self._container.demux(self._stream):
                self._time.check()
                try:
                    frames = packet.decode()
                except av.error.FFmpegError:
                    self._num_damaged += 1
                    continue
                for frame in frames:
                    if not 0 < frame.sample_rate <= _MAX_RATE:
                        raise VideoError(f"its audio claims {frame.sample_rate} samples a second")
                    self.num_decoded += 1
                    yield frame
        except av.error.FFmpegError:
            self._ended_early = True


def _resampled(resampler: Any, frame: Any, position: int) -> Iterator[tuple[int, Samples]]:
    for piece in resampler.resample(frame):
        # Decoders overshoot a little; tracks of floats may hold anything. The mean of the channels cannot clip.
        samples = np.nan_to_num(piece.to_ndarray()).clip(-1, 1).mean(0)  # [channels, n] -> [n]
        yield position, samples
        position += len(samples)


class _Windows:
    """The samples around each time, held from their first to their last, and their spectra."""

    def __init__(self, pts_seconds: Seconds) -> None:
        centres = np.round(np.asarray(pts_seconds) * SAMPLE_RATE).astype(np.int64)
        self.starts = (centres - NUM_SAMPLES // 2).tolist()  # [T], ascending
        self._next = 0  # the first that is not complete
        self._held: dict[int, Samples] = {}
        self._spectra = np.zeros((len(self.starts), BANDS, COLUMNS), dtype=np.float16)
        self.is_empty = True

    @property
    def is_done(self) -> bool:
        return self._next == len(self.starts)

    def add(self, position: int, samples: Samples) -> None:
        self.is_empty = False
        self._finish(position)
        end = position + len(samples)
        for index in range(self._next, len(self.starts)):
            start = self.starts[index]
            if start >= end:
                break
            begin, stop = max(position, start), min(end, start + NUM_SAMPLES)
            window = self._held.setdefault(index, np.zeros(NUM_SAMPLES, dtype=np.float32))
            window[begin - start : stop - start] = samples[begin - position : stop - position]
        self._finish(end)

    def _finish(self, position: int) -> None:
        """Compute the spectra of the windows that end up to here."""
        while not self.is_done and self.starts[self._next] + NUM_SAMPLES <= position:
            if self._next in self._held:
                self._spectra[self._next] = log_mel(self._held.pop(self._next))
            self._next += 1

    def spectra(self) -> Spectra:
        for index, window in self._held.items():
            self._spectra[index] = log_mel(window)
        return self._spectra
