"""Texts with labels: the tokens, the batches, and a classifier of transformers that learns from them."""

import json
from dataclasses import replace

import pytest
import torch
from tests.texts import WORDS, save_model, save_tokenizer

from fsl_sage import cost, default_config, run
from fsl_sage.config import from_dict, from_file
from fsl_sage.errors import InputError
from fsl_sage.experiment.setup import make_dry_setup
from fsl_sage.problems import make_dry_problem, make_problem
from fsl_sage.problems.parts import build_model
from fsl_sage.problems.texts.texts import Texts, check_lengths
from fsl_sage.records.files import load_tensors

CPU, META = torch.device("cpu"), torch.device("meta")
BERT = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
FOOD = {"Thai": "asian", "Indian": "asian", "French": "european"}


def save_bert(directory):
    """A small encoder with random weights and no head, and its tokenizer."""
    from transformers import BertConfig, BertModel

    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertModel(BertConfig(vocab_size=len(WORDS.split()), pad_token_id=0, **BERT)).save_pretrained(directory)
    return save_tokenizer(directory)


def save_texts(file, count):
    lines = []
    for row in range(count):
        food = list(FOOD)[row % 3]
        text = f"The Mill serves {food}" + " in the riverside centre" * (row % 3)
        lines.append(json.dumps({"text": text, "label": FOOD[food]}))
    file.write_text("\n".join(lines))
    return file


@pytest.fixture
def config(tmp_path):
    model, name = save_bert(tmp_path / "bert"), f"jsonl:{save_texts(tmp_path / 'texts.jsonl', 60)}"
    values = {
        "clients": 2,
        "rounds": 3,
        "batch_size": 6,
        "upload_every": 2,
        "align_every": 2,
        "data": {"name": name},
        "model": {"name": f"hf:{model}", "frozen": ["bert.embeddings"]},
        "optimizer": {"lr": 1e-2, "schedule": "constant", "warmup": 0},
        "alignment": {"samples": 12, "steps": 3, "batch_size": 6},
        "device": "cpu",
        "out": str(tmp_path / "run"),
    }
    return from_file(from_dict(values, default_config(name)), "tests", of_several=True)


def test_texts_are_padded_behind_their_end():
    texts = Texts.of([[]] * 3, [[5, 6], [7], [8, 9, 3]], torch.tensor([0, 1, 0]))
    tokens, mask = texts.padded(torch.tensor([2, 1]), 4, 11)
    assert tokens.tolist() == [[8, 9, 3, 11], [7, 11, 11, 11]]
    assert mask.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]


def test_a_text_without_tokens_is_refused():
    check_lengths([[5]], ["line 1 of a.jsonl"], 3)
    with pytest.raises(InputError, match=r"no tokens in the text in line 2 of a\.jsonl: give the model's own"):
        check_lengths([[5], []], ["line 1 of a.jsonl", "line 2 of a.jsonl"], 3)


def test_a_batch_gives_what_transformers_gives_for_each_text_alone(config):
    problem = make_problem(config)
    assert (problem.examples, problem.classes) == (48, ("asian", "european"))
    model = build_model(config, problem, CPU).eval()
    batch = problem.make_task(config, CPU).training_batch(torch.arange(6), torch.Generator())
    together = model(**batch.inputs).logits
    for row in range(6):
        length = int(batch.inputs["attention_mask"][row].sum())
        alone = model(input_ids=batch.inputs["input_ids"][row : row + 1, :length]).logits
        assert torch.allclose(together[row], alone[0], atol=1e-6)
    assert {len(row) for row in batch.inputs["input_ids"]} == {12}  # the longest text of the set
    assert not any(weight.requires_grad for weight in model.bert.embeddings.parameters())
    assert all(weight.requires_grad for weight in model.bert.encoder.parameters())


def test_a_file_that_has_changed_is_read_again(config, tmp_path):
    assert make_problem(config).examples == 48
    save_texts(tmp_path / "texts.jsonl", 30)
    assert make_problem(config).examples == 24


def test_a_subset_is_the_same_wherever_the_file_lies(config, tmp_path):
    (tmp_path / "far").mkdir()
    elsewhere = f"jsonl:{save_texts(tmp_path / 'far' / 'other.jsonl', 60)}"
    here, there, seeded = (
        make_problem(from_dict({"seed": seed, "data": {"train_images": 9, **name}}, config)).data.train
        for seed, name in ((0, {}), (0, {"name": elsewhere}), (1, {}))
    )
    assert torch.equal(here.tokens, there.tokens)
    assert not torch.equal(here.tokens, seeded.tokens)


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
def test_a_decoder_classifies_as_in_transformers(config, tmp_path, family):
    from transformers import AutoModelForSequenceClassification

    path = save_tokenizer(save_model(tmp_path / family, family, len(WORDS.split())))
    config = from_dict({"model": {"name": f"hf:{path}", "frozen": []}}, config)
    problem = make_problem(config)
    model = build_model(config, problem, CPU).eval()
    theirs = AutoModelForSequenceClassification.from_pretrained(path, pad_token_id=1).eval()  # the end of a text
    theirs.load_state_dict(model.state_dict())
    batch = problem.make_task(config, CPU).test_batch(0)
    assert batch.inputs["attention_mask"].sum(1).unique().numel() > 1  # texts of different lengths
    assert torch.equal(model(**batch.inputs), theirs(**batch.inputs).logits)


def test_a_decoder_is_cut_and_aligned(config, tmp_path):
    path = save_tokenizer(save_model(tmp_path / "gpt2", "gpt2", len(WORDS.split())))
    result = run(from_dict({"rounds": 1, "model": {"name": f"hf:{path}", "frozen": []}}, config))
    assert result.metrics[0]["aligned"]


@pytest.mark.parametrize("algorithm", ["fsl-sage", "cse-fsl", "fedavg"])
def test_it_is_trained_and_costs_what_was_said(config, algorithm):
    config = replace(config, algorithm=algorithm)
    said = cost(config, algorithms=[algorithm])[algorithm]
    result = run(config)
    assert {"test_macro_f1", "test_class_f1"} <= set(result.metrics[-1])
    moved = [0, *(line["bytes_paper"] for line in result.metrics)]
    assert moved[2] - moved[1] == said["bytes_paper"]
    weights, _ = load_tensors(result.model_file)
    before = build_model(config, make_problem(config), CPU).state_dict()
    assert set(weights) == {name for name in before if not name.startswith("bert.embeddings")}
    assert not any(torch.equal(weights[name], before[name]) for name in weights)


def test_shapes_without_texts_are_those_of_the_texts(config, tmp_path, monkeypatch):
    real, dry = make_problem(config), make_dry_problem(config)
    shapes = [
        p.make_task(config, d).training_batch(torch.arange(5), torch.Generator()) for p, d in ((real, CPU), (dry, META))
    ]
    assert shapes[0].inputs["input_ids"].shape == shapes[1].inputs["input_ids"].shape
    monkeypatch.setenv("FSL_SAGE_DATA", str(tmp_path / "nothing"))
    imdb = from_dict({"data": {"name": "imdb", "sequence_length": 16, "train_images": 40}}, config)
    setup = make_dry_setup(imdb)
    assert setup.settings.task.sizes_are_bounds
    assert [len(share) for share in setup.examples] == [20, 20]


def test_what_does_not_fit_is_refused(config, tmp_path):
    with pytest.raises(InputError, match=r"The text in line \d+ of .*texts.jsonl has 8 tokens, more than --data.sequ"):
        make_problem(from_dict({"data": {"sequence_length": 7}}, config))
    cut = from_dict({"data": {"sequence_length": 7, "long_texts": "cut"}}, config)
    assert make_problem(cut).example(2, CPU)["input_ids"].shape == (2, 7)
    save_texts(tmp_path / "texts.jsonl", 60)
    (tmp_path / "long.jsonl").write_text(
        "".join(json.dumps({"text": "Thai " * 30, "label": row % 2}) + "\n" for row in range(20))
    )
    long = from_dict({"data": {"name": f"jsonl:{tmp_path / 'long.jsonl'}"}}, config)
    with pytest.raises(InputError, match=r"Texts of 30 tokens are too long .* which reads 24"):
        build_model(long, make_problem(long), CPU)
    wrong = from_dict({"model": {"frozen": ["bert.nothing"]}}, config)
    with pytest.raises(InputError, match=r"--model\.frozen bert\.nothing names no weights.* bert, dropout, classifier"):
        build_model(wrong, make_problem(wrong), CPU)
    with pytest.raises(InputError, match=r"--data\.image-size is not for jsonl:.*, a set of texts"):
        make_problem(from_dict({"data": {"image_size": 8}}, config))
    with pytest.raises(InputError, match="is not a language model"):
        make_problem(from_dict({"model": {"name": "resnet18"}}, config))


def test_prompts_and_completions_are_learnt(tmp_path):
    model = save_tokenizer(save_model(tmp_path / "gpt2", "gpt2", len(WORDS.split())))
    lines = [{"prompt": f"name [ {food} ]", "completion": f"The Mill serves {food} ."} for food in FOOD] * 8
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    name = f"jsonl:{tmp_path / 'pairs.jsonl'}"
    values = {
        "clients": 2,
        "rounds": 3,
        "batch_size": 4,
        "upload_every": 1,
        "align_every": 2,
        "data": {"name": name},
        "model": {"name": f"hf:{model}"},
        "lora": {"dropout": 0.0},
        "optimizer": {"lr": 2e-2},
        "alignment": {"samples": 8, "steps": 2, "batch_size": 4},
        "device": "cpu",
    }
    base = from_file(from_dict(values, default_config(name)), "tests", of_several=True)
    problem = make_problem(base)
    batch = problem.make_task(base, CPU).training_batch(torch.tensor([0]), torch.Generator())
    assert int(batch.target["mask"].sum()) == 6  # five words and the end; of the prompt nothing
    for algorithm in ("fsl-sage", "cse-fsl", "fedavg"):
        result = run(replace(base, algorithm=algorithm, out=tmp_path / algorithm))
        assert result.metrics[-1]["test_loss"] < result.metrics[0]["test_loss"]
    with pytest.raises(InputError, match=r"dirichlet is not for jsonl:.*: give iid"):
        make_problem(from_dict({"data": {"partition": "dirichlet"}}, base))
    with pytest.raises(
        InputError, match=r"The text in line \d+ of .* has 10 tokens, more than --data.sequence-length 9"
    ):
        make_problem(from_dict({"data": {"sequence_length": 9}}, base))
    with pytest.raises(InputError, match="has no classes"):
        make_problem(from_dict({"data": {"class_weights": "balanced"}}, base))
