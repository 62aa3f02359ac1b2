"""Clients that wait for others hold their tensors in files where all of them together are too much for memory."""

import errno
import os
from pathlib import Path

import pytest
import torch

from fsl_sage.errors import TrainingError
from fsl_sage.experiment import run
from fsl_sage.records.resting import RestingPlace
from fsl_sage.roles.client import Client

LINUX = Path("/proc/self/maps")


def test_what_is_beyond_the_limit_is_in_a_file_without_a_name(tmp_path):
    place = RestingPlace(tmp_path / "clients", 100)
    assert place(60) is None
    memory = place(4096)
    assert memory.shape == (4096,)
    assert memory.dtype == torch.uint8
    assert memory.data_ptr() % 4096 == 0
    memory.fill_(7)
    assert memory.sum() == 7 * 4096
    assert not list((tmp_path / "clients").iterdir())
    if LINUX.exists():
        lines = [line for line in LINUX.read_text().splitlines() if str(tmp_path) in line]
        assert len(lines) == 1
        assert "(deleted)" in lines[0]


def test_without_a_directory_all_stays_in_memory():
    assert RestingPlace(None, 0)(10**9) is None


def test_a_full_disk_is_told_before_it_is_used(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    said = []
    for _ in range(2):
        with pytest.raises(
            TrainingError, match=r"waiting-\w+-1.* cannot be written: No space.*fsl-sage resume"
        ) as told:
            RestingPlace(tmp_path / "clients", 0)(10)
        said.append(str(told.value))
    assert not list((tmp_path / "clients").iterdir())
    assert said[0] != said[1]  # threads of an interrupted run and the one that resumes it never write one file


def test_a_run_on_a_full_disk_ends_and_blames_no_client(tiny, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TrainingError, match="cannot be written") as told:
        run(tiny(algorithm="splitfed-ss", client_memory_mib=0, on_client_failure="drop"))
    assert "client" not in str(told.value).split("cannot be written")[1].split("resume")[0]


@pytest.mark.parametrize(
    ("algorithm", "on_client_failure"), [("splitfed-ss", "stop"), ("splitfed-ss", "drop"), ("splitfed-ms", "drop")]
)
def test_every_client_that_waits_moves_once_in_a_round(tiny, monkeypatch, algorithm, on_client_failure):
    moved = []
    rest = Client.rest

    def watched(client, place):
        before = [(tensor.clone(), tensor.stride()) for tensor in _held(client)]
        addresses = {tensor.data_ptr() for tensor in _held(client)}
        rest(client, lambda size: moved.append(client.id) or place(size))
        for tensor, (value, stride) in zip(_held(client), before, strict=True):
            assert torch.equal(tensor, value)
            assert tensor.stride() == stride
            assert tensor.data_ptr() % 64 == 0
            assert tensor.data_ptr() not in addresses

    monkeypatch.setattr(Client, "rest", watched)
    config = tiny(algorithm=algorithm, client_memory_mib=0, workers=1, on_client_failure=on_client_failure)
    run(config)
    assert moved == 2 * [0, 1, 2]


def test_clients_that_are_apart_wait_for_nobody_and_stay_where_they_are(tiny, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("A client has moved."))
    run(tiny(algorithm="splitfed-ms", client_memory_mib=0, workers=1))


def _held(client):
    return [tensor for replica in client._trained() for tensor in replica.held()]
