"""The command line: parse, call the function of the same name, print."""
