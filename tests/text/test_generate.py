import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from fsl_sage.errors import InputError
from fsl_sage.text.generate import Decoding, generate

VOCABULARY, END = 40, 1
SIZES = {"vocab_size": VOCABULARY, "bos_token_id": END, "eos_token_id": END, "pad_token_id": END}


class Letters:
    """A tokenizer in which token n is the word "n"."""

    eos_token_id = END
    pad_token_id = None

    def batch_decode(self, rows, skip_special_tokens):
        assert skip_special_tokens
        return [" ".join(str(int(token)) for token in row if token != END) for row in rows]


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, **SIZES))


def llama():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **SIZES))


def opt():
    sizes = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=32, max_position_embeddings=64, **SIZES))


@pytest.fixture(params=[gpt2, llama, opt])
def model(request):
    torch.manual_seed(0)
    model = request.param()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # at its usual start a model is nearly indifferent, and rounding would choose the words
    return model


PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15], [16, 17, 18]]


def greedy_by_hand(model, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] == END:
            break
    return " ".join(str(token) for token in tokens[len(prompt) :] if token != END)


def test_greedy_is_the_likeliest_token_after_the_other_whatever_the_padding(model):
    model.eval()
    decoding = Decoding(beams=1, no_repeat_ngram=0, max_new_tokens=6)
    by_hand = [greedy_by_hand(model, prompt, 6) for prompt in PROMPTS]
    assert generate(model, Letters(), PROMPTS, decoding, batch_size=4) == by_hand
    assert len(set(by_hand)) > 1


def test_beams_find_texts_at_least_as_likely_as_greedy(model):
    model.eval()

    def likelihood(prompt, text):
        tokens = torch.tensor([[*prompt, *map(int, text.split())]])
        with torch.no_grad():
            steps = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return float(steps.gather(1, tokens[0, len(prompt) :, None]).mean())

    def texts(beams):
        decoding = Decoding(beams=beams, length_penalty=1, no_repeat_ngram=0, max_new_tokens=4)
        return generate(model, Letters(), PROMPTS, decoding)

    pairs = [
        (likelihood(prompt, one), likelihood(prompt, many))
        for prompt, one, many in zip(PROMPTS, texts(1), texts(VOCABULARY), strict=True)
        if len(one.split()) == len(many.split()) == 4
    ]
    assert pairs
    assert all(many >= one - 1e-5 for one, many in pairs)
    assert any(many > one for one, many in pairs)


def test_what_a_model_brings_for_its_own_search_does_not_count(model):
    plain = generate(model, Letters(), PROMPTS, Decoding(max_new_tokens=8))
    model.generation_config.repetition_penalty = 1e6
    model.generation_config.suppress_tokens = [int(word) for text in plain for word in text.split()]
    own = model.generation_config
    assert generate(model, Letters(), PROMPTS, Decoding(max_new_tokens=8)) == plain
    assert model.generation_config is own


def test_the_same_every_time_in_any_order_and_the_mode_is_left_as_it_was(model):
    model.train()
    torch.manual_seed(1)
    first = generate(model, Letters(), PROMPTS, Decoding(max_new_tokens=20))
    torch.manual_seed(2)
    turned = generate(model, Letters(), PROMPTS[::-1], Decoding(max_new_tokens=20))
    assert first == turned[::-1]
    assert model.training


def counting_model():
    """A GPT-2 whose next token after n is n + 1, and 5 after 8: a loop of four."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=VOCABULARY, n_layer=1, n_head=1, n_positions=64, **SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.ln_f.weight.fill_(1)
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(VOCABULARY, VOCABULARY))
        model.transformer.wte.weight = torch.nn.Parameter(torch.eye(VOCABULARY))
        for token in range(VOCABULARY):
            model.lm_head.weight[5 if token == 8 else (token + 1) % VOCABULARY, token] = 1
    return model


def test_ngrams_of_the_prompt_may_come_again_but_none_of_the_text():
    model = counting_model()
    free = generate(model, Letters(), [[5, 6, 7, 8]], Decoding(1, no_repeat_ngram=0, max_new_tokens=10))
    assert free == ["5 6 7 8 5 6 7 8 5 6"]
    once = generate(model, Letters(), [[5, 6, 7, 8]], Decoding(1, no_repeat_ngram=4, max_new_tokens=10))
    words = once[0].split()
    assert words[:7] == ["5", "6", "7", "8", "5", "6", "7"]
    assert words[7] != "8"


def test_a_text_ends_at_the_end_token_and_at_the_limit():
    model = counting_model()
    with torch.no_grad():
        model.lm_head.weight[:, 7] = 0
        model.lm_head.weight[END, 7] = 1
    decoding = Decoding(beams=2, max_new_tokens=3)
    assert generate(model, Letters(), [[4], [20], [6]], decoding) == ["5 6 7", "21 22 23", "7"]


def test_progress_counts_prompts():
    done = []
    generate(counting_model(), Letters(), PROMPTS, Decoding(1, max_new_tokens=1), batch_size=2, progress=done.append)
    assert done == [2, 4, 5]
    assert generate(counting_model(), Letters(), []) == []


@pytest.mark.parametrize("wrong", [{"beams": 0}, {"no_repeat_ngram": -1}, {"max_new_tokens": 0}])
def test_impossible_searches_are_refused(wrong):
    with pytest.raises(InputError, match=f"{next(iter(wrong))} = .* is not possible"):
        Decoding(**wrong)


def test_impossible_prompts_are_refused():
    with pytest.raises(InputError, match="without tokens"):
        generate(counting_model(), Letters(), [[]])
    with pytest.raises(InputError, match="a batch of 0"):
        generate(counting_model(), Letters(), PROMPTS, batch_size=0)
    with pytest.raises(InputError, match="a prompt of 5 tokens and a text of 60 are more than the model's 64"):
        generate(counting_model(), Letters(), PROMPTS, Decoding(max_new_tokens=60))
    endless = Letters()
    endless.eos_token_id = None
    with pytest.raises(InputError, match="no end-of-text token"):
        generate(counting_model(), endless, PROMPTS)
