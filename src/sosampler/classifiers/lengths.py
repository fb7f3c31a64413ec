"""How many frames a network takes, and what happens to clips of another length."""

from __future__ import annotations

from dataclasses import dataclass

from sosampler.errors import InvalidArgument
from sosampler.video.candidates import segment_centres


@dataclass(frozen=True)
class ClipLength:
    """Frames a clip as the network itself takes them.

    Shorter clips are repeated evenly up to `at_least`; longer ones than `at_most` are refused, because somebody has
    to choose and that is the sampler's work. `multiple_of`: repeated evenly up to the next multiple.
    """

    at_least: int = 1
    at_most: int | None = None
    multiple_of: int = 1

    def fitted(self, num_frames: int, name: str) -> int:
        """How many frames the network is given for a clip of `num_frames`."""
        if self.at_most is not None and num_frames > self.at_most:
            raise InvalidArgument(
                f"{name} takes at most {self.at_most} frames a clip but {num_frames} were given; choose fewer frames"
            )
        if num_frames < 1:
            raise InvalidArgument(f"{name} was given {num_frames} frames; give at least 1")
        wanted = max(num_frames, self.at_least)
        return -(-wanted // self.multiple_of) * self.multiple_of

    def positions(self, num_frames: int, name: str) -> list[int] | None:
        """Which frame stands at each place of the network's clip; None where the clip is taken as it is.

        >>> ClipLength(at_least=8).positions(3, "net")
        [0, 0, 0, 1, 1, 2, 2, 2]
        """
        wanted = self.fitted(num_frames, name)
        return None if wanted == num_frames else segment_centres(num_frames, wanted).tolist()

    def note(self, name: str) -> str | None:
        """What a user should know about it."""
        if self.at_least == 1 and self.at_most is None and self.multiple_of == 1:
            return None
        if self.at_most == self.at_least:
            return f"{name} takes exactly {self.at_least} frames: fewer are repeated evenly, more are refused"
        parts = []
        if self.at_least > 1:
            parts.append(f"fewer than {self.at_least} frames are repeated evenly")
        if self.multiple_of > 1:
            parts.append(f"frames are repeated evenly up to a multiple of {self.multiple_of}")
        if self.at_most is not None:
            parts.append(f"more than {self.at_most} frames are refused")
        return f"{name}: " + ", ".join(parts)
