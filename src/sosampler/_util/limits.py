"""Limits on what strangers' files and extreme arguments may cost. Those of videos are in `video/limits.py`.

Each is generous: what it refuses is a mistake or an attack. Every refusal names the constant or the option.
"""

from __future__ import annotations

# ---- files that describe something: config.json, settings, recipes, metadata of a network

MAX_TEXT_BYTES = 64 << 20
"""Bytes of one such file, unpacked."""
MAX_DEPTH = 100
"""Lists and objects inside each other, in JSON and YAML."""

# ---- the page of `sosampler ui`

UPLOAD_SECONDS = 900.0
"""For one upload (`--max-upload-seconds`); it gives its place back then, however slowly it still arrives."""
STALL_SECONDS = 20.0
"""Without a byte of an upload, after which it is given up."""
