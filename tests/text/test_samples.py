"""What a trained language model writes, and the files of it."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from fsl_sage.config import Config, DataConfig
from fsl_sage.errors import InputError
from fsl_sage.problems.texts.e2e import Meaning
from fsl_sage.text import samples as samples_module
from fsl_sage.text.generate import Decoding
from fsl_sage.text.samples import (
    Sample,
    SampleOptions,
    evenly_spaced,
    make_samples,
    score_samples,
    write_samples,
)

MEANINGS = [Meaning(f"name[{i}]", (f"{i} is a pub", f"a pub is {i}", "a pub", "pub")) for i in range(20)]
LOSSES = {"before": 2.5, "after": 1.25}
QUICK = SampleOptions(decoding=Decoding(beams=2, max_new_tokens=6))


class Words:
    """A tokenizer of numbers."""

    eos_token_id = 1
    pad_token_id = 1

    def batch_decode(self, rows, skip_special_tokens):
        return [" ".join(str(int(token)) for token in row if token != 1) for row in rows]


@pytest.fixture(autouse=True)
def a_run(monkeypatch):
    """A run whose training has changed the model, in place of one that was really trained."""

    def load(directory, *, adapter=True):
        torch.manual_seed(int(adapter))
        config = GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=2, n_positions=32, eos_token_id=1)
        of_run = Config(data=DataConfig(name="e2e"))
        return SimpleNamespace(config=of_run, model=GPT2LMHeadModel(config), tokenizer=Words(), test=MEANINGS)

    monkeypatch.setattr(samples_module, "load_trained", load)
    monkeypatch.setattr(samples_module, "all_meanings", lambda directory, kind: [Meaning(kind, ("a dev text",))])
    monkeypatch.setattr(samples_module, "encode_prompts", lambda _, meanings: [[2, 3 + len(m)] for m in meanings])


def test_meanings_are_spread_over_the_whole_file():
    assert [m.meaning for m in evenly_spaced(MEANINGS, 4)] == ["name[0]", "name[5]", "name[10]", "name[15]"]
    assert evenly_spaced(MEANINGS, 20) == MEANINGS
    for count in (0, -1, 21):
        with pytest.raises(InputError, match=f"--count {count} is not possible: there are 20"):
            evenly_spaced(MEANINGS, count)


def test_samples_are_of_the_trained_model_and_those_before_of_the_one_it_started_from(tmp_path):
    plain = make_samples(tmp_path, QUICK)
    assert [sample.meaning for sample in plain] == [MEANINGS[i * 4].meaning for i in range(5)]
    assert all(sample.before is None for sample in plain)
    both = make_samples(tmp_path, replace(QUICK, count=5, scores=True))
    assert [replace(sample, before=None) for sample in both] == plain
    assert [sample.before for sample in both] != [sample.generated for sample in both]
    assert not list(tmp_path.iterdir())
    dev = make_samples(tmp_path, replace(QUICK, split="dev"))
    assert [sample.meaning for sample in dev] == ["dev"]
    with pytest.raises(InputError, match="--count 0"):
        make_samples(tmp_path, replace(QUICK, count=0))


@pytest.mark.slow
def test_what_is_written_can_be_read_again(tmp_path):
    samples = [Sample("name[£]", ("£ is a pub", "x"), "£ is a pub", "a pub"), Sample("name[b]", ("b is new",), "b", "")]
    write_samples(tmp_path, samples, score_samples(samples), LOSSES, QUICK)
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {
        "meaning": "name[£]",
        "references": ["£ is a pub", "x"],
        "generated": "£ is a pub",
        "before": "a pub",
    }
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert (scores["split"], scores["meanings"], scores["decoding"]["beams"]) == ("test", 2, 2)
    assert (scores["before"]["test_loss"], scores["after"]["test_loss"]) == (2.5, 1.25)
    assert scores["after"]["rouge_l"] > scores["before"]["rouge_l"] > 0
