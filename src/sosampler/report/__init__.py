"""Pictures and files for people to look at."""
