"""Comparisons: grids of runs.

grid        what is combined, and the runs that come of it
dry         whether they are possible and what they cost, without training
scheduler   runs them, several at a time
placement   where: processes of this machine, or on_ray, the machines of a cluster
one_run     the process of one of them
comparison  the public function
"""

from fsl_sage.compare.comparison import Comparison, compare

__all__ = ["Comparison", "compare"]
