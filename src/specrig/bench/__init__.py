"""Measuring an endpoint: what the server counted, never what the client guessed."""
