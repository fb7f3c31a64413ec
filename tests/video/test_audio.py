"""The sound around frames: spectra against their definition, the right second, and tracks of every awkward kind."""

from __future__ import annotations

import math
import wave
from pathlib import Path

import av
import numpy as np
import pytest

from sosampler.video import audio
from sosampler.video.audio import NUM_SAMPLES, log_mel, mel_filters, sound_around
from sosampler.video.limits import Limits
from tests.clips import click_at, video_with_sound

RATE = 16_000


def slow_log_mel(samples: np.ndarray) -> np.ndarray:
    """Word for word, without a fast transform: window, Fourier sum, triangles in mel, log."""
    hann = [0.5 * (1 - math.cos(2 * math.pi * n / 400)) for n in range(400)]
    waves = np.exp(-2j * np.pi * np.outer(np.arange(257), np.arange(400)) / 512)
    mels = np.linspace(2595 * math.log10(1 + 50 / 700), 2595 * math.log10(1 + 8000 / 700), 66)
    corners = [700 * (10 ** (mel / 2595) - 1) for mel in mels]
    spectrum = np.zeros((64, 100))
    for column in range(100):
        power = abs(waves @ (samples[column * 160 : column * 160 + 400] * hann)) ** 2
        for band in range(64):
            left, peak, right = corners[band : band + 3]
            total = 0.0
            for number, value in enumerate(power):
                hertz = number * 16_000 / 512
                if left < hertz <= peak:
                    total += value * (hertz - left) / (peak - left)
                elif peak < hertz < right:
                    total += value * (right - hertz) / (right - peak)
            spectrum[band, column] = math.log(1 + total * 1e6)
    return spectrum


def sine(hertz: float, count: int = NUM_SAMPLES, amplitude: float = 0.5) -> np.ndarray:
    return amplitude * np.sin(2 * np.pi * hertz * np.arange(count) / RATE)


class TestLogMel:
    def test_is_its_definition(self) -> None:
        rng = np.random.default_rng(0)
        samples = rng.normal(0, 0.1, NUM_SAMPLES) * np.linspace(0, 1, NUM_SAMPLES) + sine(700)
        found = log_mel(samples.astype(np.float32))
        assert found.shape == (64, 100)
        assert found.dtype == np.float16
        np.testing.assert_allclose(found, slow_log_mel(samples), atol=0.02)  # half precision between 16 and 32

    @pytest.mark.parametrize("band", [3, 21, 43, 62])
    def test_a_sine_is_in_its_band(self, band: int) -> None:
        """From 77.75 mel (50 Hz) to 2840.02 mel (8000 Hz) in 65 steps; band k peaks at step k + 1."""
        mel = 77.7547 + (band + 1) * (2840.0230 - 77.7547) / 65
        spectrum = log_mel(sine(700 * (10 ** (mel / 2595) - 1))).astype(float)
        assert (spectrum.argmax(0) == band).all()
        assert spectrum[band].std() < 0.05  # steady
        far = np.abs(np.arange(64) - band) > 8
        assert spectrum[band].min() - spectrum[far].max() > 8  # 35 dB

    def test_ten_times_the_amplitude_is_a_hundred_times_the_power(self) -> None:
        loud, soft = (log_mel(sine(1000, amplitude=size)).astype(float)[21] for size in (0.5, 0.05))
        np.testing.assert_allclose(loud - soft, math.log(100), atol=0.03)

    def test_silence_is_zero(self) -> None:
        assert not log_mel(np.zeros(NUM_SAMPLES)).any()

    def test_every_bin_within_the_bands_counts_and_none_outside(self) -> None:
        filters = mel_filters()
        hertz = np.arange(257) * 16_000 / 512
        assert filters.shape == (257, 64)
        assert ((filters >= 0) & (filters <= 1)).all()
        assert (filters.sum(0) > 0).all()
        assert (filters.sum(1)[(hertz > 50) & (hertz < 8000)] > 0).all()
        assert filters[(hertz <= 50) | (hertz >= 8000)].max() < 1e-9

    def test_columns_are_ten_milliseconds_apart(self) -> None:
        for column in (0, 37, 99):
            samples = np.zeros(NUM_SAMPLES)
            samples[column * 160 + 200] = 1  # in the middle of its window
            assert log_mel(samples).sum(0).argmax() == column


CODECS = {"aac": ".mp4", "pcm_s16le": ".mov", "libmp3lame": ".mkv", "flac": ".mkv", "ac3": ".ts", "libopus": ".webm"}


@pytest.mark.parametrize("codec", CODECS)
def test_a_click_is_heard_at_its_time(tmp_path: Path, codec: str) -> None:
    rate = 48_000 if codec == "libopus" else 44_100
    path = tmp_path / f"a{CODECS[codec]}"
    if codec == "libopus":  # H.264 does not go into .webm
        path = path.with_suffix(".mkv")
    video_with_sound(path, click_at(2.0, seconds=4.5, rate=rate), rate=rate, codec=codec)
    with av.open(str(path)) as container:
        start = float(container.streams.video[0].start_time * container.streams.video[0].time_base)  # .ts: 1.4 s
    sound = sound_around(path, start + np.array([0.0, 1.2, 1.7, 2.0, 2.3, 4.0]))
    assert (sound.has_audio, sound.notes) == (True, ())
    loudness = sound.spectra.astype(float).sum(1)  # [T, 100]
    assert loudness[[0, 1, 5]].max() < 0.2 * loudness.max()  # more than half a second away
    # Half a second before the frame is column 0; a click on the border of two columns is in either.
    for row, column in ((2, 80), (3, 50), (4, 20)):
        assert loudness[row].argmax() in (column - 1, column)
        assert (loudness[row] > 0.5 * loudness[row].max()).sum() <= 4


def test_pitch_and_loudness_survive_the_rate(tmp_path: Path) -> None:
    for rate in (8000, 16_000, 22_050, 48_000):
        moments = np.arange(3 * rate) / rate
        path = video_with_sound(
            tmp_path / f"{rate}.mov", 0.5 * np.sin(2 * np.pi * 1000 * moments), rate=rate, codec="pcm_s16le"
        )
        sound = sound_around(path, np.array([1.5]))
        np.testing.assert_allclose(sound.spectra[0][21], log_mel(sine(1000))[21], atol=0.05)


def test_beyond_the_ends_it_is_silent(tmp_path: Path) -> None:
    path = video_with_sound(tmp_path / "a.mov", sine(1000, 2 * RATE), rate=RATE, codec="pcm_s16le")
    sound = sound_around(path, np.array([0.0, 1.0, 2.0, 9.0]))
    loud = sound.spectra[:, 21].astype(float) > 5  # [T, 100]
    assert (loud.argmax(1).tolist(), loud.sum(1).tolist()) == ([49, 0, 0, 0], [51, 100, 51, 0])


def test_a_track_that_starts_late_and_one_with_a_pause(tmp_path: Path) -> None:
    samples = sine(1000, 4 * RATE)
    late = video_with_sound(tmp_path / "a.mkv", samples, rate=RATE, codec="flac", sound_starts=1.0)
    assert [bool(spectrum.any()) for spectrum in sound_around(late, np.array([0.4, 1.6])).spectra] == [False, True]
    paused = video_with_sound(tmp_path / "b.mkv", samples, rate=RATE, codec="flac", pause=(1.0, 3.0))
    loud = sound_around(paused, np.array([0.5, 2.0, 3.4])).spectra[:, 21].astype(float) > 5
    assert loud[0].sum() >= 90
    assert loud[1].sum() == 0
    assert loud[2, 20:].all()  # what follows is not moved to the front


def test_two_channels_are_mixed(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    both = np.stack([sine(1000, 2 * RATE), np.zeros(2 * RATE)])
    with wave.open(str(path), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((both.T * 32767).astype("<i2").tobytes())
    heard = sound_around(path, np.array([1.0])).spectra[0, 21].astype(float)
    np.testing.assert_allclose(heard, log_mel(sine(1000, amplitude=0.25))[21], atol=0.05)


@pytest.mark.parametrize("suffix", [".mp4", ".ts"])
def test_a_part_of_a_long_video_is_that_of_the_whole(tmp_path: Path, suffix: str) -> None:
    """Reached by seeking, where the format can."""
    rng = np.random.default_rng(0)
    path = video_with_sound(tmp_path / f"a{suffix}", rng.normal(0, 0.1, 25 * RATE), rate=RATE, fps=2)
    late, whole = np.array([18.0, 19.2]), np.array([3.0, 18.0, 19.2])
    np.testing.assert_array_equal(sound_around(path, late).spectra, sound_around(path, whole).spectra[1:])


def test_a_seek_that_lands_too_late_is_made_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = video_with_sound(tmp_path / "a.mp4", click_at(13.0, seconds=16.0), fps=2)
    expected = sound_around(path, np.array([1.0, 13.0])).spectra[1:]
    assert expected.any()
    monkeypatch.setattr(audio, "_RUN_UP", -2.6)  # seconds: to the keyframe at 15 s
    np.testing.assert_array_equal(sound_around(path, np.array([13.0])).spectra, expected)


def test_no_track_and_no_file_of_sound(tmp_path: Path) -> None:
    from sosampler.video.synthetic import numbered_video

    numbered_video(tmp_path / "a.mp4", num_frames=10)
    sound = sound_around(tmp_path / "a.mp4", np.array([0.1, 0.2]))
    assert sound.spectra.shape == (2, 64, 100)
    assert not sound.spectra.any()
    assert (sound.has_audio, sound.notes) == (False, ("the file has no audio track",))
    (tmp_path / "images").mkdir()
    sound = sound_around(tmp_path / "images", np.array([0.1]))
    assert (sound.has_audio, sound.notes) == (False, ("a folder of images has no sound",))


def test_damaged_packets_are_silent_and_noted_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = video_with_sound(tmp_path / "a.mkv", rng.normal(0, 0.1, 6 * RATE), rate=RATE, codec="libmp3lame")
    data = path.read_bytes()
    with av.open(str(path)) as container:
        for packet in container.demux(audio=0):
            if packet.size and 2.0 < packet.pts * packet.time_base < 4.0:
                data = data.replace(bytes(packet), rng.integers(0, 256, packet.size, dtype=np.uint8).tobytes())
    (tmp_path / "b.mkv").write_bytes(data)
    sound = sound_around(tmp_path / "b.mkv", np.array([1.0, 5.0]))
    assert sound.has_audio
    assert len(sound.notes) == 1
    assert "damaged packets; what could not be decoded is silent" in sound.notes[0]
    assert (sound.spectra.astype(float).mean((1, 2)) > 10).all()


def test_floats_that_are_no_sound(tmp_path: Path) -> None:
    samples = sine(1000, 2 * RATE).astype(np.float32)
    samples[8000:8100], samples[8100:8200], samples[8200:8300] = np.nan, np.inf, -1e30
    path = video_with_sound(tmp_path / "a.mov", samples, rate=RATE, codec="pcm_f32le")
    sound = sound_around(path, np.array([0.5, 1.5]))
    assert np.isfinite(sound.spectra).all()
    assert (sound.spectra >= 0).all()


def test_only_the_windows_at_hand_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = video_with_sound(tmp_path / "a.mov", sine(1000, 20 * RATE), rate=RATE, codec="pcm_s16le", fps=2)
    held = []
    add = audio._Windows.add

    def watched(self: audio._Windows, position: int, samples: np.ndarray) -> None:
        add(self, position, samples)
        held.append(len(self._held))

    monkeypatch.setattr(audio._Windows, "add", watched)
    sound_around(path, np.arange(0, 20, 0.25), limits=Limits())
    assert max(held) <= 6  # those that overlap, four a second
