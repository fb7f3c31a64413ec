"""HTML reports of runs."""
