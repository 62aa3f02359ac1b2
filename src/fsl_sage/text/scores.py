"""BLEU, NIST, METEOR, ROUGE-L and CIDEr of generated texts, each against several references.

The choices are those of the E2E challenge's own script, so that figures can stand beside published ones, if they are
made from all meaning representations of the test set and all references of each:

- BLEU by sacrebleu: 13a tokens in lower case, no smoothing, the length of the closest reference.
- NIST up to 5-grams on the same tokens: a text's n-grams are matched with those of all its references together and its
  length with their mean length. nltk gives the n-grams and the penalty; its own `corpus_nist` matches with one
  reference at a time, which is the same for one reference and 12 % lower for the E2E test set's.
- METEOR 1.5, ROUGE-L (F with beta 1.2) and CIDEr-D by pycocoevalcap, on PTB tokens in lower case without punctuation.

The PTB tokenizer and METEOR are Java programs. Without Java, METEOR is left out and ROUGE-L and CIDEr take the 13a
tokens without punctuation: for people's own texts of the E2E test set that makes 64.37 of 64.44 and 1.807 of 1.818.
`Scores.notes` says so.

CIDEr weighs n-grams by how rare they are among the scored texts, so its value depends on which and how many they are;
for a single text it is 0. None of the five knows what is true: a text that names another restaurant may score well.
"""

import atexit
import math
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsl_sage.errors import InputError, MissingExtra

SCORES = {"bleu": "BLEU", "nist": "NIST", "meteor": "METEOR", "rouge_l": "ROUGE-L", "cider": "CIDEr"}
"""The fields of `Scores` that are scores, with their usual names; higher is better for each."""

_NIST_ORDER = 5
_METEORS_SEPARATOR = "|||"
_WITHOUT_JAVA = (
    "METEOR is left out and ROUGE-L and CIDEr use 13a tokens instead of PTB tokens, because Java is not installed"
)

Texts = list[str]
References = list[Texts]


@dataclass(frozen=True)
class Scores:
    """The five scores of a set of texts."""

    texts: int
    """How many texts were scored."""
    bleu: float
    """0 to 100."""
    nist: float
    """From 0, without a fixed maximum."""
    meteor: float | None
    """0 to 100; None without Java."""
    rouge_l: float
    """0 to 100."""
    cider: float
    """0 to 10."""
    notes: tuple[str, ...] = ()
    """What differs from the usual way, in sentences."""


def score(generated: Sequence[str], written: Sequence[Sequence[str]]) -> Scores:
    """The scores of `generated` texts, each against the references that people have `written` for it, one or more."""
    _check(generated, written)
    texts, references = [_one_line(text) for text in generated], [[_one_line(r) for r in group] for group in written]
    java = shutil.which("java")
    tokens = _tokens_13a(texts, references)
    coco = _without_punctuation(*(_tokens_ptb(java, texts, references) if java else tokens))
    return Scores(
        texts=len(texts),
        bleu=_bleu(texts, references),
        nist=_nist(*tokens),
        meteor=_meteor(*coco) if java else None,
        rouge_l=_rouge_l(*coco),
        cider=_cider(*coco),
        notes=() if java else (_WITHOUT_JAVA,),
    )


def _check(texts: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    if isinstance(texts, str) or any(isinstance(group, str) for group in references):
        raise InputError("a single text was given to score: give a list of texts, and for each a list of references.")
    if not texts:
        raise InputError("no texts were given to score: there must be at least one.")
    if len(texts) != len(references):
        raise InputError(f"{len(texts)} texts were given with references for {len(references)}: each text needs some.")
    for place, group in enumerate(references):
        if not any(character.isalnum() for reference in group for character in reference):
            raise InputError(f"text {place} of {len(texts)} has no reference with a word in it: each needs one.")


def _one_line(text: str) -> str:
    """Without line breaks, which part texts in what the Java programs read, and with single spaces."""
    return " ".join(text.split())


# -- on 13a tokens -----------------------------------------------------------------------------------------------------


def _tokens_13a(texts: Texts, references: References) -> tuple[list[Texts], list[list[Texts]]]:
    """Each text and each reference as a list of lower-case tokens."""
    try:
        from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
    except ImportError:
        raise MissingExtra("scoring texts", "llm") from None
    tokenize = Tokenizer13a()  # type: ignore[no-untyped-call]

    def tokens(text: str) -> Texts:
        return tokenize(text.lower()).split()

    return [tokens(text) for text in texts], [[tokens(reference) for reference in group] for group in references]


def _bleu(texts: Texts, references: References) -> float:
    from sacrebleu.metrics.bleu import BLEU

    most = max(map(len, references))
    streams: Any = [[group[nth] if nth < len(group) else None for group in references] for nth in range(most)]
    metric = BLEU(lowercase=True, tokenize="13a", smooth_method="none")
    return float(metric.corpus_score(texts, streams).score)


def _nist(texts: list[Texts], references: list[list[Texts]]) -> float:
    """The sum over orders of the information that matched n-grams carry, a mean over all n-grams of the texts."""
    from nltk.translate.nist_score import nist_length_penalty

    orders = range(1, min(_NIST_ORDER, max(map(len, texts))) + 1)  # no text has n-grams beyond the longest text
    everywhere: Counter[tuple[str, ...]] = Counter()
    for group in references:
        for reference in group:
            everywhere[()] += len(reference)
            for order in orders:
                everywhere.update(_ngrams(reference, order))
    total = 0.0
    for order in orders:
        information, count = 0.0, 0
        for text, group in zip(texts, references, strict=True):
            of_text, of_references = _ngrams(text, order), Counter[tuple[str, ...]]()
            for reference in group:
                of_references |= _ngrams(reference, order)
            matched = of_text & of_references
            information += sum(times * math.log2(everywhere[n[:-1]] / everywhere[n]) for n, times in matched.items())
            count += of_text.total()
        total += information / count
    mean_length = sum(sum(map(len, group)) / len(group) for group in references)
    return total * float(nist_length_penalty(mean_length, sum(map(len, texts))))


def _ngrams(tokens: Texts, order: int) -> "Counter[tuple[str, ...]]":
    from nltk.util import ngrams

    return Counter(ngrams(tokens, order))


# -- on PTB tokens without punctuation ---------------------------------------------------------------------------------


def _tokens_ptb(java: str, texts: Texts, references: References) -> tuple[list[Texts], list[list[Texts]]]:
    """Texts and references as Stanford's PTB tokenizer parts them, in lower case.

    The jar is called as pycocoevalcap calls it, which would first write a file into the installed package.
    """
    from pycocoevalcap.tokenizer import ptbtokenizer

    lines = [*texts, *(reference for group in references for reference in group)]
    jar = Path(ptbtokenizer.__file__).with_name(ptbtokenizer.STANFORD_CORENLP_3_4_1_JAR)
    command = [java, "-cp", str(jar), "edu.stanford.nlp.process.PTBTokenizer", "-preserveLines", "-lowerCase"]
    command += ["-encoding", "UTF-8"]
    done = subprocess.run(command, input="".join(f"{line}\n" for line in lines).encode(), capture_output=True)
    tokenized = done.stdout.decode().split("\n")[:-1]
    if done.returncode != 0 or len(tokenized) != len(lines):
        reason = (done.stderr.decode(errors="replace").strip().splitlines() or ["it gave another number of lines"])[0]
        raise InputError(f"the PTB tokenizer, which {java} runs, failed: {reason}.")
    tokens = [line.split() for line in tokenized]
    remaining = iter(tokens[len(texts) :])
    return tokens[: len(texts)], [[next(remaining) for _ in group] for group in references]


def _without_punctuation(texts: list[Texts], references: list[list[Texts]]) -> tuple[Texts, References]:
    from pycocoevalcap.tokenizer.ptbtokenizer import PUNCTUATIONS

    dropped = {*PUNCTUATIONS, _METEORS_SEPARATOR}

    def kept(tokens: Texts) -> str:
        return " ".join(token for token in tokens if token not in dropped)

    # A reference without a word would match every text without one.
    groups = [[words for reference in group if (words := kept(reference))] for group in references]
    return [kept(text) for text in texts], groups


def _rouge_l(texts: Texts, references: References) -> float:
    from pycocoevalcap.rouge.rouge import Rouge

    return 100 * float(Rouge().compute_score(*_keyed(texts, references))[0])


def _cider(texts: Texts, references: References) -> float:
    from pycocoevalcap.cider.cider import Cider

    return float(Cider().compute_score(*_keyed(texts, references))[0])


def _meteor(texts: Texts, references: References) -> float:
    """It takes Java seconds to load METEOR's tables, so the program stays for the next texts until Python ends."""
    from pycocoevalcap.meteor.meteor import Meteor

    java = shutil.which("java")
    meteor = _METEORS.pop(java, None) or Meteor()
    process = meteor.meteor_p
    try:
        found = 100 * float(meteor.compute_score(*_keyed(texts, references))[0])
    except (ValueError, OSError) as error:  # a line that is no number, or a closed pipe: Java has given up
        process.kill()
        reason = (process.stderr.read().decode(errors="replace").strip().splitlines() or [str(error)])[0]
        _end(meteor)
        raise InputError(f"METEOR, which Java runs, failed: {reason}.") from error
    except BaseException:  # an interrupt: what it would answer next is of these texts
        _end(meteor)
        raise
    _METEORS[java] = meteor
    return found


_METEORS: dict[str | None, Any] = {}
"""Those that wait for texts, by the Java that runs them."""


@atexit.register
def _end_all() -> None:
    for meteor in _METEORS.values():
        _end(meteor)


def _end(meteor: Any) -> None:
    """Left alone it would leave its streams open, and where it failed wait for its own lock."""
    process = meteor.meteor_p
    with suppress(OSError):
        process.stdin.close()
    process.stdout.close()
    process.stderr.close()
    if meteor.lock.locked():
        meteor.lock.release()
    process.kill()
    process.wait()


def _keyed(texts: Texts, references: References) -> tuple[dict[int, Texts], dict[int, Any]]:
    """What pycocoevalcap takes: references, then texts, by a key."""
    return dict(enumerate(references)), {place: [text] for place, text in enumerate(texts)}
