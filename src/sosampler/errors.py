"""The errors a user can meet. Each text says what was given, what is allowed and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class SosamplerError(Exception):
    """Base of all errors that are the input's fault; the command line ends with exit code 2."""


class InvalidArgument(SosamplerError, ValueError):
    """An argument is outside of what is allowed."""


class VideoError(SosamplerError, RuntimeError):
    """A video cannot be opened, or none of its frames can be decoded."""


class LimitExceeded(VideoError):
    """A video is larger than the limits that guard against hostile files."""


class ClassifierError(SosamplerError, RuntimeError):
    """A network does not give what a classifier must give."""


class WeightsError(SosamplerError, RuntimeError):
    """A weights file cannot be read, or does not fit the network."""


class MissingDependency(SosamplerError, ImportError):
    """An optional package that the call needs is not installed."""


def first_line(error: BaseException) -> str:
    """The first line of another library's message, for use inside a sentence; its type where it is empty."""
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


@contextmanager
def errors_of(video: str) -> Iterator[None]:
    """Raise every error as one of this video: a sentence with its name.

    Errors that every other video would meet too, such as a missing package or a full GPU, stay as they are.
    """
    try:
        yield
    except (VideoError, InvalidArgument) as error:
        # Arguments can be invalid for one video only, by its length or range. Then the text lacks the name.
        if video in str(error):
            raise
        raise type(error)(f"{video}: {error}") from error
    except SosamplerError:
        raise
    except MemoryError as error:
        raise InvalidArgument(
            f"{video}: the frames do not fit into memory; ask for fewer frames or candidates, a smaller size, or "
            "decode=False"
        ) from error
    except OSError as error:
        raise VideoError(f"{video}: cannot be read ({error.strerror or error}); check its permissions") from error
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which need not be installed: of a GPU
            raise
        raise VideoError(
            f"{video}: an unexpected error ({type(error).__name__}: {first_line(error)}); the file may be damaged: "
            "please report it with the file, unless the error comes from a policy of your own"
        ) from error
