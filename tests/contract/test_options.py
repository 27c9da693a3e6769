"""The plan's list of options is the parsers' own."""

import pytest

from tests.contract.write_options import RELEASES, file, text


@pytest.mark.parametrize("engine", RELEASES)
def test_options_are_fresh(engine: str) -> None:
    assert file(engine).read_text("utf-8") == text(engine), "run: python -m tests.contract.write_options"
