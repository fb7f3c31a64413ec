"""Manifests, classes, splits and importers."""
