"""Lazy FSL-SAGE: alignments end with round T'."""

from dataclasses import dataclass

from fsl_sage.algorithms.fsl_sage import FSLSAGE, FSLSAGEOptions
from fsl_sage.errors import InputError


@dataclass(frozen=True)
class LazyFSLSAGEOptions(FSLSAGEOptions):
    """The options of FSL-SAGE."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.align_until is None:
            raise InputError("lazy-fsl-sage needs --align-until, the last round that aligns.")


class LazyFSLSAGE(FSLSAGE):
    """FSL-SAGE with T' < T, nothing more."""

    title = "Lazy FSL-SAGE"
    moves_like = "fsl-sage"
    colour = "#56B4E9"
    Options = LazyFSLSAGEOptions
    not_compared = ()
