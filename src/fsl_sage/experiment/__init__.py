"""Experiments: runs, and what they will cost."""

from fsl_sage.experiment.costs import cost, part_sizes, run_cost
from fsl_sage.experiment.federation import Federation, draw_cohort
from fsl_sage.experiment.result import Result
from fsl_sage.experiment.runs import play, resume, run

__all__ = ["Federation", "Result", "cost", "draw_cohort", "part_sizes", "play", "resume", "run", "run_cost"]
