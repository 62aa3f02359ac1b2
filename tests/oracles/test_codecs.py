"""FSL-SAGE with codecs against an oracle that codes one number at a time: weights, auxiliaries, exact bytes."""

from functools import partial

import pytest

from fsl_sage.wire.codecs import Noise, quantise
from fsl_sage.wire.codecs.change import Change
from fsl_sage.wire.ends import ClientEnd
from tests.oracles.coded import Coding, coded_fsl_sage
from tests.oracles.models import image_loss, image_terms
from tests.oracles.subject import compare, given_for, run_of
from tests.oracles.test_images import PARTS, SETTINGS

CODECS = {
    "int4": {"activations": "int4", "update": "int4", "weights": "int4", "auxiliary": "int4"},
    "mixed": {"activations": "int2", "update": "int8:nearest", "weights": "int4:nearest", "auxiliary": "int8"},
}


def words_of(seed, what, client, t, step, name, shape):
    """The random numbers that the package draws for an array, by place; it writes images channels last."""
    count = 1
    for size in shape:
        count *= size
    words = Noise(seed, f"codec/{what}", client, t, step).for_array(name).words(count)
    if what.endswith("activations"):
        return words.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
    return words.view(shape)


def check(config):
    setup, found, orders = run_of(config)
    given = given_for(config, setup, orders, {part: PARTS[part] for part in setup.initial}, image_loss, image_terms)
    specs = {name: config.codec.spec(name) for name in ("activations", "update", "weights", "auxiliary")}
    how = {name: (spec.bits, spec.nearest) for name, spec in specs.items()}
    compare(found, coded_fsl_sage(given, Coding(**how, noise=partial(words_of, config.seed))))


AWAY = "Dirichlet, cohort 2 of 3"


@pytest.mark.parametrize(
    ("setting", "codec", "scope"),
    [("iid", "int4", "pooled"), (AWAY, "int4", "client"), (AWAY, "mixed", "pooled"), ("iid", "mixed", "client")],
)
def test_fsl_sage_with_codecs(subject, setting, codec, scope):
    check(subject(SETTINGS[setting], codec=CODECS[codec], alignment={"scope": scope}))


# The oracle notices


def without_feedback(patch):
    encode = Change.encode
    patch.setattr(Change, "encode", lambda self, x, held, lost, *rest: encode(self, x, held, {}, *rest))


def wrong_noise(patch):
    patch.setattr(ClientEnd, "__init__", _in_another_round(ClientEnd.__init__))


def _in_another_round(init):
    def other(self, codecs, client, t, *rest):
        init(self, codecs, client, t + 1, *rest)

    return other


def rounded_half_a_step_off(patch):
    pack = quantise.pack
    patch.setattr(quantise, "pack", lambda codes, bits: pack((codes.int() - 1).clamp(min=0).to(codes.dtype), bits))


@pytest.mark.parametrize("fault", [without_feedback, wrong_noise, rounded_half_a_step_off])
def test_the_oracle_notices(subject, monkeypatch, fault):
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="is off by"):
        check(subject(codec=CODECS["int4"], rounds=2))
