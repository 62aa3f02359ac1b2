"""The laws of codecs: what is sent is as long as it is said to be, and what is read lies as near as it is said to."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsl_sage.config import CodecConfig
from fsl_sage.errors import InputError
from fsl_sage.wire.codecs import CodecError, Codecs, Noise
from fsl_sage.wire.codecs.arrays import Label, decode_all, encode_all, encode_one, labelled, read_label
from fsl_sage.wire.codecs.cached import Cached, new_store
from fsl_sage.wire.codecs.casts import Cast
from fsl_sage.wire.codecs.change import Change
from fsl_sage.wire.codecs.chosen import array_codec
from fsl_sage.wire.codecs.compressed import Compressed
from fsl_sage.wire.codecs.groups import OfSmashed, OfWeights
from fsl_sage.wire.codecs.integers import Smallest
from fsl_sage.wire.codecs.quantise import Quantise, pack, unpack
from fsl_sage.wire.codecs.sparse import TopK
from fsl_sage.wire.codecs.whole import Whole
from fsl_sage.wire.message import ACTIVATIONS, CUT_GRADIENTS, LABELS

NOISE = Noise(0, "test")
GROUPINGS = {"smashed": OfSmashed(), "weights": OfWeights()}
WORDS = ["fp16", "bf16", "int8", "int4", "int2", "int8:nearest", "int4:nearest", "int2:nearest", "topk:0.1"]
ALL_WORDS = [*WORDS, "randtopk:0.3", *(f"{word}+zstd" for word in WORDS), "none+zstd"]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def codec_of(word, grouping="smashed"):
    return array_codec(CodecConfig(activations=word).spec("activations"), GROUPINGS[grouping])


def back(codec, x, noise=NOISE):
    return codec.decode(codec.encode(x, noise), x.shape, x.dtype)


shapes = st.lists(st.integers(1, 6), min_size=0, max_size=5).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@st.composite
def arrays(draw):
    """Arrays of any shape: zeros, constants, tiny and huge numbers, with an outlier or without."""
    shape, dtype = draw(shapes), draw(dtypes)
    scale = draw(st.sampled_from([0.0, 1e-40, 1e-20, 1e-3, 1.0, 1e3, 1e30]))
    offset = draw(st.sampled_from([0.0, 1.0, -100.0]))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31)))) * scale + offset
    if draw(st.booleans()) and x.numel():
        x.view(-1)[0] = 50 * scale
    if draw(st.booleans()) and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    return x.to(dtype)


# Lengths


@settings(max_examples=150, deadline=None)
@given(x=arrays(), word=st.sampled_from(ALL_WORDS), grouping=st.sampled_from(list(GROUPINGS)))
def test_a_payload_is_as_long_as_its_shape_says(x, word, grouping):
    codec = codec_of(word, grouping)
    if word.startswith("fp16") and x.numel() and float(x.abs().max()) > 6e4:
        return
    payload = encode_one(codec, x, NOISE)
    shape = encode_one(codec, x.to("meta"), NOISE)
    assert payload.dtype == shape.dtype == torch.uint8
    assert payload.dim() == 1
    assert len(payload) <= len(shape) if codec.varies else len(payload) == len(shape) == codec.size(x.shape, x.dtype)
    assert decode_all(codec, {labelled("x", x): shape})["x"].shape == x.shape


@pytest.mark.parametrize(
    ("word", "bytes"),
    [("fp16", 131072), ("int8", 65536 + 64), ("int4", 32768 + 64), ("int2", 16384 + 64), ("topk:0.1", 4 * 6560 + 8192)],
)
def test_lengths_of_a_batch_of_images(word, bytes):
    # 32 examples, 8 channels, 16 x 16: a channel's zero and step are 8 bytes; 205 of an example's 2048 numbers are kept
    assert codec_of(word).size((32, 8, 16, 16), torch.float32) == bytes


def test_scales_are_for_each_channel_token_or_output_channel():
    assert OfSmashed().shape((32, 8, 4, 4)) == (512, 8, 1)
    assert OfSmashed().shape((3, 7, 24)) == (1, 21, 24)
    assert OfSmashed().shape((32, 10)) == (32, 10, 1)
    assert OfWeights().shape((64, 3, 3, 3)) == (1, 64, 27)
    assert OfWeights().shape((64,)) == OfSmashed().shape((64,)) == (1, 1, 64)
    assert OfWeights().shape((64, 1, 3, 3)) == (1, 1, 576)  # nine numbers are too few for a scale of their own


# Distances


@settings(max_examples=150, deadline=None)
@given(x=arrays(), bits=st.sampled_from([8, 4, 2]), nearest=st.booleans(), grouping=st.sampled_from(list(GROUPINGS)))
def test_no_number_is_read_further_away_than_a_step(x, bits, nearest, grouping):
    if not x.numel():
        return
    groups = GROUPINGS[grouping]
    read = groups.cells(back(Quantise(bits, groups, nearest=nearest), x)).double()
    cells = groups.cells(x).double()
    step = (cells.amax((0, 2)) - cells.amin((0, 2))) / (2**bits - 1)
    rounding = 4e-7 * cells.abs().amax() if x.dtype != torch.bfloat16 else 2**-8 * cells.abs().amax()
    bound = step * (0.5 if nearest else 1) * (1 + 1e-3) + rounding + 2.0**-125
    assert bool(((cells - read).abs() <= bound[:, None]).all())


def test_the_ends_of_a_scale_and_zero_arrays_are_exact():
    x = torch.randn(32, 8, 4, 4).relu()
    read = back(Quantise(4, OfSmashed()), x)
    assert torch.equal(read[x == 0], x[x == 0])
    for word in ALL_WORDS:
        assert torch.equal(back(codec_of(word), torch.zeros(4, 3, 5, 5)), torch.zeros(4, 3, 5, 5))
        assert torch.equal(back(codec_of(word), torch.full((40,), 0.5)), torch.full((40,), 0.5)) or "topk" in word


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_the_mean_of_random_roundings_is_the_number(bits):
    x = torch.randn(64, 32, dtype=torch.float64)
    codec = Quantise(bits, OfWeights())
    count = 400
    mean = sum(back(codec, x, Noise(0, "mean", step=k)) for k in range(count)) / count
    step = (x.amax(1) - x.amin(1)) / (2**bits - 1)
    # A rounding's variance is at most step²/4: no mean is five of its deviations away, and the mean of all not two.
    deviation = step[:, None] / 2 / math.sqrt(count)
    assert bool(((mean - x).abs() <= 5 * deviation).all())
    assert float(((mean - x) / deviation).mean().abs()) <= 2 / math.sqrt(x.numel())


def test_nearest_is_nearer_and_draws_nothing():
    x = torch.randn(64, 32)
    nearest, random = Quantise(4, OfWeights(), nearest=True), Quantise(4, OfWeights())
    assert torch.equal(nearest.encode(x, NOISE), nearest.encode(x, Noise(1, "other")))
    assert not torch.equal(random.encode(x, NOISE), random.encode(x, Noise(1, "other")))
    assert float((back(nearest, x) - x).square().sum()) < float((back(random, x) - x).square().sum())


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_a_cast_is_a_cast(name):
    x = torch.randn(5, 6, 7, 8)
    read = back(Cast(name, OfSmashed()), x)
    assert torch.equal(read, x.to(getattr(torch, name)).float())


@settings(max_examples=50, deadline=None)
@given(codes=st.lists(st.integers(0, 255), min_size=1, max_size=40), bits=st.sampled_from([8, 4, 2]))
def test_packing_loses_nothing(codes, bits):
    codes = torch.tensor([code % 2**bits for code in codes], dtype=torch.uint8)
    packed = pack(codes, bits)
    assert len(packed) == -(-len(codes) * bits // 8)
    assert torch.equal(unpack(packed, bits, len(codes)), codes)


# The largest numbers


@settings(max_examples=80, deadline=None)
@given(x=arrays(), share=st.sampled_from([0.01, 0.1, 0.5, 0.99]), by_example=st.booleans())
def test_the_largest_are_exact_and_the_others_zero(x, share, by_example):
    if not x.numel():
        return
    codec = TopK(share, by_example=by_example)
    rows = codec.rows(x.shape)
    read, true, kept = back(codec, x).reshape(rows), x.reshape(rows), codec.kept(x.shape)
    assert kept == max(1, math.ceil(round(share * rows[1], 6)))
    sent = read != 0
    assert torch.equal(read[sent], true[sent])
    assert bool((sent.sum(1) <= kept).all())
    for row, numbers in zip(sent, true.abs(), strict=True):
        if bool(row.any()) and not bool(row.all()):
            assert float(numbers[row].min()) >= float(numbers[~row].max()) or int(row.sum()) < kept


@settings(max_examples=30, deadline=None)
@given(x=arrays(), by_example=st.booleans(), random=st.booleans())
def test_all_of_the_numbers_are_all_of_the_array(x, by_example, random):
    codec = TopK(1.0, by_example=by_example, random=random)
    if x.numel():
        assert torch.equal(back(codec, x), x)
    assert codec.size(x.shape, x.dtype) == x.numel() * x.element_size()


def test_some_slots_take_others_at_random():
    x = torch.arange(1.0, 1001).repeat(200, 1)
    read = back(TopK(0.1, by_example=True, random=True), x)
    others = (read[:, :900] != 0).sum(1).float()
    assert bool(((read != 0).sum(1) == 100).all())
    assert torch.equal(read[read != 0], x[read != 0])
    assert abs(float(others.mean()) - 10) < 5 * math.sqrt(9 / 200)
    counts = (read != 0).float().sum(0)
    assert abs(float(counts[900:].mean()) - 180) < 5
    assert float(counts[:900].std()) < 3  # evenly: a place is drawn 2.2 times of 200, give or take 1.5


# Compression


def test_what_zstd_does_not_shorten_travels_as_it_is():
    random = torch.randn(1000)
    assert torch.equal(Compressed(Whole()).encode(random[:1], NOISE), Whole().encode(random[:1], NOISE))
    zeros = torch.zeros(1000)
    assert len(Compressed(Whole()).encode(zeros, NOISE)) < 40
    for x in (random, zeros, random.relu()):
        assert torch.equal(back(Compressed(Whole()), x), x)


def test_zstd_changes_no_number():
    x = torch.randn(16, 4, 8, 8).relu()
    for word in WORDS:
        assert torch.equal(back(codec_of(word), x), back(codec_of(f"{word}+zstd"), x))


def test_without_the_package_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(InputError, match=r"pip install -c constraints.txt -e '\.\[codec\]'"):
        Codecs(CodecConfig(update="int4+zstd"))
    Codecs(CodecConfig(update="int4"))


# Labels


@pytest.mark.parametrize(("values", "width"), [(2, 1), (256, 1), (257, 2), (65536, 2), (65537, 4)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_labels_travel_in_the_smallest_type(values, width, dtype):
    labels = torch.tensor([[0, values - 1], [1, 0]], dtype=dtype)
    codec = Smallest(values)
    assert len(codec.encode(labels, NOISE)) == 4 * width == codec.size((2, 2), dtype)
    read = back(codec, labels)
    assert torch.equal(read, labels)
    assert read.dtype == dtype


def test_labels_that_are_no_classes_are_refused():
    for label in (-1, 10):
        with pytest.raises(CodecError, match=f"from {label} to {label} are not among 10 classes"):
            Smallest(10).encode(torch.tensor([label]), NOISE)


# What cannot be coded


@pytest.mark.parametrize("word", [word for word in ALL_WORDS if "none" not in word])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_not_finite_are_refused(word, bad):
    x = torch.randn(4, 3, 5, 5)
    x[1, 1, 1, 1] = bad
    with pytest.raises(CodecError, match=r"infinite|not finite"):
        codec_of(word).encode(x, NOISE)


def test_numbers_beyond_a_half_say_what_to_give():
    with pytest.raises(CodecError, match="Give bf16"):
        codec_of("fp16").encode(torch.tensor([1e5]), NOISE)
    assert float(back(codec_of("bf16"), torch.tensor([1e30]))) == pytest.approx(1e30, rel=0.01)


# Hostile payloads


@pytest.mark.parametrize("word", ALL_WORDS)
def test_a_payload_of_another_length_is_refused(word):
    x = torch.randn(8, 4, 6, 6)
    codec = codec_of(word)
    sent = encode_all(codec, {"x": x}, NOISE, lambda name, x: True)
    (label, payload), *_ = sent.items()
    assert torch.equal(decode_all(codec, sent)["x"], back(codec, x, NOISE.for_array("x")))
    wrong = [torch.cat([payload, payload[:1]]).repeat(2), payload[None], payload.float()]
    for other in wrong if codec.varies else [*wrong, payload[:-1], payload[:0]]:
        with pytest.raises(CodecError, match="bytes are expected"):
            decode_all(codec, {label: other})
    if codec.varies:
        for other in (payload[:-1], payload[:10]):
            with pytest.raises(CodecError, match=r"damaged|unpacks to|expected"):
                decode_all(codec, {label: other})


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0, 1e38])
def test_levels_that_cannot_be_are_refused(scale):
    x = torch.randn(8, 4, 6, 6)
    codec = Quantise(4, OfSmashed())
    payload = codec.encode(x, NOISE)
    payload[16:20] = torch.tensor([scale]).view(torch.uint8)  # the step of the first of four channels
    with pytest.raises(CodecError, match="levels that cannot be"):
        codec.decode(payload, x.shape, x.dtype)


def test_places_that_cannot_be_are_refused():
    x = torch.randn(2, 100)
    codec = TopK(0.1, by_example=True)
    payload = codec.encode(x, NOISE)
    payload[80:] = 255
    with pytest.raises(CodecError, match="not 10 of its 100"):
        codec.decode(payload, x.shape, x.dtype)
    codec = TopK(0.01, by_example=True)
    payload = codec.encode(x, NOISE)
    payload[8:12] = torch.tensor([200], dtype=torch.int32).view(torch.uint8)
    with pytest.raises(CodecError, match="outside its array"):
        codec.decode(payload, x.shape, x.dtype)


def test_a_bomb_is_refused_before_it_is_unpacked(monkeypatch):
    import zstandard

    codec = Compressed(Quantise(8, OfSmashed()))
    x = torch.randn(8, 4, 6, 6)
    bomb = zstandard.ZstdCompressor().compress(bytes(2**28))
    secretive = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(2**20))
    assert len(bomb) > codec.size(x.shape, x.dtype)  # too long already; a name that promises more lets it in
    wide = torch.empty(32, 64, 16, 16)
    monkeypatch.setattr(zstandard.ZstdDecompressor, "decompress", None)  # so that unpacking would be a TypeError
    for payload in (bomb, secretive):
        payload = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        with pytest.raises(CodecError, match=r"unpacks to .* where 524,800 are expected"):
            decode_all(codec, {labelled("x", wide): payload})


@pytest.mark.parametrize("label", ["x@float32[9999999999,9999999999]", "x@float32[1099511627776,2]"])
def test_a_name_that_promises_too_much_is_refused(label):
    with pytest.raises(CodecError, match="larger than any array"):
        read_label(label)


@pytest.mark.parametrize(
    "label", ["x@float32[" + "1" * 90, "x@float32[" + "1" * 90 + "]", "x@float32[" + "1," * 90 + "]"]
)
def test_a_name_made_to_take_for_ever_is_none(label):
    assert read_label(label) is None


def test_a_name_says_what_an_array_was():
    for x in (torch.empty(()), torch.empty(0, 3), torch.empty(2, 3, dtype=torch.float64), torch.empty(7).int()):
        assert read_label(labelled("client/a@b.weight", x)) == ("client/a@b.weight", x.dtype, tuple(x.shape))
    for plain in ("conv1.weight", "x@y", "x@float32", "x@str[3]"):
        assert read_label(plain) is None


# Differences


WEIGHTS = {"w": torch.linspace(-1, 1, 640).double().sin().view(32, 20), "b": torch.linspace(0, 2, 20).double()}


@pytest.mark.parametrize("word", ["int8", "int4", "int2", "int4:nearest", "topk:0.1", "fp16", "int4+zstd"])
@pytest.mark.parametrize("absolute", [False, True])
def test_error_feedback_telescopes(word, absolute):
    change = Change(codec_of(word, "weights"), absolute=absolute)
    held, lost, true, decoded = WEIGHTS, {}, 0.0, 0.0
    for t in range(6):
        step = {name: torch.randn_like(x) * 0.1 for name, x in held.items()}
        sent = change.encode({name: held[name] + step[name] for name in held}, held, lost, {"w", "b"}, Noise(t, "w"))
        true, decoded = true + step["w"], decoded + sent.decoded["w"] - held["w"]
        held, lost = sent.decoded, sent.lost
    assert torch.allclose(decoded, true - lost["w"], atol=1e-12)
    assert float(lost["w"].abs().max()) > 0


@pytest.mark.parametrize("word", ["int4", "topk:0.1", "bf16", "int2+zstd"])
def test_the_receiver_has_what_the_sender_thinks(word):
    change = Change(codec_of(word, "weights"))
    new = {name: x + 0.01 * torch.randn_like(x) for name, x in WEIGHTS.items()} | {"running_mean": torch.randn(3)}
    sent = change.encode(new, WEIGHTS, {}, {"w", "b"}, NOISE)
    assert sent.arrays["running_mean"] is new["running_mean"]  # statistics are not coded
    received = change.decode(sent.arrays, WEIGHTS)
    assert list(received) == list(new) == list(sent.decoded)
    assert all(torch.equal(received[name], sent.decoded[name]) for name in new)


def test_a_change_of_what_the_receiver_does_not_have_is_refused():
    change = Change(codec_of("int4", "weights"))
    sent = change.encode(WEIGHTS, WEIGHTS, {}, {"w", "b"}, NOISE)
    for held in ({"b": WEIGHTS["b"]}, {**WEIGHTS, "w": WEIGHTS["w"][:3]}, {**WEIGHTS, "w": WEIGHTS["w"].float()}):
        with pytest.raises(CodecError, match="no weight of this shape"):
            change.decode(sent.arrays, held)


# The same example once more


@settings(max_examples=25, deadline=None)
@given(
    bits=st.sampled_from([8, 4, 2]),
    nearest=st.booleans(),
    lengths=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    seed=st.integers(0, 2**31),
)
def test_both_ends_remember_what_was_read_of_an_example(bits, nearest, lengths, seed):
    draw = torch.Generator().manual_seed(seed)
    cached = Cached(Quantise(bits, OfSmashed(), nearest=nearest))
    sender, receiver = new_store(9), new_store(9)
    for t, length in enumerate(lengths):
        x = torch.randn(4, length, 20, generator=draw)
        places = torch.randperm(9, generator=draw)[:4].int()
        payload, sender = cached.encode(x, places, sender, Noise(t, "cached"))
        read, receiver = cached.decode(payload, Label("", x.dtype, tuple(x.shape)), places, receiver)
        assert torch.equal(sender, receiver)
        assert torch.equal(receiver[places.long(), :length], read)


@pytest.mark.parametrize(("bits", "nearest"), [(8, False), (4, False), (2, False), (2, True)])
def test_what_does_not_move_comes_nearer_each_time(bits, nearest):
    cached, x, places = (
        Cached(Quantise(bits, OfSmashed(), nearest=nearest)),
        torch.randn(4, 3, 64),
        torch.arange(4).int(),
    )
    store, before = new_store(4), None
    for t in range(3):
        payload, store = cached.encode(x, places, store, Noise(t, "cached"))
        assert len(payload) == cached.codec.size(x.shape, x.dtype)  # as long as the activation itself
        lost = float((x - store).abs().max())
        if before is not None:  # a step of what was left, which spans at most twice its largest number
            assert lost <= 2 * before / (2**bits - 1) * (0.5 if nearest else 1) * 1.01 + 1e-6
        before = lost


# What is chosen


def test_nothing_is_coded_by_default():
    codecs = Codecs()
    arrays = {"0": torch.randn(3, 4)}
    for kind in (ACTIVATIONS, CUT_GRADIENTS, LABELS):
        assert codecs.encode("up", kind, arrays, 0, 0, 0) is arrays
        assert codecs.decode(kind, arrays) is arrays
    assert codecs.update is None
    assert codecs.published == {}
    assert not codecs.sizes_vary


@pytest.mark.parametrize(
    ("option", "word"),
    [
        ("activations", "int3"),
        ("activations", "int4:up"),
        ("activations", "topk:0"),
        ("activations", "topk:1.5"),
        ("activations", "topk"),
        ("activations", "zstd"),
        ("update", "randtopk:0.1"),
        ("weights", "cached-int4"),
        ("gradients", "cached-int4"),
        ("auxiliary", "INT8"),
    ],
)
def test_words_that_mean_nothing_are_refused(option, word):
    with pytest.raises(InputError, match=rf"--codec.{option} .* is not possible: give none, fp16"):
        CodecConfig(**{option: word})


def test_a_preset_chooses_what_is_not_given():
    config = CodecConfig(preset="small", update="none")
    assert config.word("update") == "none"
    assert config.word("activations").startswith("int")
    assert CodecConfig().word("activations") == "none"


def test_noise_is_by_seed_transfer_client_round_and_step():
    keys = [Noise(0, "a", 1, 2, 3), Noise(1, "a", 1, 2, 3), Noise(0, "b", 1, 2, 3), Noise(0, "a", 2, 2, 3)]
    keys += [Noise(0, "a", 1, 3, 3), Noise(0, "a", 1, 2, 4), Noise(0, "a", 1, 2, 3).for_array("w")]
    drawn = [key.words(50).tolist() for key in keys]
    assert len({tuple(words) for words in drawn}) == len(keys)
    assert drawn[0] == Noise(0, "a", 1, 2, 3).words(50).tolist()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bool, torch.int64])
def test_labels_of_any_integer_type_come_back_under_their_name(dtype):
    codecs = Codecs(CodecConfig(labels="smallest"), 0, label_values=10)
    labels = torch.tensor([1, 0, 1], dtype=dtype)
    back = codecs.decode("labels", codecs.encode("up", "labels", {"labels": labels}, 0, 0, 0))
    assert list(back) == ["labels"]
    assert torch.equal(back["labels"], labels)
