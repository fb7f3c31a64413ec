"""A data set becomes a manifest: which videos, which classes, which split."""

from sosampler.data.manifest import Item, Manifest, read_manifest
from sosampler.data.splits import SPLITS, make_splits

__all__ = ["SPLITS", "Item", "Manifest", "make_splits", "read_manifest"]
