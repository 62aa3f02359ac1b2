"""A client's state between rounds. It is stored on the disk of its node, by run and round, and nowhere else."""

import re
from pathlib import Path

from fsl_sage.errors import InputError
from fsl_sage.records.files import load_tensors, save_tensors, write_bytes
from fsl_sage.wire.message import Tensors

RUN_ID = re.compile(r"[0-9a-f]{32}")
NEVER = -1
"""The round of a client that has not taken part yet."""


class NodeState:
    """A directory with the client's states: after the rounds that the server may continue from, and the newest one."""

    def __init__(self, directory: Path, run: str, client: int) -> None:
        if not RUN_ID.fullmatch(run):  # the id came over the network, and becomes the name of a directory
            raise InputError("The run's id is not one: 32 hexadecimal digits are expected.")
        self.directory = directory / run / f"client-{client}"
        self.model_file = self.directory / "model.safetensors"
        self.foundation_file = self.directory / "foundation.safetensors"
        self.result_file = self.directory / "result.json"

    def load(self, after: int) -> Tensors:
        """The state after round `after`; a client that has not taken part has none."""
        if after == NEVER:
            return {}
        if not self._file(after).exists():
            kept = ", ".join(str(t) for t in self.rounds()) or "none"
            raise InputError(
                f"This node does not have the client's state after round {after}; it has those after: {kept}. "
                "Put its state directory back, or start a new run."
            )
        return load_tensors(self._file(after), sealed=True)[0]

    def save(self, t: int, tensors: Tensors) -> None:
        """Keep the state after round t. It replaces that of an earlier attempt at this round."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            save_tensors(self._file(t), tensors)
        except OSError as error:
            raise InputError(f"The client's state cannot be written at its node: {error.strerror}.") from None

    def load_foundation(self) -> bytes:
        """The packed foundation of the client's parts, as the server sent it."""
        if not self.foundation_file.exists():
            raise InputError(
                "This node does not have what the server sent it before its first round: put its state directory back, "
                "or start a new run."
            )
        return self.foundation_file.read_bytes()

    def save_foundation(self, block: bytes) -> None:
        """Keep the packed foundation of the client's parts."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_bytes(self.foundation_file, block)
        except OSError as error:
            raise InputError(f"The client's foundation cannot be written at its node: {error.strerror}.") from None

    def keep_only(self, *rounds: int) -> None:
        """Delete the states after other rounds than these. The server will not ask for them."""
        for t in self.rounds():
            if t not in rounds:
                self._file(t).unlink()

    def finish(self, tensors: Tensors) -> None:
        """End the run: keep the final weights of the client's parts and delete the states."""
        self.directory.mkdir(parents=True, exist_ok=True)
        save_tensors(self.model_file, tensors)
        self.keep_only()

    def is_finished(self, after: int) -> bool:
        """Whether the final weights are here and the state after round `after`, from which they come, is not."""
        return self.model_file.exists() and after not in self.rounds()

    def rounds(self) -> list[int]:
        """The rounds after which there is a state."""
        found = (re.fullmatch(r"after-(\d+)\.safetensors", path.name) for path in self.directory.glob("after-*"))
        return sorted(int(match[1]) for match in found if match)

    def _file(self, t: int) -> Path:
        return self.directory / f"after-{t}.safetensors"
