"""Monitors that draw pictures, for TensorBoard and as PNG files in the run folder."""

from .clusters import ClusterPlot, cluster_figure
from .convergence import ConvergencePlot, convergence_figure
from .drift import DriftPlot, drift_figure
from .embedding import EmbeddingTrajectory, embedding_figure
from .examples import ClusterExamples, examples_figure
from .weights import AggregationWeights, bars_figure, evolution_figure, heatmap_figure

__all__ = [
    "AggregationWeights",
    "ClusterExamples",
    "ClusterPlot",
    "ConvergencePlot",
    "DriftPlot",
    "EmbeddingTrajectory",
    "bars_figure",
    "cluster_figure",
    "convergence_figure",
    "drift_figure",
    "embedding_figure",
    "evolution_figure",
    "examples_figure",
    "heatmap_figure",
]
