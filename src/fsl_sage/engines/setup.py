"""From a configuration to what an engine starts from: data and partition, model and parts, settings."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fsl_sage.algorithms import Algorithm, make_algorithm
from fsl_sage.config import Config, DataConfig, ModelConfig
from fsl_sage.engines.base import Setup
from fsl_sage.errors import InputError
from fsl_sage.models import (
    MODELS,
    check_model_name,
    is_language_model,
    make_language_model,
    make_model,
    replace_batch_norm,
    statistics_names,
    tokenizer_path,
    train_auxiliary,
    usual_auxiliary,
    usual_cut,
)
from fsl_sage.precision import dtype_of
from fsl_sage.problems.base import Task
from fsl_sage.problems.images.classification import Classification
from fsl_sage.problems.images.images import KNOWN_SIZES, ImageData, Images, Sizes
from fsl_sage.problems.images.sources import load_images
from fsl_sage.problems.partition import client_sizes, partition
from fsl_sage.problems.texts.e2e import find_e2e, load_e2e
from fsl_sage.problems.texts.language_modelling import LanguageModelling
from fsl_sage.problems.texts.texts import KNOWN_TEXTS, TextData, TextSizes
from fsl_sage.roles.client import local_batch_sizes
from fsl_sage.roles.f_server import client_weights
from fsl_sage.roles.replica import Slots
from fsl_sage.roles.work import Settings, draws_in_forward
from fsl_sage.seeding import derive, numpy_generator
from fsl_sage.split import Analysis, auxiliary, split_model

META = torch.device("meta")
LANGUAGE_SMOOTHING = 0.1
"""Label smoothing for texts, as in the LoRA paper."""

Data = ImageData | TextData
AnySizes = Sizes | TextSizes


def make_setup(config: Config) -> Setup:
    """Everything with its data and numbers."""
    algorithm = make_algorithm(config)
    check_model_name(config.model.name)
    device = pick_device(config.device)
    data = load_data(config)
    examples = divide(config, data.train.y)
    modules = build_parts(config, data.sizes, device)
    _check_trained(config, modules)
    return assemble(config, algorithm, make_task(config, data, device), modules, examples)


def make_dry_setup(config: Config) -> Setup:
    """Shapes only; reads the data only where their sizes are not known and it is there."""
    check_model_name(config.model.name)
    known = known_sizes(config)
    if known is None:
        data = _load_once(config.data, config.model.name, config.seed)
        if isinstance(data, TextData):
            return _dry_setup(config, data.sizes, make_task(config, data, META), divide(config, data.train.y))
        known = data.sizes
    if config.data.partition == "restaurant":
        raise InputError("With --data.partition restaurant a run's cost depends on the texts: give --data.dir.")
    return dry_setup(config, known, client_sizes(known.train, config.clients))


@lru_cache(maxsize=1)  # the same for all algorithms that `cost` asks for
def _load_once(data: DataConfig, model: str, seed: int) -> Data:
    return load_data(replace(Config(), data=data, model=ModelConfig(name=model), seed=seed))


def dry_setup(config: Config, sizes: AnySizes, counts: Sequence[int]) -> Setup:
    """Shapes only, for clients with so many examples each."""
    examples = [torch.empty(count, dtype=torch.int64, device=META) for count in counts]
    task: Task
    if isinstance(sizes, TextSizes):
        task = LanguageModelling(None, META, longest=sizes.longest)
    else:
        task = Classification(_shapes(sizes), META, augment=False, dtype=dtype_of(config.precision))
    return _dry_setup(config, sizes, task, examples)


def _dry_setup(config: Config, sizes: AnySizes, task: Task, examples: list[Tensor]) -> Setup:
    model_alone = replace(Config(), model=config.model, lora=config.lora, precision=config.precision)
    modules = _shape_parts(model_alone, sizes, MODELS.get(config.model.name))
    return assemble(config, make_algorithm(config), task, modules, examples)


@lru_cache(maxsize=16)  # the same for all algorithms and data that `cost` or a grid asks for
def _shape_parts(config: Config, sizes: AnySizes, factory: object) -> dict[str, nn.Module]:
    return build_parts(config, sizes, META)


def assemble(
    config: Config, algorithm: Algorithm, task: Task, modules: dict[str, nn.Module], examples: list[Tensor]
) -> Setup:
    """A setup of its pieces: what follows from them is the same on every engine."""
    counts = [len(indices) for indices in examples]
    settings = Settings(
        config,
        task,
        task.device,
        steps=max(len(local_batch_sizes(count, config)) for count in counts),
        draws=any(draws_in_forward(module) for module in modules.values()),
        stays_local=_stays_local(config, modules),
    )
    initial = {part: Slots(module).tensors() for part, module in modules.items()}
    return Setup(settings, algorithm, modules, initial, examples, client_weights(config.weighting, counts))


# What differs between images and text


def load_data(config: Config) -> Data:
    """The training and the test set."""
    data = config.data
    if data.name not in KNOWN_TEXTS:
        return load_image_data(config)
    tokenizer = tokenizer_path(config.model.name, data.tokenizer)
    if tokenizer is None:
        raise InputError(
            f"--model.name {config.model.name} brings no tokenizer: give the directory of one by --data.tokenizer."
        )
    return load_e2e(
        data.dir,
        tokenizer,
        longest=data.sequence_length,
        train_texts=data.train_images,
        test_texts=data.test_images,
        seed=config.seed,
    )


def load_image_data(config: Config) -> ImageData:
    """Both sets, of images."""
    data = config.data
    return load_images(
        data.name,
        data.dir,
        test_fraction=data.test_fraction,
        train_images=data.train_images,
        test_images=data.test_images,
        seed=config.seed,
    )


def make_task(config: Config, data: Data, device: torch.device) -> Task:
    """What is learnt from the data."""
    smoothing = config.optimizer.label_smoothing
    if isinstance(data, TextData):
        smoothing = LANGUAGE_SMOOTHING if smoothing is None else smoothing
        return LanguageModelling(data, device, longest=data.longest, label_smoothing=smoothing)
    return Classification(
        data,
        device,
        augment=config.data.augment,
        label_smoothing=smoothing or 0.0,
        dtype=dtype_of(config.precision),
    )


def data_sizes(config: Config) -> AnySizes:
    """The sizes of the configured data; reads it only where they are not known."""
    return known_sizes(config) or load_data(config).sizes


def known_sizes(config: Config) -> AnySizes | None:
    """What can be known of a data set without reading it; None where it is there and reading tells more."""
    data = config.data
    if data.name in KNOWN_TEXTS:
        if find_e2e(data.dir) and tokenizer_path(config.model.name, data.tokenizer):
            return None
        train, test = KNOWN_TEXTS[data.name]
        return TextSizes(
            min(data.train_images or train, train), min(data.test_images or test, test), data.sequence_length
        )
    sizes = KNOWN_SIZES.get(data.name)
    if sizes is None:
        return None
    train = min(data.train_images or sizes.train, sizes.train)
    return Sizes(train, min(data.test_images or sizes.test, sizes.test), sizes.classes, sizes.image)


def _check_trained(config: Config, modules: dict[str, nn.Module]) -> None:
    for part, module in modules.items():
        if not any(parameter.requires_grad for parameter in module.parameters()):
            where = f"--model.cut {config.model.cut}" if config.model.cut else "its usual cut"
            raise InputError(f"The {part} part of {config.model.name} has nothing to train at {where}: cut elsewhere.")


def _shapes(sizes: Sizes) -> ImageData:
    """Images of the right number and shape on the meta device."""
    train, test = (
        Images(
            torch.empty(count, *sizes.image, dtype=torch.uint8, device=META),
            torch.empty(count, dtype=torch.int64, device=META),
        )
        for count in (sizes.train, sizes.test)
    )
    ones = (1.0,) * sizes.image[0]
    return ImageData("shapes", train, test, ("",) * sizes.classes, ones, ones)


def divide(config: Config, labels: Tensor) -> list[Tensor]:
    """The partition of the training examples: for each client the indices of its own."""
    rng = numpy_generator(config.seed, "partition")
    data = config.data
    shares = partition(
        labels.cpu().numpy(),
        config.clients,
        data.partition,
        alpha=data.alpha,
        shards_per_client=data.shards_per_client,
        rng=rng,
    )
    return [torch.as_tensor(indices, dtype=torch.int64) for indices in shares]


def build_model(config: Config, sizes: AnySizes, device: torch.device) -> nn.Module:
    """The unsplit model with its initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "model"))
        # Drawn on the CPU whatever the device, so that every device starts from the same weights.
        with torch.device(META if device == META else "cpu"):
            if isinstance(sizes, TextSizes):
                return make_language_model(config.model.name, config.lora, sizes.vocabulary)
            model = make_model(config.model.name, sizes.classes, sizes.image)
            if config.model.batch_norm == "group":
                replace_batch_norm(model)
    return model


def build_parts(config: Config, sizes: AnySizes, device: torch.device) -> dict[str, nn.Module]:
    """The model, cut in two, and the auxiliary."""
    return cut_model(config, build_model(config, sizes, device), sizes, device)


def cut_model(config: Config, model: nn.Module, sizes: AnySizes, device: torch.device) -> dict[str, nn.Module]:
    """The parts of a model that is built; they hold its tensors."""
    example = sizes.example(2, META if device == META else "cpu")
    split = split_model(model, _cut(config, model, example), example)
    # Drawn and split in float32 whatever the precision, so that every precision starts from the same weights.
    there: dict[str, Any] = {"device": device, "dtype": dtype_of(config.precision)}
    if len(config.model.cuts) == 2:  # a U-shape has no auxiliary: its server does not compute the loss
        return {part.name: part.to(**there) for part in split.parts}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "auxiliary"))
        estimator = auxiliary(split, config.model.auxiliary or usual_auxiliary(model), aligned=device != META)
    if is_language_model(model):
        train_auxiliary(estimator, model, config.lora)
    parts = {"client": split.client, "server": split.server, "auxiliary": estimator}
    return {part: module.to(**there) for part, module in parts.items()}


def _cut(config: Config, model: nn.Module, example: Any) -> str | tuple[str, str]:
    if len(config.model.cuts) == 2:
        first, second = config.model.cuts
        return first, second
    cut = config.model.cut or usual_cut(config.model.name, model)
    if cut is None:
        names = ", ".join(Analysis(model, example).cut_names)
        raise InputError(f"{config.model.name} has no usual cut: give --model.cut, one of {names}.")
    return cut


def _stays_local(config: Config, modules: dict[str, nn.Module]) -> dict[str, frozenset[str]]:
    if config.model.batch_norm != "local":
        return {}
    return {part: frozenset(statistics_names(module)) for part, module in modules.items()}


def pick_device(name: str) -> torch.device:
    """`auto`: a GPU where there is one."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next(kind for kind in ("cuda", "mps", "cpu") if available[kind])
    if not available.get(name.split(":")[0], False):
        have = ", ".join(["auto", *(kind for kind, there in available.items() if there)])
        raise InputError(f"--device {name} is not available here: give one of {have}.")
    try:
        return torch.device(name)
    except RuntimeError:
        raise InputError(f"--device {name} is not possible: give auto, cpu, cuda, cuda:N or mps.") from None
