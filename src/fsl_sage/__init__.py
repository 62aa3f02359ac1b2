"""FSL-SAGE: federated split learning, exact, accounted and resumable.

>>> from fsl_sage import Config, run
>>> result = run(Config(algorithm="fsl-sage", rounds=5))
>>> print(result.best_score, result.directory)

run, resume        train, and go on with an interrupted run
compare, cost      many runs side by side; what a round moves, without training
write_report       tables, figures and a page from the directories of finished runs
Config and others  what a run is told; the same names as on the command line
TensorProblem      what is learnt: tensors, a model, a loss and a score of your own
Problem, Task      the same for what is not a pair of tensors: derive from them
Algorithm          derive from it to write an algorithm
Tracker            derive from it to be told of a run's progress: run(config, callbacks=[mine])
split_model        cut any model in two; auxiliary and cut_points belong to it
"""

from fsl_sage.algorithms import ALGORITHMS, Algorithm
from fsl_sage.compare import Comparison, compare
from fsl_sage.config import (
    AlignmentConfig,
    Config,
    DataConfig,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    default_config,
    load_preset,
)
from fsl_sage.errors import InputError, TrainingError
from fsl_sage.experiment import Result, cost, resume, run
from fsl_sage.models import MODELS
from fsl_sage.problems import Batch, Problem, Score, Task, TensorProblem, make_problem
from fsl_sage.records.trackers import Tracker
from fsl_sage.report.write import write_report
from fsl_sage.split import auxiliary, cut_points, split_model
from fsl_sage.wire.message import CutGradients, Message, Smashed

__all__ = [
    "ALGORITHMS",
    "MODELS",
    "Algorithm",
    "AlignmentConfig",
    "Batch",
    "Comparison",
    "Config",
    "CutGradients",
    "DataConfig",
    "InputError",
    "LoRAConfig",
    "Message",
    "ModelConfig",
    "OptimizerConfig",
    "Problem",
    "Result",
    "Score",
    "Smashed",
    "Task",
    "TensorProblem",
    "Tracker",
    "TrainingError",
    "auxiliary",
    "compare",
    "cost",
    "cut_points",
    "default_config",
    "load_preset",
    "make_problem",
    "resume",
    "run",
    "split_model",
    "write_report",
]
