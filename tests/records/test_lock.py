"""One process plays a run; what a kill leaves behind keeps nobody out."""

import multiprocessing
import os
import signal
import subprocess
import sys

import pytest

from fsl_sage.config import Config
from fsl_sage.errors import InputError
from fsl_sage.experiment import resume, run
from fsl_sage.records.lock import LockedError, held
from fsl_sage.records.run_directory import RunDirectory

HOLDER = """
import sys, time
from pathlib import Path
from fsl_sage.records.lock import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder():
    """Starts a process that holds a lock, and ends it."""
    started = []

    def start(path):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_second_is_told_who_has_it(tmp_path, holder):
    process = holder(tmp_path / ".lock")
    with pytest.raises(LockedError, match=rf"is being played by process {process.pid} on \S+ since \d+-.*stop it"):
        held(tmp_path / ".lock").__enter__()


def test_kill_9_lets_go(tmp_path, holder):
    process = holder(tmp_path / ".lock")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / ".lock").exists()
    with held(tmp_path / ".lock"):
        pass
    assert not (tmp_path / ".lock").exists()


def test_the_same_process_cannot_hold_it_twice_either(tmp_path):
    with held(tmp_path / ".lock"), pytest.raises(LockedError, match=f"process {os.getpid()}"):
        held(tmp_path / ".lock").__enter__()


def test_a_run_that_is_played_is_neither_resumed_nor_begun_nor_taken_away(tiny, holder):
    config = tiny(rounds=1)
    directory = RunDirectory.create(config)
    before = directory.config_file.read_bytes()
    process = holder(config.out / ".lock")
    for again in (lambda: resume(config.out), lambda: run(config), lambda: RunDirectory.create(config)):
        with pytest.raises(LockedError, match=f"played by process {process.pid}"):
            again()
    assert directory.config_file.read_bytes() == before
    process.kill()
    process.wait()
    assert len(resume(config.out).metrics) == 1
    assert not (config.out / ".lock").exists()


def test_a_run_that_ends_in_the_meantime_is_finished(tiny, monkeypatch):
    """It looked unfinished before the lock was free, and is finished after."""
    config = tiny(rounds=1)
    run(config)
    answers = iter([False, True])
    monkeypatch.setattr(RunDirectory, "finished", lambda self: next(answers))
    with pytest.raises(InputError, match="is finished"):
        resume(config.out)


def test_a_lock_of_another_is_not_taken_away(tmp_path):
    lock = tmp_path / ".lock"
    first = held(lock)
    first.__enter__()
    lock.unlink()  # somebody has tidied up
    with held(lock):
        first.__exit__(None, None, None)
        with pytest.raises(LockedError, match=f"process {os.getpid()}"):
            held(lock).__enter__()


def _count_alone(path, tries, inside, wrong):
    for _ in range(tries):
        try:
            with held(path):
                with inside.get_lock():
                    inside.value += 1
                    wrong.value += inside.value > 1
                with inside.get_lock():
                    inside.value -= 1
        except LockedError:
            pass


@pytest.mark.slow
def test_never_two_at_once(tmp_path):
    """The file is taken away when the lock is let go: whoever had opened it before must not take it for the lock."""
    context = multiprocessing.get_context("fork")
    inside, wrong = context.Value("i", 0), context.Value("i", 0)
    arguments = (tmp_path / ".lock", 2000, inside, wrong)
    processes = [context.Process(target=_count_alone, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert wrong.value == 0


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/run cannot be written: Not a directory"):
        RunDirectory.create(Config(out=tmp_path / "file" / "run"))
