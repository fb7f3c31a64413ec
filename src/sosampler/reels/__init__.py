"""Compose untrimmed videos from images."""
