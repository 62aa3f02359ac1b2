"""Numbers on the command line. A word that is none is refused in plain words instead of Python's."""

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

NUMBERS = ConstructorRegistry()
"""To be given to `tyro.cli`."""


@NUMBERS.primitive_rule
def _number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int | float] | None:
    """How a whole number or a number is read; None for all other types."""
    kind = info.type
    if kind is int:
        return _spec(int, (int,), "a whole number")
    return _spec(float, (int, float), "a number such as 0.5") if kind is float else None


def _spec(
    kind: type[int] | type[float], accepted: tuple[type, ...], what: str
) -> PrimitiveConstructorSpec[int | float]:
    def read(words: list[str]) -> int | float:
        try:
            return kind(words[0])
        except ValueError:
            raise ValueError(f"'{words[0]}' is not {what}") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper(),
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, accepted) and not isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    )
