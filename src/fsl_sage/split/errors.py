"""The refusal of a split."""

from fsl_sage.errors import InputError


class SplitError(InputError):
    """The model cannot be split as asked; the message says what stands in the way."""
