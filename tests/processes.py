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

_FORKS = multiprocessing.get_context("forkserver")
# All that a run imports; torch.optim imports torch._dynamo when the first optimizer is made.
_FORKS.set_forkserver_preload(["fsl_sage.cli.commands", "fsl_sage.records.figures", "torch._dynamo"])


def _become(
    words: list[str], cwd: Path, env: dict[str, str], files: tuple[Path, Path], prepare: Callable[[], object] | None
) -> None:
    """In the new process: be `fsl-sage WORDS`."""
    for stream, path in zip((1, 2), files, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
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
