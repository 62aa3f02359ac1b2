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
    brings_modules,
    default_config,
)
from fsl_sage.config.own_options import GivenOptions, all_options, defaults_of, given_options
from fsl_sage.config.plain import (
    convert,
    digest,
    from_dict,
    from_file,
    load_preset,
    preset_names,
    read_preset,
    to_dict,
)
from fsl_sage.config.ranges import FROM_ZERO, ROUND, WHOLE, check_ranges, option

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
    "brings_modules",
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
