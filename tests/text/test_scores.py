import math
import shutil

import pytest
from nltk.translate.nist_score import corpus_nist

from fsl_sage.errors import InputError
from fsl_sage.text import scores as scores_module
from fsl_sage.text.scores import SCORES, score

needs_java = pytest.mark.skipif(shutil.which("java") is None, reason="Java is not installed")

REFERENCES = [
    ["The Mill is a French pub near The Sorrento.", "Near The Sorrento there is a French pub called The Mill."],
    ["Blue Spice is a cheap coffee shop by the riverside."],
    ["Aromi, in the city centre, is not family-friendly.", "Aromi in the centre is for adults.", "Aromi: no children."],
    ["For £20-25 you can eat Japanese food at Zizzi."],
]
PERFECT = [group[0] for group in REFERENCES]
TEXTS = [
    "The Mill is a pub near The Sorrento.",
    "Blue Spice is a coffee shop near the river.",
    "Aromi is in the city centre.",
    "You can eat Japanese food for 20 pounds at the Zizzi.",
]


def scores_of_the_texts():
    """Of TEXTS, each way once: Java takes seconds to load METEOR's tables."""
    java = scores_module.shutil.which("java")
    if java not in _SCORES:
        _SCORES[java] = score(TEXTS, REFERENCES)
    return _SCORES[java]


_SCORES = {}


@pytest.fixture
def without_java(monkeypatch):
    monkeypatch.setattr(scores_module.shutil, "which", lambda program: None)


def test_bleu_as_by_hand(without_java):
    """Of 8 tokens 7 match, of 6 pairs 5, 3 of 4, 2 of 3; the closest references have 6 and 3 tokens, together 9."""
    found = score(["a b c d e x", "F g"], [["A b c d e y", "q"], ["f g h", "r r r r r"]])
    by_hand = math.exp(1 - 9 / 8) * (7 / 8 * 5 / 6 * 3 / 4 * 2 / 3) ** (1 / 4)
    assert found.bleu == pytest.approx(100 * by_hand)


def test_nist_as_by_hand(without_java):
    """References "a b" and "a c c": information of a 1-gram log2(5 / count), of "a b" log2(2 / 1)."""
    found = score(["a b", "c"], [["a b"], ["a c c"]])
    ones = (math.log2(5 / 2) + math.log2(5 / 1) + math.log2(5 / 2)) / 3
    twos = math.log2(2 / 1) / 1
    penalty = math.exp(math.log(0.5) / math.log(1.5) ** 2 * math.log(3 / 5) ** 2)
    assert found.nist == pytest.approx(penalty * (ones + twos))


def test_nist_is_nltks_for_single_references(without_java):
    single = [group[-1:] for group in REFERENCES]
    tokens = scores_module._tokens_13a(TEXTS, single)
    assert score(TEXTS, single).nist == pytest.approx(corpus_nist(tokens[1], tokens[0]))


def test_nist_takes_a_texts_ngrams_from_all_its_references_together(without_java):
    text, both = "a b c d e f", [["a b c q r s", "t u v d e f"]]
    assert score([text], both).nist > 1.9 * corpus_nist([[r.split() for r in both[0]]], [text.split()])


@pytest.mark.parametrize("java", [pytest.param(True, marks=needs_java), False])
def test_a_perfect_match(java, request):
    if not java:
        request.getfixturevalue("without_java")
    perfect = score(PERFECT, REFERENCES)
    assert perfect.bleu == pytest.approx(100)
    assert perfect.rouge_l == pytest.approx(100)
    assert perfect.meteor == (pytest.approx(100) if java else None)
    single = score(PERFECT, [[text] for text in PERFECT])
    assert single.cider == pytest.approx(10)
    worse = scores_of_the_texts()
    for name in SCORES:
        if name != "meteor" or java:
            assert 0 < getattr(worse, name) < getattr(perfect, name)


@pytest.mark.parametrize("java", [pytest.param(True, marks=needs_java), False])
def test_the_order_of_texts_and_of_references_does_not_matter(java, request):
    if not java:
        request.getfixturevalue("without_java")
    order = [2, 0, 3, 1]
    turned = score([TEXTS[i] for i in order], [REFERENCES[i][::-1] for i in order])
    straight = scores_of_the_texts()
    for name in SCORES:
        assert getattr(turned, name) == pytest.approx(getattr(straight, name))


def test_case_and_line_breaks_do_not_matter(without_java):
    assert score([text.upper().replace(" ", "\n") for text in TEXTS], REFERENCES) == score(TEXTS, REFERENCES)


def test_without_java_meteor_is_left_out_and_that_is_said(without_java):
    found = score(TEXTS, REFERENCES)
    assert found.meteor is None
    assert "Java is not installed" in found.notes[0]


@needs_java
def test_with_java_nothing_is_left_out():
    found = scores_of_the_texts()
    assert found.meteor is not None
    assert found.notes == ()


@needs_java
def test_the_tokens_are_those_of_pycocoevalcap(capfd):
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    theirs = PTBTokenizer().tokenize({i: [{"caption": r} for r in group] for i, group in enumerate(REFERENCES)})
    tokens = scores_module._tokens_ptb(shutil.which("java"), TEXTS, REFERENCES)
    _, ours = scores_module._without_punctuation(*tokens)
    assert ours == [theirs[i] for i in range(len(REFERENCES))]


@needs_java
def test_a_java_that_fails_is_named(monkeypatch, tmp_path):
    broken = tmp_path / "java"
    broken.write_text("#!/bin/sh\necho no memory >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(scores_module.shutil, "which", lambda program: str(broken))
    with pytest.raises(InputError, match="no memory"):
        score(TEXTS, REFERENCES)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(InputError, match="METEOR, which Java runs, failed: no memory"):
        scores_module._meteor(TEXTS, REFERENCES)


@pytest.mark.parametrize("java", [pytest.param(True, marks=needs_java), False])
def test_texts_without_a_word_score_nothing(java, request):
    if not java:
        request.getfixturevalue("without_java")
    found = score(["", " \n", "??", "||| |||"], REFERENCES)
    assert (found.bleu, found.nist, found.rouge_l, found.cider) == (0, 0, 0, 0)
    assert not found.meteor


@pytest.mark.parametrize(
    ("texts", "references", "message"),
    [
        ([], [], "no texts"),
        (["a"], [], "1 texts were given with references for 0"),
        (["a"], [[]], "no reference with a word"),
        (["a"], [["", " . "]], "no reference with a word"),
        ("a", [["a"]], "a list of texts"),
        (["a"], ["a"], "a list of references"),
    ],
)
def test_wrong_input_is_refused(texts, references, message):
    with pytest.raises(InputError, match=message):
        score(texts, references)


def test_a_reference_without_a_word_matches_nothing():
    assert score(["..."], [["the mill serves thai food .", "..."]]).rouge_l == 0
