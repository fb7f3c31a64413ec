"""Measure speed on your own machine."""
