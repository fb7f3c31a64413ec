"""The errors a user can meet. Each text says what was given, what is allowed and what to do."""

from __future__ import annotations


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
