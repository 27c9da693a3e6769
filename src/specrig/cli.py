"""Command line: one verb per module in `specrig.verbs`."""
def main() -> int:
    """Placeholder until the verbs are in."""
    return 0
