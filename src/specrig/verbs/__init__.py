"""One verb of the command line per module."""
