import json

import pytest
import safetensors.torch
import torch

from fsl_sage.errors import InputError, TrainingError
from fsl_sage.records import files
from fsl_sage.records.files import load_tensors, save_tensors, write_json


def test_tensors_and_values_come_back(tmp_path):
    shared = torch.randn(3, 4)
    tensors = {
        "a": shared,
        "b": shared,  # the same tensor under another name
        "view": shared[1:],
        "transposed": shared.t(),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "half": torch.ones(2, dtype=torch.bfloat16),
    }
    path = tmp_path / "x.safetensors"
    save_tensors(path, tensors, {"round": 3})
    loaded, values = load_tensors(path)
    assert values == {"round": 3}
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert not list(tmp_path.glob("*.part"))


def test_a_file_that_nobody_could_read_is_not_written(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"a": torch.ones(3)})
    many = {f"a{number}": torch.full((1,), float(number)) for number in range(100)}
    monkeypatch.setattr(files, "_LONGEST_HEADER", 5000)
    with pytest.raises(TrainingError, match=r"shapes of 100 tensors take [\d,]+ bytes .* reads 5,000 at most"):
        save_tensors(path, many)
    assert list(load_tensors(path)[0]) == ["a"]
    assert not list(tmp_path.glob("*.part"))


def test_what_is_shared_is_written_once(tmp_path):
    tensor = torch.zeros(1000)
    save_tensors(tmp_path / "one", {"a": tensor})
    save_tensors(tmp_path / "ten", {str(i): tensor for i in range(10)})
    assert (tmp_path / "ten").stat().st_size < (tmp_path / "one").stat().st_size + 1000


def test_a_torn_or_missing_file_is_an_input_error(tmp_path):
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"a": torch.zeros(100)})
    path.write_bytes(path.read_bytes()[:-7])
    for bad in (path, tmp_path / "none"):
        with pytest.raises(InputError, match=r"cannot be read|is damaged"):
            load_tensors(bad)


def test_a_write_replaces_the_whole_file(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": "long" * 100})
    write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}


def test_the_same_content_is_the_same_bytes_in_every_process(tmp_path):
    """safetensors writes its metadata in an order that changes from call to call."""
    tensors = {"b": torch.arange(3.0), "a": torch.arange(2)}
    for number in range(20):
        save_tensors(tmp_path / str(number), tensors, {"round": 3})
    assert len({(tmp_path / str(number)).read_bytes() for number in range(20)}) == 1


def test_a_flipped_bit_is_found_in_every_byte(tmp_path):
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"a": torch.arange(5.0), "b": torch.arange(3)}, {"rounds": 3})
    whole = path.read_bytes()
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(InputError, match="damaged"):
            load_tensors(path, sealed=True)


def test_a_file_without_a_checksum_is_refused_where_one_is_needed(tmp_path):
    path = tmp_path / "old.safetensors"
    path.write_bytes(safetensors.torch.save({"a": torch.zeros(2)}, {"values": "null", "same": "{}"}))
    assert load_tensors(path)[0].keys() == {"a"}
    with pytest.raises(InputError, match=r"old.safetensors has no checksum: .* start a new run"):
        load_tensors(path, sealed=True)


@pytest.mark.parametrize("metadata", [{"same": '{"x": "y"}'}, {"same": "[]"}, {"values": "[" * 10_000}])
def test_metadata_that_nobody_here_wrote_is_an_input_error(tmp_path, metadata):
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors.torch.save({"a": torch.zeros(2)}, metadata))
    with pytest.raises(InputError, match="cannot be read"):
        load_tensors(path)


def test_tensors_are_aligned_as_torch_aligns_its_own(tmp_path):
    """Products of factors that begin elsewhere may have other last bits, so a resumed run would have."""
    draw = torch.Generator().manual_seed(0)
    tensors = {"step": torch.tensor(3.0), "odd": torch.randn(5, 3, generator=draw)}
    tensors |= {f"{n}": torch.randn(8, 2**n, generator=draw) for n in range(9)}
    save_tensors(tmp_path / "ours", tensors)
    safetensors.torch.save_file({"a": torch.zeros(1), **tensors}, tmp_path / "theirs")
    for file in ("ours", "theirs"):
        loaded, _ = load_tensors(tmp_path / file)
        assert {name: each.data_ptr() % 64 for name, each in loaded.items() if each.data_ptr() % 64} == {}
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
