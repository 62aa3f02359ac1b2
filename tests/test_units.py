"""Sizes as people write and read them."""

import pytest

from fsl_sage.errors import InputError
from fsl_sage.units import bytes_text, gib_number, gib_text, operations_text, parse_amount


def test_bytes_and_operations_have_three_digits():
    assert [bytes_text(count) for count in (0, 999, 1000, 3_456_000, 2e12)] == [
        "0 B",
        "999 B",
        "1 kB",
        "3.46 MB",
        "2 TB",
    ]
    assert [operations_text(count) for count in (12, 19_500, 2.55e8, 3e15)] == ["12", "19.5 k", "255 M", "3 P"]


def test_gib_are_readable_where_there_is_little():
    assert gib_text(2**27) == "0.125 GiB"
    assert [gib_number(gib) for gib in (0, 1.5, 0.1, 0.0123456)] == ["0.000", "1.500", "0.100", "0.0123"]
    assert gib_number(0.5, like=0.0123) == "0.5000"


def test_amounts_that_a_person_writes():
    assert parse_amount("500MB", "--uplink") == 500e6
    assert parse_amount("2 GiB", "--uplink") == 2 * 2**30
    assert parse_amount("8e9", "--client-flops") == 8e9
    assert parse_amount("3GFLOPs", "--client-flops") == 3e9
    for text in ("much", "-1MB", "0", ""):
        with pytest.raises(InputError, match="--uplink"):
            parse_amount(text, "--uplink")
