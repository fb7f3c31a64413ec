"""Choose N of T candidates."""

AUTO = "auto"  # as num_frames: the policy decides
# Of so.Auto; the tolerance was chosen on dev reels (benchmarks/accuracy/adaptive.py). Here, so that --help needs no
# NumPy.
DEFAULT_MIN, DEFAULT_MAX, DEFAULT_TOLERANCE = 1, 16, 0.005
