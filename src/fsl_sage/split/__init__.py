"""Cut any model, derive its auxiliary, and plan where to cut."""

from fsl_sage.split.analysis import Analysis
from fsl_sage.split.plan import BoundaryTensor, SplitError, SplitPlan
from fsl_sage.split.sides import Boundary, Part, Split
from fsl_sage.split.splitting import build_side, side_tensors, split_by_analysis, split_model

__all__ = [
    "Analysis",
    "Boundary",
    "BoundaryTensor",
    "Part",
    "Split",
    "SplitError",
    "SplitPlan",
    "build_side",
    "side_tensors",
    "split_by_analysis",
    "split_model",
]
