"""Sequence classifiers of transformers are cut and trained, or refused with the reason and what to do."""

from functools import partial

import pytest
import torch

from fsl_sage import run
from fsl_sage.config import from_dict
from fsl_sage.errors import InputError
from fsl_sage.models import make_text_classifier
from fsl_sage.models.encoder_decoder import Place
from tests.classifiers import (
    CUT,
    FREEZE,
    OWN,
    REFUSED,
    assert_cut_is_the_whole,
    assert_logits_are_those_of_transformers,
    classifier_run,
    tried,
)

QUICK = ("funnel", "modernbert-decoder", "xlm", "xlnet")
"""What needs more than a list of blocks: lists in a list, a head of its own, blocks in several lists, tokens first."""
REMADE = ("bart", "t5gemma2", "cohere_compass_text")
"""One of each form that is made anew to be cut: by a text's end, by the decoder's last token, by the last token."""
OFTEN_USED = ("roberta", "distilbert", "electra", "deberta-v2", "mistral", "qwen3", "t5", "bart")
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # in DeBERTa
OTHERS = [name for name in OWN if name not in (*QUICK, *OFTEN_USED)]


@pytest.mark.parametrize("architecture", QUICK)
def test_what_is_cut_computes_as_the_whole(tmp_path, architecture):
    assert_cut_is_the_whole(classifier_run(tmp_path, architecture))


@pytest.mark.parametrize("architecture", REMADE)
def test_what_is_made_anew_to_be_cut_classifies_as_transformers_does(tmp_path, architecture):
    config = classifier_run(tmp_path, architecture)
    assert_logits_are_those_of_transformers(config.model.name)
    assert_cut_is_the_whole(config)


@pytest.mark.parametrize("pooling", ["bos", "mean"])
def test_a_decoder_that_says_how_it_pools_is_left_as_it_is(tmp_path, monkeypatch, pooling):
    monkeypatch.setitem(OWN, "cohere_compass_text", {**OWN["cohere_compass_text"], "pooling": pooling})
    assert_logits_are_those_of_transformers(classifier_run(tmp_path, "cohere_compass_text").model.name)


def test_a_configuration_may_lack_the_one_inside_of_it(tmp_path):
    assert_logits_are_those_of_transformers(classifier_run(tmp_path, "esm").model.name)


def test_a_text_without_its_end_is_classified_by_its_last_token():
    tokens = torch.tensor([[5, 2, 6, 2, 0], [5, 6, 7, 0, 0], [2, 6, 7, 8, 9]])
    assert Place(2)(tokens, (tokens != 0).long()).tolist() == [3, 2, 0]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", OFTEN_USED)
def test_those_often_used_are_cut_and_trained(tmp_path, architecture):
    assert "cut at" in tried(architecture, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("architecture", OTHERS)
def test_every_architecture_is_cut_and_trained_or_refused(tmp_path, architecture):
    assert ("refused" in tried(architecture, tmp_path)) == (architecture in REFUSED)


def test_what_cannot_be_cut_is_refused_at_once(tmp_path):
    with pytest.raises(InputError, match=r"computes all blocks anew .*: give an encoder, such as BERT, or a decoder"):
        run(classifier_run(tmp_path, "reformer"))


def test_what_a_package_is_missing_for_is_said():
    with pytest.raises(InputError, match=r"hf:layoutlmv2 cannot be made: ImportError: .* requires the detectron2"):
        make_text_classifier("hf:layoutlmv2", 2, 24, 12, padding=0)


@pytest.mark.parametrize("algorithm", ["fsl-sage", "cse-fsl", "cpsl"])
def test_what_crosses_once_for_a_batch_must_be_frozen(tmp_path, algorithm):
    config = from_dict({"algorithm": algorithm}, classifier_run(tmp_path, "mpnet"))
    bias = "mpnet.encoder.relative_attention_bias"
    with pytest.raises(InputError, match=rf"sends '{bias}' .* once for a whole batch.* --model\.frozen {bias}, or cut"):
        run(config)


def test_frozen_it_is_trained_with_any_number_of_samples(tmp_path):
    assert run(classifier_run(tmp_path, "mpnet", frozen=FREEZE["mpnet"])).metrics[0]["aligned"]


def test_what_all_blocks_use_must_be_frozen(tmp_path):
    config = classifier_run(tmp_path, "deberta")
    with pytest.raises(
        InputError, match=r"rel_embeddings\.weight' is used on both sides; freeze it \(.*--model\.frozen "
    ):
        run(config)
    assert_cut_is_the_whole(from_dict({"model": {"frozen": FREEZE["deberta"]}}, config))


def test_one_block_that_runs_again_and_again_has_no_usual_cut(tmp_path):
    config = classifier_run(tmp_path, "albert")
    with pytest.raises(InputError, match=r"A albert has no list of 3 blocks.*: give --model\.cut; 'fsl-sage cuts'"):
        run(config)
    assert_cut_is_the_whole(from_dict({"model": {"cut": CUT["albert"]}}, config))


@pytest.mark.parametrize(
    ("architecture", "values", "reason"),
    [
        ("xmod", {"default_language": None}, r"which language it reads: write one of en_XX as"),
        (
            "big_bird",
            {"attention_type": "block_sparse"},
            r'write "attention_type": "original_full" into its config.json',
        ),
        ("nystromformer", {"num_landmarks": 4}, r"reads texts of 64 tokens and no others, and the longest here has 12"),
    ],
)
def test_what_its_configuration_lacks_is_said(tmp_path, monkeypatch, architecture, values, reason):
    monkeypatch.setitem(OWN, architecture, {**OWN[architecture], **values})
    with pytest.raises(InputError, match=reason):
        run(classifier_run(tmp_path, architecture))


def test_the_length_that_is_named_is_one_that_can_be_read(tmp_path):
    """RoBERTa counts its places from behind that of padding, so some of them are never used."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    sizes = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 8}
    config = RobertaConfig(**sizes, vocab_size=20, max_position_embeddings=34, pad_token_id=1)
    RobertaForSequenceClassification(config).save_pretrained(tmp_path)
    make = partial(make_text_classifier, f"hf:{tmp_path}", 2, 20, padding=1)
    with pytest.raises(InputError, match="which reads 32: give"):
        make(length=33)
    tokens = torch.full((1, 32), 5)
    make(length=32)(input_ids=tokens, attention_mask=torch.ones_like(tokens))
