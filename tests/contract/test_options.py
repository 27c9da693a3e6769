"""The plan's list of options is the parsers' own."""

from tests.contract.write_options import FILE, text


def test_options_are_fresh() -> None:
    assert FILE.read_text("utf-8") == text(), "run: python -m tests.contract.write_options"
