"""Tasks: what a batch, a loss and a metric are."""

from fsl_sage.tasks.base import Batch, Task
from fsl_sage.tasks.classification import Classification
from fsl_sage.tasks.language_modelling import LanguageModelling

__all__ = ["Batch", "Classification", "LanguageModelling", "Task"]
