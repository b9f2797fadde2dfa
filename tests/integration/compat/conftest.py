"""Two ranks of Horovod or BytePS, for the tests of a file."""

from collections.abc import Iterator

import pytest

from tests.support.drop_in import Run, ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Run]:
    """Yield a function that runs a script on both."""
    yield from ranks(2)
