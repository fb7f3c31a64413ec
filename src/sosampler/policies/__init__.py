"""Choose N of T candidates."""
