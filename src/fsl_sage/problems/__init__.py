"""What is learnt: a problem is data, a model, a task and a headline score.

base        Problem, Task and Batch: what a problem of one's own derives from
score       the headline score
make        from a configuration to its problem
tensors     a problem of tensors in memory, with a loss and a score of one's own
classification   what all classification has in common: the loss, and scores by class
saved       directories of the package datasets
parts       the problem's model, cut
images/     sets of images and their classification
texts/      texts, the language models that learn to write them, and classifiers
"""

from fsl_sage.problems.base import Batch, Problem, Task
from fsl_sage.problems.make import make_dry_problem, make_problem
from fsl_sage.problems.score import ACCURACY, Score
from fsl_sage.problems.tensors import TensorProblem

__all__ = ["ACCURACY", "Batch", "Problem", "Score", "Task", "TensorProblem", "make_dry_problem", "make_problem"]
