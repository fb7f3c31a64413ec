"""A local web page."""
