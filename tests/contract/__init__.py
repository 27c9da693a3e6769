"""Contract tests: the engines' own argument parsers and configuration checks."""
