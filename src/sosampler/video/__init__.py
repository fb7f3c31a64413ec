"""Open a video and read exact frames and times."""
