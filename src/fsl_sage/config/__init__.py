"""The configuration of a run."""

from fsl_sage.config.codec import CodecConfig, CodecSpec
from fsl_sage.config.fields import (
    DEFAULTS,
    NO_PART_OF_THE_RESULT,
    AlignmentConfig,
    AveragingConfig,
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
    RESPELLED,
    digest,
    flatten,
    from_dict,
    from_file,
    load_preset,
    preset_names,
    read_preset,
    respelled,
    to_dict,
)
from fsl_sage.config.ranges import FROM_ZERO, RATE, ROUND, WHOLE, check_ranges, option
from fsl_sage.config.values import convert

__all__ = [
    "DEFAULTS",
    "FROM_ZERO",
    "NO_PART_OF_THE_RESULT",
    "RATE",
    "RESPELLED",
    "ROUND",
    "WHOLE",
    "AlignmentConfig",
    "AveragingConfig",
    "CodecConfig",
    "CodecSpec",
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
    "flatten",
    "from_dict",
    "from_file",
    "given_options",
    "load_preset",
    "option",
    "preset_names",
    "read_preset",
    "respelled",
    "to_dict",
]
