"""Deployment needs Flower, which is an extra."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("flwr") and find_spec("trustme") else ["test_*.py"]
