"""The configuration of a run."""

from fsl_sage.config.fields import (
    DEFAULTS,
    NO_PART_OF_THE_RESULT,
    AlignmentConfig,
    Config,
    DataConfig,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    default_config,
    option,
)
from fsl_sage.config.plain import digest, from_dict, load_preset, preset_names, read_preset, to_dict

__all__ = [
    "DEFAULTS",
    "NO_PART_OF_THE_RESULT",
    "AlignmentConfig",
    "Config",
    "DataConfig",
    "LoRAConfig",
    "ModelConfig",
    "OptimizerConfig",
    "default_config",
    "digest",
    "from_dict",
    "load_preset",
    "option",
    "preset_names",
    "read_preset",
    "to_dict",
]
