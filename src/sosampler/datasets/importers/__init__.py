"""Read the official files of public data sets."""
