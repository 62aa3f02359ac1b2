"""FSL-SAGE: federated split learning, exact, accounted and resumable.

>>> from fsl_sage import Config, run
>>> result = run(Config(algorithm="fsl-sage", rounds=5))
>>> print(result.best_score, result.directory)

run, resume        train, and resume an interrupted run
compare, cost      many runs side by side; what a round moves, without training
write_report       tables, figures and a page from the directories of finished runs
Config and others  what a run is told; the same names as on the command line
TensorProblem      what is learnt: tensors, a model, a loss and a score of your own
Problem, Task      the same for what is not a pair of tensors: derive from them
Algorithm          derive from it to write an algorithm
Tracker            derive from it to be told of a run's progress: run(config, callbacks=[mine])
split_model        cut any model in two; auxiliary and cut_points belong to it
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsl_sage.api import *  # noqa: F403

__version__ = "0.1.0"

__all__ = [  # noqa: F405
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


def __getattr__(name: str) -> Any:
    """A public name, from `fsl_sage.api`. That loads torch, which `fsl-sage --help` has no need of."""
    if name not in __all__:
        raise AttributeError(f"module 'fsl_sage' has no attribute '{name}'")
    from fsl_sage import api

    globals().update({each: getattr(api, each) for each in __all__})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `fsl_sage.compare` and `fsl_sage.report` the functions when Python imports the packages of these names."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
