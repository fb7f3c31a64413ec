"""From a file to chosen frames and labels."""
