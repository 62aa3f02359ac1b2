"""Clients' states in files: versions, what a checkpoint names, and kills between any two writes."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.test_experiment import ALGORITHMS, assert_same_run, interrupt_after

from fsl_sage.errors import InputError, TrainingError
from fsl_sage.experiment import resume, run
from fsl_sage.records import client_store
from fsl_sage.records import files as files_of_tensors
from fsl_sage.records.client_store import ClientStore
from fsl_sage.records.run_directory import RunDirectory


def state(number, **more):
    return {
        "optimizer/client/w/exp_avg": torch.full((100,), float(number)),
        "optimizer/client/w/step": torch.tensor(1.0),
        **more,
    }


@pytest.fixture
def store(tmp_path):
    """A store that keeps nothing in memory."""
    made = ClientStore(0)
    made.keep_in(tmp_path / "clients")
    yield made
    made.close()


def reopened(store):
    """What another process makes of the files, with the names of a checkpoint."""

    def load(named):
        other = ClientStore(0)
        other.keep_in(store._directory)
        other.load({}, named)
        return other

    return load


def numbers(store):
    return {client: int(store[client]["optimizer/client/w/exp_avg"][0]) for client in store}


def files(store):
    return sorted(path.name for path in store._directory.iterdir())


def test_states_stay_in_memory_up_to_the_limit(tmp_path):
    store = ClientStore(1000)
    store.keep_in(tmp_path / "clients")
    first, second = state(1), state(2)
    store.put(0, first)
    store.put(1, second)
    assert store[1] is second
    assert not store.seal()
    assert not (tmp_path / "clients").exists()
    store.put(2, state(3))  # 3 x 404 bytes
    assert list(store.in_memory()) == [0, 1]
    assert list(store.seal()) == ["0", "1", "2"]
    assert not store.in_memory()
    assert numbers(store) == {0: 1, 1: 2, 2: 3}
    store.close()


def test_a_state_that_is_renewed_counts_once(tmp_path):
    store = ClientStore(1000)
    store.keep_in(tmp_path / "clients")
    for number in range(5):
        store.put(0, state(number))
    assert list(store.in_memory()) == [0]


def test_a_change_of_a_state_is_not_one_of_its_file(store):
    store.put(0, state(1))
    taken = store[0]
    taken["optimizer/client/w/exp_avg"].fill_(7)
    assert numbers(store) == {0: 1}
    store.put(0, taken)
    assert numbers(store) == {0: 7}


def test_what_the_checkpoint_names_outlives_newer_versions(store):
    """A file that is overwritten in place, or goes too early, is missed by the run that is resumed."""
    store.put(0, state(1))
    store.put(1, state(1))
    named = store.seal()
    store.settle()
    for number in (2, 3):  # two rounds without a checkpoint
        store.put(0, state(number))
    assert len(files(store)) == 3  # two of client 0, not three
    store.seal()  # killed before the next checkpoint is in its place
    (store._directory / "0-17.part").write_bytes(b"half a file")
    again = reopened(store)(named)
    assert numbers(again) == {0: 1, 1: 1}
    assert files(store) == sorted(name for names in named.values() for name in names)


def test_older_versions_go_when_the_checkpoint_is_in_its_place(store):
    for number in (1, 2):
        store.put(0, state(number))
        named = store.seal()
        store.settle()
        assert files(store) == named["0"]
    assert numbers(reopened(store)(named)) == {0: 2}


def test_a_state_that_has_not_changed_keeps_its_file(store):
    store.put(0, state(1))
    named = store.seal()
    store.settle()
    store.put(0, state(1))
    assert store.seal() == named
    store.settle()
    assert files(store) == named["0"]


def test_what_clients_share_is_written_once(store):
    auxiliary = {"w": torch.randn(10000)}
    store.share([auxiliary, auxiliary])
    for client in range(3):
        store.put(client, state(client, **{"own/auxiliary/w": auxiliary["w"]}))
    named = store.seal()
    assert len(files(store)) == 4
    again = reopened(store)(named)
    assert all(torch.equal(again[client]["own/auxiliary/w"], auxiliary["w"]) for client in again)
    again.put(1, again[1])  # after a round that has left it alone
    assert again.seal() == named
    again.put(2, state(2, **{"own/auxiliary/w": torch.zeros(10000)}))
    again.seal()
    again.settle()
    assert len(files(store)) == 4
    assert not again[2]["own/auxiliary/w"].any()
    again.close()


def test_what_is_trained_is_not_taken_for_what_was_shared(store):
    """Other tensors may get the identities of those that are gone."""
    store.share([{"w": torch.ones(10)}] * 2)  # gone at once
    for number in range(20):
        store.put(number, state(0, **{"own/auxiliary/w": torch.full((10,), float(number))}))
    assert [int(store[number]["own/auxiliary/w"][0]) for number in range(20)] == list(range(20))


def with_shared(number, auxiliary):
    return state(number, **{"own/auxiliary/w": auxiliary["w"]})


def test_a_shared_version_goes_with_the_last_client_that_has_it(store):
    """Round after round without a checkpoint, each with a new auxiliary for all."""
    versions = [{"w": torch.full((10,), float(number))} for number in range(4)]
    for number, auxiliary in enumerate(versions):
        store.share([auxiliary, auxiliary, auxiliary])
        for client in range(3 if number == 0 else 2):  # client 2 is away from then on
            store.put(client, with_shared(number, auxiliary))
        shared = [name for name in files(store) if name.startswith("shared")]
        assert len(shared) == min(number + 1, 2)
        assert len(files(store)) == 3 + len(shared)
    assert [int(store[client]["own/auxiliary/w"][0]) for client in range(3)] == [3, 3, 0]
    store.share([versions[1], versions[1]])  # its tensors are still there, its file is not
    for client in range(2):
        store.put(client, with_shared(9, versions[1]))
    again = reopened(store)(store.seal())
    assert [int(again[client]["own/auxiliary/w"][0]) for client in range(3)] == [1, 1, 0]


def test_a_shared_version_that_a_checkpoint_names_outlives_newer_ones(store):
    first = {"w": torch.zeros(10)}
    store.share([first, first])
    for client in range(2):
        store.put(client, with_shared(0, first))
    named = store.seal()
    store.settle()
    mapped = store[0]
    for number in (1, 2, 3):
        newer = {"w": torch.full((10,), float(number))}
        store.share([newer, newer])
        for client in range(2):
            store.put(client, with_shared(number, newer))
        assert len([name for name in files(store) if name.startswith("shared")]) == 2
    assert not mapped["own/auxiliary/w"].any()
    again = reopened(store)(named)
    assert not again[1]["own/auxiliary/w"].any()


def test_threads_that_share_a_version_never_lose_it(store):
    """Each client takes version after version, at its own pace; what it has last can be read."""
    versions = [{"w": torch.full((10,), float(number))} for number in range(30)]
    for auxiliary in versions:
        store.share([auxiliary] * 4)

    def play(client):
        for number, auxiliary in enumerate(versions):
            store.put(client, with_shared(number, auxiliary))
            assert int(store[client]["own/auxiliary/w"][0]) == number

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(play, range(4)))
    assert len(files(store)) == 5
    assert all(int(store[client]["own/auxiliary/w"][0]) == 29 for client in range(4))


def test_drafts_of_two_processes_have_different_names(store, tmp_path):
    """Threads of an interrupted run may write one while the resumed run does."""
    other = ClientStore(0)
    other.keep_in(tmp_path / "clients")
    for each in (store, other):
        each.put(0, state(1))
    assert len(files(store)) == 2
    other.close()


# Damage


@pytest.fixture
def sealed(store):
    for client in (0, 1):
        store.put(client, state(client))
    return store.seal()


def test_a_lost_file_is_refused(store, sealed):
    path = store._directory / sealed["1"][0]
    path.unlink()
    with pytest.raises(InputError, match=rf"{path} is gone, a part of the state of client 1: put it back, or start"):
        reopened(store)(sealed)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_file_is_refused(store, sealed, damage):
    path = store._directory / sealed["1"][0]
    whole = bytearray(path.read_bytes())
    whole[-50] ^= 16
    path.write_bytes({"flip": whole, "cut": whole[:-7], "empty": b""}[damage])
    with pytest.raises(InputError, match=rf"{path} (is damaged|cannot be read)"):
        reopened(store)(sealed)


def test_a_file_with_the_content_of_another_version_is_refused(store, sealed):
    one, other = (store._directory / sealed[client][0] for client in ("0", "1"))
    one.write_bytes(other.read_bytes())
    with pytest.raises(InputError, match=rf"{one} is another version than the checkpoint's: put the original back"):
        reopened(store)(sealed)


@pytest.mark.parametrize(
    "named",
    [{"0": ["../../etc/passwd"]}, {"0": ["0-" + "a" * 64 + ".safetensors/../x"]}, {"x": []}, {"0": 5}, [1], "clients"],
)
def test_a_checkpoint_that_names_anything_else_is_refused(store, named):
    with pytest.raises(InputError, match="The checkpoint"):
        reopened(store)(named)


# Runs


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "scaffold"])
def test_where_states_are_changes_no_bit(tiny, finished, algorithm):
    sgd = {"optimizer": {"name": "sgd", "momentum": 0.0}} if algorithm == "scaffold" else {}
    changes = {"rounds": 5, "cohort": 0.67, "align_every": 2, "algorithm": algorithm, **sgd}
    config = tiny(**changes, client_memory_mib=0, keep_checkpoint=True)
    run(config)
    assert_same_run(finished(**changes), config.out)
    assert any((config.out / "clients").iterdir())


def test_files_go_with_the_checkpoint(tiny):
    assert not RunDirectory(run(tiny(rounds=1, client_memory_mib=0)).directory).clients.exists()


MOMENTS = {
    "a version is written": (client_store, "save_draft", 7),
    "a version is sealed": (client_store, "seal_draft", 6),
    "between a version and the next": (ClientStore, "put", 6),
    "all versions are written": (ClientStore, "seal", 3),
    "the checkpoint is written": (RunDirectory, "save_checkpoint", 3),
    "older versions go": (ClientStore, "settle", 3),
    "a file of them goes": (ClientStore, "_tidy", 3),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("algorithm", ["fsl-sage", "cse-fsl"])
def test_resume_is_exact_after_a_kill_at_any_moment(tiny, finished, monkeypatch, moment, algorithm):
    changes = {"rounds": 4, "cohort": 0.67, "align_every": 2, "algorithm": algorithm}
    config = tiny(**changes, client_memory_mib=0)
    with monkeypatch.context() as patched:
        kill_at(patched, *MOMENTS[moment])
        with pytest.raises(KeyboardInterrupt):
            run(config)
    resume(config.out)
    assert_same_run(finished(**changes), config.out)


def kill_at(monkeypatch, owner, name, number):
    """The n-th call of a function is the last thing that happens."""
    calls = []
    function = getattr(owner, name)

    def killed(*arguments):
        calls.append(name)
        if len(calls) == number:
            raise KeyboardInterrupt
        return function(*arguments)

    monkeypatch.setattr(owner, name, killed)


@pytest.mark.slow
def test_a_run_is_resumed_with_another_limit(tiny, finished, monkeypatch):
    """From memory into files, and from files, where they stay."""
    changes = {"rounds": 4, "cohort": 0.67, "algorithm": "cse-fsl"}
    for before, after in ((1024, 0), (0, 1024)):
        config = tiny(**changes, client_memory_mib=before)
        with monkeypatch.context() as patched:
            interrupt_after(patched, 2)
            with pytest.raises(KeyboardInterrupt):
                run(config)
        resume(config.out, client_memory_mib=after)
        assert_same_run(finished(**changes), config.out)


@pytest.mark.slow
def test_a_full_disk_keeps_the_last_checkpoint(tiny, finished, monkeypatch):
    whole, config = finished(rounds=3), tiny(rounds=3, client_memory_mib=0)
    write, times = client_store.save_draft, []

    def full(*arguments):
        times.append(1)
        if len(times) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(config.out / "clients" / "1-2.part"))
        return write(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(client_store, "save_draft", full)
        with pytest.raises(TrainingError, match=rf"part cannot be written: No space .* 'fsl-sage resume {config.out}'"):
            run(config)
    resume(config.out)
    assert_same_run(whole, config.out)


def test_a_checkpoint_that_nobody_could_read_leaves_the_one_before(tiny, finished, monkeypatch):
    """The remedy that the sentence names is one: with states in files the run goes on."""
    changes = {"clients": 6, "rounds": 3, "algorithm": "cse-fsl"}
    whole, config = finished(**changes), tiny(**changes)
    monkeypatch.setattr(files_of_tensors, "_LONGEST_HEADER", 12_000)
    with pytest.raises(TrainingError, match=r"checkpoint cannot be written.* --client-memory-mib 0' puts these"):
        run(config)
    resume(config.out, client_memory_mib=0)
    assert_same_run(whole, config.out)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
def test_versions_are_on_the_disk_before_the_checkpoint_is(tiny, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    config = tiny(rounds=1, client_memory_mib=0, keep_checkpoint=True)
    run(config)
    names = [os.path.relpath(path, config.out) for path in synced]
    before = names[: names.index("checkpoint.safetensors.part")]
    assert {f"clients/{path.name}" for path in (config.out / "clients").iterdir()} | {"clients"} <= set(before)


def test_damage_to_a_runs_files_is_refused_in_a_sentence(tiny, monkeypatch):
    config = tiny(rounds=3, client_memory_mib=0)
    interrupt_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.undo()
    path = min((config.out / "clients").iterdir())
    path.rename(config.out / "elsewhere")
    with pytest.raises(InputError, match=rf"{path} is gone"):
        resume(config.out)
    (config.out / "elsewhere").rename(path)
    resume(config.out)
