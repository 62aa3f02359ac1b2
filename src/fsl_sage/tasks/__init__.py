"""Tasks: what a batch, a loss and a metric are."""

from fsl_sage.tasks.base import Batch, Task
from fsl_sage.tasks.classification import Classification

__all__ = ["Batch", "Classification", "Task"]
