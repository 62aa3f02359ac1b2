"""The refusal of a split."""

from fsl_sage.errors import InputError


class SplitError(InputError):
    """The model cannot be split as asked; the message says what stands in the way."""


def without_tensor(output: object) -> InputError:
    """The refusal of a model that no loss can train, by what it gives."""
    return InputError(
        f"The model gives a {type(output).__name__} for a batch, in which there is no tensor with a gradient: let it "
        "return a tensor of numbers, or a tuple or dict of tensors."
    )
