"""From words to tokens, by a tokenizer of transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsl_sage.errors import InputError, MissingExtra


def load_tokenizer(path: Path, *, writes: bool = True) -> Any:
    """A tokenizer of transformers, from a directory of this machine; one that `writes` must know how a text ends."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingExtra("A set of texts", "llm") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.expanduser(), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what is wrong with a file, transformers reports by many types
        said = str(error).split("\n")[0][:200]
        raise InputError(f"{path} does not hold a tokenizer: {said or type(error).__name__}") from None
    if writes and tokenizer.eos_token_id is None:
        raise InputError(f"the tokenizer in {path} has no token for the end of a text: take another")
    return tokenizer


def encode(tokenizer: Any, texts: Sequence[str], *, special: bool, longest: int | None = None) -> list[list[int]]:
    """The tokens of each text, with the tokens that the tokenizer puts around it if `special`; cut off at `longest`."""
    cut: dict[str, Any] = {} if longest is None else {"truncation": True, "max_length": longest}
    # Without this the tokenizer warns of texts that are longer than its model: whether they are, is checked here.
    tokens: list[list[int]] = tokenizer(list(texts), add_special_tokens=special, verbose=False, **cut)["input_ids"]
    return tokens
