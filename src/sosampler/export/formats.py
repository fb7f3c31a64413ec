"""The formats that samplers are exported to. Light, so that the command line's help is fast."""

from __future__ import annotations

SUFFIXES = {"onnx": ".onnx", "torch-export": ".pt2", "openvino": ".xml"}


def default_name(format: str) -> str:
    """How an exported file is called in a sampler's folder.

    >>> default_name("torch-export")
    'model.pt2'
    """
    return f"model{SUFFIXES[format]}"
