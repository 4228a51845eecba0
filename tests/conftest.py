from __future__ import annotations

from collections.abc import Iterator

import pytest

from drawbar.storage import embedded


@pytest.fixture(scope="session")
def embedded_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[embedded.EmbeddedStore]:
    """A running store with five endpoints and whatever buckets earlier tests made: take a bucket of your own."""
    directory = tmp_path_factory.mktemp("s3")
    yield embedded.up(directory, num_endpoints=5)
    embedded.down(directory)
