"""Texts of E2E as tokens: prompts are given, completions are to be learnt."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.texts import SHARED, needs_e2e, save_rows, save_tokenizer

from fsl_sage.errors import InputError
from fsl_sage.problems.partition import partition
from fsl_sage.problems.texts.e2e import encode_prompts, held_out_meanings, load_e2e
from fsl_sage.problems.texts.texts import TextData, Texts
from fsl_sage.problems.texts.tokens import load_tokenizer


@pytest.fixture
def data(tmp_path: Path) -> TextData:
    return load_e2e(save_rows(tmp_path / "e2e"), save_tokenizer(tmp_path / "tokenizer"))


def test_the_model_reads_a_text_and_learns_its_completion_and_end(tmp_path: Path, data: TextData) -> None:
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    inputs, labels, mask = data.train.rows(torch.tensor([0, 1]), 512)
    assert inputs.shape == labels.shape == mask.shape
    assert tokenizer.decode(labels[0][mask[0]]) == "The Mill serves Thai . [EOS]"
    (prompt,) = encode_prompts(tokenizer, ["name[The Mill], food[Thai]"])
    assert inputs[0][: len(prompt)].tolist() == prompt
    for row in range(2):  # the label of a position is what the model reads next
        places = mask[row].nonzero()[:-1, 0]
        assert torch.equal(labels[row][places].long(), inputs[row][places + 1])


def test_neither_prompt_nor_padding_can_be_read_from_the_labels(data: TextData) -> None:
    _, labels, mask = data.train.rows(torch.arange(len(data.train)), 512)
    assert labels[~mask].eq(0).all()
    assert labels[mask].ne(0).all()


def test_padding_goes_to_the_longest_of_the_batch_and_no_further(data: TextData) -> None:
    short, long = data.train.lengths.argsort()[[0, -1]]
    for chosen in ([short, short], [short, long]):
        inputs, _, mask = data.train.rows(torch.stack(chosen), 512)
        assert inputs.shape[1] == int(data.train.lengths[torch.stack(chosen)].max()) - 1
        assert mask.any(1).all()


def test_texts_are_cut_off_after_the_sequence_length(tmp_path: Path, data: TextData) -> None:
    least = int(data.train.prompts.max()) + 1
    inputs, _, mask = data.train.rows(torch.arange(len(data.train)), least)
    assert inputs.shape[1] == least - 1
    assert mask.any(1).all()
    with pytest.raises(InputError, match=f"give at least {least}$"):
        load_e2e(tmp_path / "e2e", tmp_path / "tokenizer", longest=least - 1)


def test_a_flat_tensor_holds_what_the_lists_held() -> None:
    texts = Texts.of([[1, 2], [3]], [[4], [5, 6, 7]], torch.tensor([0, 1]))
    assert texts.tokens.tolist() == [1, 2, 4, 3, 5, 6, 7]
    assert texts.lengths.tolist() == [3, 4]
    inputs, labels, mask = texts.rows(torch.tensor([1, 0]), 512)
    assert inputs.tolist() == [[3, 5, 6], [1, 2, 4]]
    assert labels.tolist() == [[5, 6, 7], [0, 4, 0]]
    assert mask.tolist() == [[True, True, True], [False, True, False]]


def test_a_subset_is_balanced_over_the_restaurants(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    data = load_e2e(save_rows(tmp_path / "e2e"), tokenizer, train_texts=8, test_texts=4)
    assert np.bincount(data.train.y).tolist() == [2, 2, 2, 2]
    assert len(data.test) == 4
    with pytest.raises(InputError, match="there can be 2 to 24"):
        load_e2e(tmp_path / "e2e", tokenizer, train_texts=25)


def test_by_restaurant_each_is_at_one_client(data: TextData) -> None:
    labels = data.train.y.numpy()
    shares = partition(labels, 3, "restaurant", rng=np.random.default_rng(0))
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(labels)))
    held = [set(labels[share]) for share in shares]
    assert sum(map(len, held)) == len(set().union(*held)) == 4
    with pytest.raises(InputError, match="4 restaurants are too few for 5 clients"):
        partition(labels, 5, "restaurant", rng=np.random.default_rng(0))


def test_a_meaning_comes_with_all_its_references(tmp_path: Path) -> None:
    meanings = held_out_meanings(save_rows(tmp_path / "e2e", test=24), 8, seed=0)
    assert len({meaning.meaning for meaning in meanings}) == len(meanings) <= 8
    assert all(len(meaning.references) == 2 for meaning in meanings)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"trainset.csv and testset_w_refs.csv"):
        load_e2e(tmp_path, tmp_path)
    save_rows(tmp_path / "e2e")
    with pytest.raises(InputError, match="does not hold a tokenizer"):
        load_e2e(tmp_path, tmp_path)
    (tmp_path / "e2e" / "trainset.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="the columns mr and ref"):
        load_e2e(tmp_path, tmp_path)


@needs_e2e
def test_the_official_files_with_the_tokenizer_of_gpt2() -> None:
    data = load_e2e(SHARED / "e2e", SHARED / "gpt2-tokenizer", train_texts=68, test_texts=20)
    tokenizer = load_tokenizer(SHARED / "gpt2-tokenizer")
    assert len(data.classes) == 34
    assert data.vocabulary == 50257
    inputs, labels, mask = data.train.rows(torch.arange(2), 512)
    text = tokenizer.decode(labels[0][mask[0]])
    assert text.startswith(" ")
    assert text.endswith("<|endoftext|>")
    assert tokenizer.decode(inputs[0][: int(data.train.prompts[0])]).endswith(" ||")
