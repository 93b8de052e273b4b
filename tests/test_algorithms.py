from tests.algorithm_tester import AlgorithmTester


class TestAlgorithms(AlgorithmTester):
    """Every line of the tester's list, through all of its tests."""
