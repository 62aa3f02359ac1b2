"""The command in a process of its own, without seconds in which Python imports torch: a fork server has it imported.

The processes are as real as any: they have ids and exit codes of their own, write to files, are sent signals and are
killed. That the command also starts from nothing is shown by tests/cli/test_startup.py and the newcomer's hour.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from fsl_sage.compare import one_run

_FORKS = multiprocessing.get_context("forkserver")
# All that a run imports; torch.optim imports torch._dynamo when the first optimizer is made.
_FORKS.set_forkserver_preload(["fsl_sage.cli.commands", "fsl_sage.records.figures", "torch._dynamo"])


def _settle(cwd: Path, env: Mapping[str, str], files: tuple[Path, Path]) -> None:
    """In the new process: have a folder, an environment and files to write to."""
    for stream, path in zip((1, 2), files, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)


def _become(
    words: list[str], cwd: Path, env: dict[str, str], files: tuple[Path, Path], prepare: Callable[[], object] | None
) -> None:
    """In the new process: be `fsl-sage WORDS`."""
    _settle(cwd, env, files)
    # What runs in the background of a shell inherits that Ctrl-C is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if prepare is not None:
        prepare()
    sys.argv = ["fsl-sage", *words]
    from fsl_sage.cli import main

    main()


class Started:
    """A command that runs. Use it in `with`, so that nothing runs on."""

    def __init__(
        self,
        *words: object,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        prepare: Callable[[], object] | None = None,
    ) -> None:
        self._words = [*map(str, words)]
        self._there = TemporaryDirectory()
        files = (Path(self._there.name, "out"), Path(self._there.name, "errors"))
        for file in files:
            file.touch()
        self._files = files
        env = {**os.environ, "COLUMNS": "100", **(env or {})}
        self._process = _FORKS.Process(target=_become, args=(self._words, cwd or Path.cwd(), env, files, prepare))
        self._process.start()

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._there.cleanup()

    def runs(self) -> bool:
        return self._process.is_alive()

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """kill -9, and wait for it."""
        self._process.kill()
        self._process.join()

    def done(self, timeout: float = 120) -> "subprocess.CompletedProcess[str]":
        """Wait for its end."""
        self._process.join(timeout)
        assert not self.runs(), f"fsl-sage {' '.join(self._words)} takes more than {timeout} s"
        out, errors = (file.read_text() for file in self._files)
        return subprocess.CompletedProcess(self._words, self._process.exitcode, out, errors)


def command(
    *words: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    prepare: Callable[[], object] | None = None,
) -> "subprocess.CompletedProcess[str]":
    """`fsl-sage WORDS`, from its start to its end."""
    with Started(*words, cwd=cwd, env=env, prepare=prepare) as started:
        return started.done()


def _become_run(directory: Path, workers: int, cwd: Path, env: dict[str, str], path: list[str]) -> None:
    """In the new process: be one run of a comparison. Its standard input does not end before it does."""
    _settle(cwd, env, (cwd / directory / one_run.LOG, cwd / directory / one_run.LOG))
    os.dup2(os.pipe()[0], 0)
    sys.path[:0] = path
    sys.argv = ["one_run", str(directory), str(workers)]
    one_run.main()


class ForkedRun:
    """The process of one run of a comparison; it stands for what `one_run.start_process` starts."""

    def __init__(self, directory: Path, workers: int, *, new_session: bool) -> None:
        (directory / one_run.LOG).touch()
        given = (directory, workers, Path.cwd(), {**os.environ}, one_run.import_path().split(os.pathsep))
        self._process = _FORKS.Process(target=_become_run, args=given)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def terminate(self) -> None:
        self._process.terminate()

    def communicate(self) -> None:
        self._process.join()
