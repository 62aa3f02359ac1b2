"""Files that others have written: sentences, whatever is in them, and no memory or time of the file's choice."""

from pathlib import Path

import pytest

from fsl_sage.algorithms import resolve
from fsl_sage.config import load_preset
from fsl_sage.deploy.agreement import read_agreement
from fsl_sage.errors import InputError
from fsl_sage.reading import read_toml
from fsl_sage.records.run_directory import RunDirectory

TOML = {
    "nested lists": "x = " + "[" * 50_000,
    "nested tables": "x = " + "{a=" * 50_000,
    "nested keys": ".".join(["a"] * 50_000) + " = 1",
    "nested headers": "[" + ".".join(["a"] * 50_000) + "]",
    "large": "x = 1\n" * 2_000_000,
    "a number of many digits": "rounds = " + "9" * 100_000,
    "a number beyond all floats": "[optimizer]\nlr = " + "9" * 400,
    "a whole number beyond all floats": "rounds = " + "9" * 400,
    "a long key": "a" * 3_000 + " = 1",
    "many nested keys": (".".join(["a"] * 1_900) + " = 1\n") * 16,
    "a long value": f'rounds = "{"a" * 3_000}"',
    "no text": "\udcff",
    "nul": "\x00",
    "not a number": "batch_size = nan",
    "an infinite number": "rounds = inf",
    "a date": "rounds = 2020-01-01",
    "a table for a number": "[rounds]\nx = 1",
    "a number for a table": "data = 1",
    "a list for a text": "algorithm = []",
    "quotes": 'x = """' + '"' * 100_000,
    "escapes": 'x = "' + "\\u0000" * 40_000,
}


@pytest.mark.parametrize("kind", TOML)
def test_a_preset_that_is_none_is_refused_in_a_sentence(tmp_path, kind):
    path = tmp_path / "mine.toml"
    path.write_bytes(TOML[kind].encode(errors="surrogateescape"))
    with pytest.raises(InputError) as caught:
        resolve(load_preset(path))
    assert "mine.toml" in str(caught.value)
    assert len(str(caught.value)) < 2000


JSON = {
    "nested": "[" * 100_000,
    "nested objects": '{"config":' * 100_000,
    "a number of many digits": '{"config": {"rounds": ' + "9" * 100_000 + "}}",
    "a number beyond all floats": '{"config": {"rounds": ' + "9" * 400 + "}}",
    "large": '{"config": "' + "x" * 2**24 + '"}',
    "a list": "[]",
    "a text": '"config"',
    "no text": "\udcff",
    "config is a list": '{"config": []}',
    "config is nothing": '{"config": null}',
    "strange values": '{"config": {"rounds": NaN}}',
    "strange keys": '{"config": {"' + "x" * 100_000 + '": 1}}',
    "empty": "",
}


@pytest.mark.parametrize("kind", JSON)
def test_a_configuration_that_is_none_is_refused_in_a_sentence(tmp_path, kind):
    path = tmp_path / "config.json"
    path.write_bytes(JSON[kind].encode(errors="surrogateescape"))
    for read in (lambda: resolve(RunDirectory(tmp_path).config()), lambda: read_agreement(path)):
        with pytest.raises(InputError) as caught:
            read()
        assert len(str(caught.value)) < 2000


def test_an_endless_file_is_not_read_to_its_end():
    with pytest.raises(InputError, match="too large"):
        read_toml(Path("/dev/zero"))


def test_a_preset_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "marked.toml"
    path.write_bytes(b"\xef\xbb\xbfrounds = 7\n")
    assert load_preset(path).rounds == 7
