"""The language model of a finished run, ready to generate, and the meanings of its test texts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsl_sage.config import Config
from fsl_sage.engines.local import LocalEngine
from fsl_sage.errors import InputError
from fsl_sage.experiment import Federation
from fsl_sage.experiment.setup import make_setup
from fsl_sage.models import make_base_model, tokenizer_path
from fsl_sage.problems.make import is_text
from fsl_sage.problems.texts.e2e import Meaning, held_out_meanings
from fsl_sage.problems.texts.tokens import load_tokenizer
from fsl_sage.reading import read_json, short
from fsl_sage.records.run_directory import RunDirectory
from fsl_sage.seeding import derive


@dataclass(frozen=True)
class Trained:
    """A trained language model, its tokenizer and what to write about."""

    config: Config
    model: Any
    """A causal language model of transformers, float32, in evaluation mode; with peft's adapters in it."""
    tokenizer: Any
    test: list[Meaning]
    """The distinct meaning representations among the run's test texts, with all their references."""


def load_trained(directory: Path, *, adapter: bool = True) -> Trained:
    """The language model that a finished run has trained; without `adapter` as it was before the run."""
    run = RunDirectory(directory)
    config = run.config()
    if not is_text(config):
        raise InputError(
            f"{directory} is a run on {config.data.name}: samples are written for the meanings of E2E, so only one on "
            "e2e has them."
        )
    if not run.finished():
        raise InputError(f"{directory} is not finished: resume it by 'fsl-sage resume {directory}'.")
    with run.from_its_folder():
        path = tokenizer_path(config.model.name, config.data.tokenizer)
        if path is None:
            raise InputError(f"The tokenizer of {config.model.name}, which {directory} was trained with, is gone.")
        tokenizer = load_tokenizer(path)
        model = base_model(config)
    if adapter:
        model = _with_adapters(model, run.adapter, config)
    test = held_out_meanings(config.data.dir, config.data.test_images, config.seed)
    return Trained(config, model.eval(), tokenizer, test)


def _with_adapters(model: Any, folder: Path, config: Config) -> Any:
    """The model with the run's adapters, which are looked at first: peft takes pickles too, and any rank."""
    from peft import PeftModel

    try:
        said = read_json(folder / "adapter_config.json")
    except (OSError, InputError):
        said = None
    expected = isinstance(said, dict) and said.get("peft_type") == "LORA" and said.get("r") == config.lora.rank
    if not expected or not (folder / "adapter_model.safetensors").is_file():
        raise InputError(f"{folder} does not hold the adapters of this run: put it back as it was.")
    try:
        return PeftModel.from_pretrained(model, str(folder))
    except Exception as error:  # peft and torch report what does not fit by many types
        raise InputError(f"The adapters in {folder} do not fit {config.model.name}: {short(error)}.") from None


def masked_losses(directory: Path) -> dict[str, float]:
    """The masked loss of a run's test texts before training, and after its last round."""
    run = RunDirectory(directory)
    setup = make_setup(run.config())
    engine = LocalEngine(setup)
    try:
        before = Federation(setup, engine).evaluate()
    finally:
        engine.close()
    return {"before": before["test_loss"], "after": run.metrics()[-1]["test_loss"]}


def base_model(config: Config) -> Any:
    """The model that a run's training starts from; random weights are those that its seed gives."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "model"))
        return make_base_model(config.model.name)
