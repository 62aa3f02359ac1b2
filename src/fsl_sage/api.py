"""The public names, each from where it lives. `fsl_sage` itself hands them on when they are first asked for."""

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
from fsl_sage.config.help import document
from fsl_sage.errors import InputError, TrainingError
from fsl_sage.experiment import Result, cost, resume, run
from fsl_sage.inference import evaluate, load_model, predict
from fsl_sage.models import MODELS
from fsl_sage.problems import Batch, Problem, Score, Task, TensorProblem, make_problem
from fsl_sage.records.trackers import StopRun, Tracker
from fsl_sage.report.write import Report, report, write_report
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
    "Report",
    "Result",
    "Score",
    "Smashed",
    "StopRun",
    "Task",
    "TensorProblem",
    "Tracker",
    "TrainingError",
    "auxiliary",
    "compare",
    "cost",
    "cut_points",
    "default_config",
    "evaluate",
    "load_model",
    "load_preset",
    "make_problem",
    "predict",
    "report",
    "resume",
    "run",
    "split_model",
    "write_report",
]

# help(fsl_sage.run) and help(fsl_sage.Config) show what `fsl-sage run --help` shows.
for _kind in (AlignmentConfig, DataConfig, LoRAConfig, ModelConfig, OptimizerConfig, Config):
    document(_kind, _kind)
document(run, Config)
