"""What is learnt: a problem is data, a model, a task and a headline score.

base        Problem, Task and Batch: what a problem of one's own derives from
score       the headline score
make        from a configuration to its problem
parts       the problem's model, cut
images/     sets of images and their classification
texts/      texts and the language models that learn to write them
"""

from fsl_sage.problems.base import Batch, Problem, Task
from fsl_sage.problems.make import make_dry_problem, make_problem
from fsl_sage.problems.score import ACCURACY, Score

__all__ = ["ACCURACY", "Batch", "Problem", "Score", "Task", "make_dry_problem", "make_problem"]
