"""Downloads from the Hugging Face hub, which the core can do without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sosampler.errors import MissingDependency


def download(name: str, files: list[str], **options: Any) -> Path:
    """Return a local folder with these files (glob patterns) of an id on the hub; raises OSError or ValueError."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingDependency(
            f"{name}: no such folder, and a download needs huggingface_hub; install it with: "
            "pip install 'sosampler[hub]', or give a folder"
        ) from error
    return Path(snapshot_download(name, allow_patterns=files, **options))
