"""The demo of a language model at small sites, in small: a model of 540 MB whose client part is a fifth of it."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

pytest.importorskip("flwr")
pytest.importorskip("peft")

from fsl_sage.deploy.language_demo import Scale, language_demo

from .prestarted import ForkingFederation

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]

WORDS = "[UNK] [EOS] Order: table dish drink Waiter: One and a for number with pleasure!"


def save_wide_llama(directory: Path) -> Path:
    """Ten wide blocks of 54 MB, few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(WORDS.split())}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[EOS]")
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=8192,
        num_hidden_layers=10,
        num_attention_heads=8,
        vocab_size=len(fast),
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    fast.save_pretrained(directory)
    return directory


def test_the_client_of_fsl_sage_trains_in_memory_that_fedavgs_does_not_fit(tmp_path: Path) -> None:
    """The federation learns, ends in the bits of the local run, and says what each process took."""
    said = io.StringIO()
    # Forked apps start with 440 MB, all modules imported; the model's own 540 do not fit beside them.
    scale = Scale(save_wide_llama(tmp_path / "model"), memory=800_000_000, train=12, test=4, rounds=2)
    language_demo(Console(file=said, width=250), tmp_path / "demo", scale, ForkingFederation)
    told = said.getvalue()
    assert "those of the local engine, bit for bit" in told
    assert "the memory of its process does not suffice: it may take 800 MB" in told
    assert "FedAvg's client does not fit where FSL-SAGE's has trained." in told
    assert "Traceback" not in told
    assert "the tokens of every completion" in told
    about = json.loads((tmp_path / "demo" / "run" / "federation.json").read_text())
    for client in range(3):
        file = tmp_path / "demo" / "state" / f"site-{client}" / about["run"] / f"client-{client}" / "result.json"
        assert 100e6 < json.loads(file.read_text())["peak_memory_bytes"] < 900e6
    # The first site had the files of its part, the others got it from the server.
    logs = [(tmp_path / "demo" / "federation" / "logs" / f"node-{client}.log").read_text() for client in range(3)]
    first = [log.split("train message")[0].count("query.weights") for log in logs]
    assert first[0] == 0
    assert first[1] == first[2] > 0
