"""specrig: from a bare Linux machine with NVIDIA cards to a supervised speculative-decoding endpoint."""

__version__ = "0.1.0"
