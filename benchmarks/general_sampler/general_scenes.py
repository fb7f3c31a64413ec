"""Scenes of videos by PySceneDetect, for a Python that has it: `python general_scenes.py DETECTOR VIDEO ...`.

Prints {path: [[first frame, frame after the last], ...]}. DETECTOR is content or adaptive, with its own defaults.
"""

from __future__ import annotations

import json
import sys

from scenedetect import AdaptiveDetector, ContentDetector, detect


def scenes(path: str, kind: str) -> list[list[int]]:
    detector = ContentDetector() if kind == "content" else AdaptiveDetector()
    found = detect(path, detector)
    return [[begin.frame_num, end.frame_num] for begin, end in found]


if __name__ == "__main__":
    print(json.dumps({path: scenes(path, sys.argv[1]) for path in sys.argv[2:]}))
