import pytest

from tests.algorithm_tester import AlgorithmTester


@pytest.mark.fast
class TestAlgorithms(AlgorithmTester):
    """Every line of the tester's list, through all of its tests."""
