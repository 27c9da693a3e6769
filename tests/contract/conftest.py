"""The engines' parsers are there before the first test, or no test runs."""

import pytest

from tests.contract import parsers


@pytest.fixture(scope="session", autouse=True)
def engines() -> None:
    """Fetched and installed once; a failure here is every test's failure, at once."""
    parsers.fetch()
    parsers.environment()
