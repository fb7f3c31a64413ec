"""Import public data sets from their official files."""
