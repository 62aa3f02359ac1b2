"""The states of clients between rounds: in memory while they are small, else in files, read where they lie.

Up to a limit of bytes of all states together they stay in memory, and a checkpoint holds them. Beyond it each state is
a file of RUN/clients from then on, written by the thread that ran the client:

    ID-SHA256.safetensors       the state of client ID
    shared-SHA256.safetensors   what several clients have as one, such as an auxiliary for all
    ID-RUN-NUMBER.part          a draft: a newer version that no checkpoint names yet

The numbers of a file are written once and never changed. A state that has changed is another file, and a checkpoint
names the files that belong to it. So a kill at any moment leaves everything that the last checkpoint names as it was,
and a checkpoint writes only what has changed since the one before. Hashing a state takes longer than writing it, and
where rounds share a checkpoint most versions are gone before one names them; so only those it names are hashed.

1. `put` writes the new version of a state as a draft. The version before goes now if no checkpoint names it, and no
   other client's newest state, if it is shared.
2. `seal` hashes the drafts, gives them their names, and returns all names when the files are on the disk; the
   checkpoint is written with them.
3. `settle`, when that checkpoint is in its place, removes the files that it does not name.
4. `load`, for a resumed run, refuses names whose files are lost or damaged, and removes the others.

There are at most two versions of a state, so the disk needs twice the bytes of all states. A file is mapped into memory
privately: pages are read when they are used, and what a running client changes is memory of its own, never the file.
"""

import itertools
import re
import secrets
import shlex
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from fsl_sage.devices import all_on
from fsl_sage.errors import InputError, TrainingError
from fsl_sage.reading import short
from fsl_sage.records.files import (
    PART,
    check_seal,
    load_tensors,
    save_draft,
    seal_draft,
    sync_directory,
    sync_file,
)
from fsl_sage.records.resting import RestingPlace
from fsl_sage.wire.message import Tensors, nbytes

Named = dict[str, list[str]]
"""By client, the names of the files that are its state together; as it stands in a checkpoint."""

OWN = "own/"
"""The prefix of what may be shared: `own/PART/NAME`, the weights that a client holds besides the averaged ones."""

_FILE = re.compile(r"(\d+|shared)-([0-9a-f]{64})\.safetensors")


class ClientStore(Mapping[int, Tensors]):
    """States by client. Whoever gets one may change it in place. Threads may put and get those of different clients."""

    def __init__(self, limit: int, device: torch.device | None = None) -> None:
        """Start empty.

        Args:
            limit: The number of bytes that may stay in memory.
            device: Where the tensors of states that are read from files belong; the CPU by default.
        """
        self._limit = limit
        self._device = device or torch.device("cpu")
        self._directory: Path | None = None
        self._lock = threading.RLock()
        self._memory: dict[int, Tensors] = {}
        self._sizes: dict[int, int] = {}
        """By client in memory, the bytes of what it shares with no other."""
        self._held = 0
        """Their sum: with thousands of clients it is not added up anew for each."""
        self._files: dict[int, list[str]] = {}
        """By client whose newest state is in files, their names."""
        self._named: set[str] = set()
        """What the last checkpoint names."""
        self._spilling = False
        """Whether the limit was exceeded once: from then on all states are in files."""
        self._common: dict[tuple[int, ...], _Common] = {}
        """Tensors that several clients have, by their identities."""
        self._opened: dict[str, Tensors] = {}
        """The shared files that have been read."""
        self._uses: Counter[str] = Counter()
        """By shared file, how many clients' newest states have it; of one that none has, nothing is left."""
        self._run = secrets.token_hex(4)
        """In no other process's drafts: threads of an interrupted run may still be at work on this directory."""
        self._drafts = itertools.count()
        self._flushing: list[Future[None]] = []
        self._flusher: ThreadPoolExecutor | None = None

    def keep_in(self, directory: Path) -> None:
        """Say where files may be written. Without a place all states stay in memory."""
        self._directory = directory

    def resting_place(self) -> RestingPlace:
        """Memory for what the clients of a round hold while they wait, in files beyond the limit of states."""
        return RestingPlace(self._directory, self._limit)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted({*self._memory, *self._files}))

    def __len__(self) -> int:
        return len({*self._memory, *self._files})

    def __getitem__(self, client: int) -> Tensors:
        with self._lock:
            names = self._files.get(client)
            if names is None:
                return self._memory[client]
        return {path: tensor for name in names for path, tensor in self._read(name).items()}

    def share(self, groups: Iterable[Tensors]) -> None:
        """Note which of these groups of tensors several clients have, so that such a group is written once for all.

        Args:
            groups: Named tensors of a part, once for each client that has them.
        """
        groups = list(groups)
        by_identity = {_identities(tensors): tensors for tensors in groups}
        counts = Counter(map(_identities, groups))
        with self._lock:
            for key in (key for key, count in counts.items() if count > 1):
                if key not in self._common or not self._common[key].is_alive():
                    self._common[key] = _Common(by_identity[key])

    def put(self, client: int, state: Tensors) -> None:
        """Take over a client's new state."""
        own, common = self._parted(state)
        size = nbytes(own)
        with self._lock:
            self._held += size - self._sizes.get(client, 0)
            self._sizes[client] = size
            self._spilling |= self._directory is not None and self._held > self._limit
            if not self._spilling:
                self._memory[client] = state
                return
        names = [self._write(str(client), own)] if own else []
        names += [self._write_common(group, known) for group, known in common]
        with self._lock:
            self._memory.pop(client, None)
            self._held -= self._sizes.pop(client, 0)
            before, self._files[client] = self._files.get(client, []), names
            gone = [name for name in before if self._is_left(name, names)]
        for name in gone:
            self._path(name).unlink(missing_ok=True)

    def _is_left(self, name: str, newest: Collection[str]) -> bool:
        """Whether nobody needs a file any more that a client had before its newest ones.

        The tensors of a shared one may live on; whoever shares them again writes another file.
        """
        if not name.startswith("shared"):
            return name not in newest and name not in self._named
        self._uses[name] -= 1
        if self._uses[name] > 0 or name in self._named:
            return False
        del self._uses[name]
        self._opened.pop(name, None)
        for known in self._common.values():
            known.name = None if known.name == name else known.name
        return True

    def in_memory(self) -> dict[int, Tensors]:
        """The states that are not in files."""
        return dict(self._memory)

    # Checkpoints

    def seal(self) -> Named:
        """The files of all states, which are on the disk now; empty while all are in memory."""
        if not self._spilling:
            return {}
        for client, state in self.in_memory().items():
            self.put(client, state)
        flushing, self._flushing = self._flushing, []
        for each in flushing:
            each.result()
        self._seal_drafts()
        if self._files:
            sync_directory(self._place())
        return {str(client): list(names) for client, names in sorted(self._files.items())}

    def settle(self) -> None:
        """Remove what the newest states do not need: a checkpoint that names them is in its place."""
        self._count_uses()
        self._named = {name for names in self._files.values() for name in names}
        self._opened = {name: tensors for name, tensors in self._opened.items() if name in self._named}
        self._common = {
            key: known
            for key, known in self._common.items()
            if known.is_alive() and (known.name is None or known.name in self._named)
        }
        self._tidy()

    def load(self, states: Mapping[int, Tensors], named: Any) -> None:
        """Take over what a checkpoint holds and names, and forget everything else.

        Args:
            states: The states that it holds.
            named: What `seal` returned, as it was read from the checkpoint.
        """
        files = _checked(named)
        if files and self._directory is None:
            raise InputError("The checkpoint's clients are in files, and there is no directory for them.")
        for client, names in files.items():
            for name in names:
                self._check(client, name)
        self._memory = dict(states)
        self._files, self._spilling = files, bool(files)
        self._common, self._opened = {}, {}
        self._count_uses()
        self.share(group for state in states.values() for group in _groups(state))
        self._sizes = {client: nbytes(self._parted(state)[0]) for client, state in states.items()}
        self._held = sum(self._sizes.values())
        self._named = {name for names in files.values() for name in names}
        self._tidy()

    def close(self) -> None:
        """End the thread that flushes files."""
        if self._flusher is not None:
            self._flusher.shutdown(cancel_futures=True)
            self._flusher = None

    # Files

    def _place(self) -> Path:
        assert self._directory is not None
        return self._directory

    def _path(self, name: str) -> Path:
        return self._place() / name

    def _parted(self, state: Tensors) -> tuple[Tensors, list[tuple[Tensors, "_Common"]]]:
        """What of a state is the client's alone, and the groups that it shares with other clients."""
        with self._lock:
            found = [(group, self._common.get(_identities(group))) for group in _groups(state)]
        common = [(group, known) for group, known in found if known is not None and known.is_alive()]
        shared = {path for group, _ in common for path in group}
        return {path: tensor for path, tensor in state.items() if path not in shared}, common

    def _write(self, owner: str, tensors: Tensors) -> str:
        """Write a draft; returns its name."""
        path = self._path(f"{owner}-{self._run}-{next(self._drafts)}{PART}")
        with self._writing():
            path.parent.mkdir(exist_ok=True)
            save_draft(path, tensors)
        with self._lock:
            self._flusher = self._flusher or ThreadPoolExecutor(1, "flusher")
            self._flushing.append(self._flusher.submit(_flush, path))
        return path.name

    def _seal_drafts(self) -> None:
        """Give all drafts that are somebody's newest state the names that they keep."""
        newest = dict.fromkeys(name for names in self._files.values() for name in names if name.endswith(PART))
        with self._writing():
            sealed = {name: self._sealed(name) for name in newest}
        self._files = {client: [sealed.get(name, name) for name in names] for client, names in self._files.items()}
        self._opened = {sealed.get(name, name): tensors for name, tensors in self._opened.items()}
        for known in self._common.values():
            known.name = sealed.get(known.name or "", known.name)
        self._count_uses()

    def _count_uses(self) -> None:
        names = (name for names in self._files.values() for name in names)
        self._uses = Counter(name for name in names if name.startswith("shared"))

    def _sealed(self, draft: str) -> str:
        owner = draft.partition("-")[0]
        return seal_draft(self._path(draft), lambda sha256: self._path(f"{owner}-{sha256}.safetensors")).name

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an error of the disk into a sentence."""
        place = self._place()
        try:
            yield
        except OSError as error:
            raise TrainingError(
                f"{error.filename or place} cannot be written: {error.strerror or error}. The last checkpoint is kept: "
                f"fix that, then continue with 'fsl-sage resume {shlex.quote(str(place.parent))}'."
            ) from None

    def _write_common(self, group: Tensors, known: "_Common") -> str:
        """The name of the file of a group, written if there is none. From now on it counts as used once more."""
        with known.lock:
            with self._lock:
                if known.name is not None:
                    self._uses[known.name] += 1
                    return known.name
            name = self._write("shared", group)
            with self._lock:
                known.name = name
                self._uses[name] += 1
            return name

    def _read(self, name: str) -> Tensors:
        """The tensors of a file. Shared ones are the same objects for every client, so that they are known again."""
        if not name.startswith("shared"):
            return self._loaded(name)
        with self._lock:
            if name not in self._opened:
                self._opened[name] = self._loaded(name)
                for group in _groups(self._opened[name]):
                    self._common[_identities(group)] = _Common(group, name)
            return self._opened[name]

    def _loaded(self, name: str) -> Tensors:
        tensors, _ = load_tensors(self._path(name), sealed=True, checked=True)
        return all_on(tensors, self._device)

    def _check(self, client: int, name: str) -> None:
        """Refuse a file that is not as it was written."""
        path = self._path(name)
        if not path.exists():
            raise InputError(
                f"{path} is gone, a part of the state of client {client}: put it back, or start a new run."
            )
        found = _FILE.fullmatch(name)
        assert found is not None
        if check_seal(path) != found[2]:
            raise InputError(
                f"{path} is another version than the checkpoint's: put the original back, or start a new run."
            )

    def _tidy(self) -> None:
        """Remove all files that the last checkpoint does not name."""
        if self._directory is not None:
            _remove(self._directory, but=self._named)


def remove_states(directory: Path) -> None:
    """Remove the files of all clients' states, and the directory if nothing else is in it."""
    _remove(directory)
    with suppress(OSError):
        directory.rmdir()


def _remove(directory: Path, but: Collection[str] = ()) -> None:
    """Remove the files of states, and parts of such, but for some. A file of another name is not the store's."""
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        if path.name not in but and (_FILE.fullmatch(path.name) or path.suffix == PART):
            path.unlink(missing_ok=True)


class _Common:
    """Tensors that several clients have. It does not keep them alive."""

    def __init__(self, tensors: Tensors, name: str | None = None) -> None:
        self.name = name
        """The file that holds them, when it is written."""
        self.lock = threading.Lock()
        self._tensors = [ref(tensor) for tensor in tensors.values()]

    def is_alive(self) -> bool:
        """Whether the tensors are still there; else others may have got their identities."""
        return all(tensor() is not None for tensor in self._tensors)


def _groups(state: Tensors) -> list[Tensors]:
    """The weights of a state that it may share with others, part by part."""
    groups: dict[str, Tensors] = {}
    for path, tensor in state.items():
        if path.startswith(OWN):
            groups.setdefault(path.split("/", 2)[1], {})[path] = tensor
    return list(groups.values())


def _identities(tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
    return tuple(id(tensor) for tensor in tensors.values())


def _flush(path: Path) -> None:
    """Flush a file, unless a newer version has replaced it meanwhile."""
    try:
        sync_file(path)
    except FileNotFoundError:
        return


def _checked(named: Any) -> dict[int, list[str]]:
    """The names of files in a checkpoint, by client; refused if they lead anywhere else."""
    try:
        files = {int(client): [str(name) for name in names] for client, names in dict(named or {}).items()}
    except (TypeError, ValueError, AttributeError):
        raise InputError(f"The checkpoint's list of clients' files is damaged: {short(named)}.") from None
    for name in (name for names in files.values() for name in names):
        if _FILE.fullmatch(name) is None:
            raise InputError(f"The checkpoint names '{short(name)}', which is no file of a client's state.")
    return files
