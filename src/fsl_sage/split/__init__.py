"""Cut any model, derive its auxiliary, and plan where to cut."""

from fsl_sage.models.attention import twice_differentiable_attention
from fsl_sage.split.auxiliaries.auxiliary import AuxiliaryStates, auxiliary
from fsl_sage.split.auxiliaries.fitted_scale import FITTED_SCALE, add_fitted_scale, fitted_scale
from fsl_sage.split.auxiliaries.ridge import Ridge, random_features, rms
from fsl_sage.split.costs.cut_points import CutPoint, cut_points, cut_points_of
from fsl_sage.split.costs.profile import Step, training_step
from fsl_sage.split.errors import SplitError
from fsl_sage.split.parts.fixed import fixed_tensors, set_fixed
from fsl_sage.split.parts.gates import Boundary, detached_leaves, with_gradients
from fsl_sage.split.parts.part import Part, Split, crossing_tensors, passage
from fsl_sage.split.parts.shapes import boundary_shapes, output_shapes
from fsl_sage.split.parts.splitting import build_side, side_tensors, split_by_analysis, split_model
from fsl_sage.split.plan.analysis import Analysis
from fsl_sage.split.plan.split_plan import BoundaryTensor, SplitPlan

__all__ = [
    "FITTED_SCALE",
    "Analysis",
    "AuxiliaryStates",
    "Boundary",
    "BoundaryTensor",
    "CutPoint",
    "Part",
    "Ridge",
    "Split",
    "SplitError",
    "SplitPlan",
    "Step",
    "add_fitted_scale",
    "auxiliary",
    "boundary_shapes",
    "build_side",
    "crossing_tensors",
    "cut_points",
    "cut_points_of",
    "detached_leaves",
    "fitted_scale",
    "fixed_tensors",
    "output_shapes",
    "passage",
    "random_features",
    "rms",
    "set_fixed",
    "side_tensors",
    "split_by_analysis",
    "split_model",
    "training_step",
    "twice_differentiable_attention",
    "with_gradients",
]
