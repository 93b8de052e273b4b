"""Transforms: what becomes of a client's update before it travels."""

from .base import Draw, Transform
from .clip import Clip
from .pipeline import Pipeline
from .top_k import TopK

__all__ = ["Clip", "Draw", "Pipeline", "TopK", "Transform"]
