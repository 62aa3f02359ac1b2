"""What can go wrong, in sentences for a person: what was given, what is accepted, what to do."""


class InputError(ValueError):
    """An option, a file or a directory that cannot be used. The command line exits with 2."""


class TrainingError(RuntimeError):
    """A training that started and failed, by a NaN loss for instance. The command line exits with 1."""


class MissingExtra(InputError):  # noqa: N818
    """A part of the package that needs an extra which is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs the extra '{extra}': pip install 'fsl-sage[{extra}]'")


class RunWarning(UserWarning):
    """What a person should know of a run that goes on or has ended all the same."""
