"""Decoded candidate frames and teacher outputs on disk."""
