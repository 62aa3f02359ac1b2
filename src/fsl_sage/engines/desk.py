"""Where clients and S-server meet in a local step whose uploads are answered one by one."""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from fsl_sage.engines.base import ClientError, Outcome
from fsl_sage.wire.message import Message

Word = Message | Outcome | ClientError
"""What a client says when it is asked to go on."""

Given = TypeVar("Given")


class Desk:
    """The words of clients and the replies to them, in one step. Some threads run the clients, another the S-server.

    What has been taken is let go, so that no upload or reply outlives its client's step.
    """

    def __init__(self, clients: Iterable[int]) -> None:
        self._words: dict[int, Future[Word]] = {id: Future() for id in clients}
        self._replies: dict[int, Future[Message | None]] = {id: Future() for id in self._words}

    def say(self, id: int, word: Word) -> None:
        """A client has come to its upload, or to its end."""
        _put(self._words[id], word)

    def heard(self, id: int) -> Word:
        """Wait for what a client says."""
        word = self._words[id].result()
        del self._words[id]
        return word

    def answer(self, id: int, reply: Message | None) -> None:
        """The S-server's reply to a client."""
        _put(self._replies[id], reply)

    def reply_to(self, id: int) -> Message | None:
        """Wait for the S-server's reply."""
        reply = self._replies[id].result()
        del self._replies[id]
        return reply

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """While one side works: if it fails, nobody waits for it for ever."""
        try:
            yield
        except BaseException as error:
            futures: list[Future[Any]] = [*self._words.values(), *self._replies.values()]
            for future in futures:
                with suppress(InvalidStateError):
                    future.set_exception(error)
            raise


def _put(future: Future[Given], value: Given) -> None:
    """Set the value that somebody waits for; if the other side has given up, fail as it did."""
    try:
        future.set_result(value)
    except InvalidStateError:
        future.result()
        raise
