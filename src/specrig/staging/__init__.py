"""Model locks: from a repository's name to the exact bytes that a rig will hold."""
