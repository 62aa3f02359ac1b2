"""Cut any model, derive its auxiliary, and plan where to cut."""

from fsl_sage.models.attention import twice_differentiable_attention
from fsl_sage.split.analysis import Analysis
from fsl_sage.split.auxiliary import AuxiliaryStates, auxiliary
from fsl_sage.split.cuts import CutPoint, cut_points, cut_points_of
from fsl_sage.split.gates import Boundary
from fsl_sage.split.plan import BoundaryTensor, SplitError, SplitPlan
from fsl_sage.split.shapes import boundary_shapes
from fsl_sage.split.sides import Part, Split
from fsl_sage.split.splitting import build_side, side_tensors, split_by_analysis, split_model

__all__ = [
    "Analysis",
    "AuxiliaryStates",
    "Boundary",
    "BoundaryTensor",
    "CutPoint",
    "Part",
    "Split",
    "SplitError",
    "SplitPlan",
    "auxiliary",
    "boundary_shapes",
    "build_side",
    "cut_points",
    "cut_points_of",
    "side_tensors",
    "split_by_analysis",
    "split_model",
    "twice_differentiable_attention",
]
