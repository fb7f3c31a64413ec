"""What a run over many videos has cost so far: an estimate of the rest, and counters in a file for Prometheus."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

from sosampler._util.files import check_replaceable, starts_with, write_text
from sosampler.errors import InvalidArgument
from sosampler.inference.rows import Row

# An estimate is worth a line for so many videos, and so many of them are a sample.
MANY, SAMPLE = 100, 8
_SECONDS_BETWEEN_WRITES = 10.0
_HEADER = "# HELP sosampler_"
# Name -> kind and help. Labels follow the name of the counter in `lines`.
_METRICS = {
    "videos_planned": ("gauge", "Videos of this run, those that an earlier run had done included."),
    "videos_total": ("counter", "Videos that this run has done, by result."),
    "frames_chosen_total": ("counter", "Frames that were chosen."),
    "video_seconds_total": ("counter", "Seconds spent on videos that succeeded, summed over all workers."),
    "bytes_read_total": ("counter", "Bytes read from addresses, of videos that succeeded."),
    "requests_total": ("counter", "Requests to addresses, of videos that succeeded."),
    "run_seconds": ("gauge", "Seconds since the run began."),
    "run_finished": ("gauge", "1 when the run has ended, else 0."),
    "updated_timestamp_seconds": ("gauge", "When this file was written."),
}


class RunCounters:
    """Counts the rows of a run. `path`: a file for Prometheus' textfile collector, written anew every ten seconds."""

    def __init__(self, num_videos: int, path: Path | None = None) -> None:
        self._num_videos, self._path = num_videos, path
        self._began = self._written = time.monotonic()
        self.done = self.failed = self.frames = self.bytes_read = self.requests = 0
        self.seconds = 0.0
        self._is_estimated = False
        if path is not None:
            check_replaceable(path, "metrics", starts_with(_HEADER))
            self.write()

    def add(self, row: Row) -> None:
        """Count the row of a video, or its failure."""
        if "error" in row:
            self.failed += 1
        else:
            selection = row.get("selection", row)
            transfer = selection.get("transfer") or {}
            self.done += 1
            self.frames += selection["num_frames"]
            self.seconds += row["timing"]["total"]
            self.bytes_read += transfer.get("bytes_read", 0)
            self.requests += transfer.get("requests", 0)
        if self._path is not None and time.monotonic() - self._written >= _SECONDS_BETWEEN_WRITES:
            self.write()

    def estimate(self, num_videos: int) -> str | None:
        """Return what a run over so many videos will cost: once, when the sample is done, where they are many."""
        if num_videos < MANY or self.done < SAMPLE or self._is_estimated:
            return None
        self._is_estimated = True
        each = (time.monotonic() - self._began) / (self.done + self.failed)
        whole = timedelta(seconds=round(each * num_videos))
        text = f"estimate for {num_videos} videos, from the first {self.done + self.failed}: {each:.2g} s each, {whole}"
        if self.bytes_read:
            size = self.bytes_read / self.done
            text += f"; {size / 1e6:.2g} MB read of each, {size * num_videos / 1e9:.2g} GB"
        return text

    def lines(self, *, finished: bool = False) -> list[str]:
        """Return the counters in Prometheus' text format."""
        values: dict[str, dict[str, float]] = {
            "videos_planned": {"": self._num_videos},
            "videos_total": {'{result="done"}': self.done, '{result="failed"}': self.failed},
            "frames_chosen_total": {"": self.frames},
            "video_seconds_total": {"": round(self.seconds, 3)},
            "bytes_read_total": {"": self.bytes_read},
            "requests_total": {"": self.requests},
            "run_seconds": {"": round(time.monotonic() - self._began, 3)},
            "run_finished": {"": int(finished)},
            "updated_timestamp_seconds": {"": int(time.time())},
        }
        lines = []
        for name, (kind, text) in _METRICS.items():
            lines += [f"{_HEADER}{name} {text}\n", f"# TYPE sosampler_{name} {kind}\n"]
            lines += [f"sosampler_{name}{labels} {value}\n" for labels, value in values[name].items()]
        return lines

    def write(self, *, finished: bool = False) -> None:
        """Replace the file, where there is one."""
        if self._path is None:
            return
        self._written = time.monotonic()
        try:
            write_text(self._path, self.lines(finished=finished))
        except OSError as error:
            raise InvalidArgument(
                f"--metrics {self._path}: cannot be written ({error.strerror}); give a file in a folder that exists"
            ) from error
