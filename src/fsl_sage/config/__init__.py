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
)
from fsl_sage.config.own_options import GivenOptions, all_options, defaults_of, given_options
from fsl_sage.config.plain import (
    digest,
    from_dict,
    from_file,
    load_preset,
    preset_names,
    read_preset,
    to_dict,
)
from fsl_sage.config.ranges import FROM_ZERO, ROUND, WHOLE, check_ranges, option
from fsl_sage.config.values import convert

__all__ = [
    "DEFAULTS",
    "FROM_ZERO",
    "NO_PART_OF_THE_RESULT",
    "ROUND",
    "WHOLE",
    "AlignmentConfig",
    "Config",
    "DataConfig",
    "GivenOptions",
    "LoRAConfig",
    "ModelConfig",
    "OptimizerConfig",
    "all_options",
    "check_ranges",
    "convert",
    "default_config",
    "defaults_of",
    "digest",
    "from_dict",
    "from_file",
    "given_options",
    "load_preset",
    "option",
    "preset_names",
    "read_preset",
    "to_dict",
]
