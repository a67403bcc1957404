import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks():
    pool = RankPool(4)
    yield pool
    pool.close()
