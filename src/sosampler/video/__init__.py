"""A file becomes candidate frames."""

from sosampler.video.limits import Limits
from sosampler.video.metadata import VideoMetadata
from sosampler.video.reader import FrameBatch, VideoReader
from sosampler.video.source import open_video
from sosampler.video.timeline import Timeline

__all__ = ["FrameBatch", "Limits", "Timeline", "VideoMetadata", "VideoReader", "open_video"]
