"""From a configuration to what an engine starts from: data and partition, model and parts, settings."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from fsl_sage.algorithms import Algorithm, make_algorithm
from fsl_sage.config import Config, DataConfig
from fsl_sage.data import KNOWN_SIZES, ImageData, Images, Sizes, client_sizes, load_images, partition
from fsl_sage.engines.base import Setup
from fsl_sage.errors import InputError
from fsl_sage.models import DEFAULT_CUT, MODELS, check_model_name, make_model, replace_batch_norm, statistics_names
from fsl_sage.roles.client import local_batch_sizes
from fsl_sage.roles.f_server import client_weights
from fsl_sage.roles.replica import Slots
from fsl_sage.roles.work import Settings, draws_in_forward
from fsl_sage.seeding import derive, numpy_generator
from fsl_sage.split import Analysis, auxiliary, split_model
from fsl_sage.tasks import Classification

META = torch.device("meta")


def make_setup(config: Config) -> Setup:
    """Everything with its data and numbers."""
    algorithm = make_algorithm(config)
    check_model_name(config.model.name)
    device = pick_device(config.device)
    data = _load(config)
    examples = divide(config, data.train.y)
    modules = build_parts(config, data.sizes, device)
    return assemble(config, algorithm, Classification(data, device, augment=config.data.augment), modules, examples)


def make_dry_setup(config: Config) -> Setup:
    """Shapes only; reads the data only where their sizes are not known."""
    check_model_name(config.model.name)
    sizes = data_sizes(config)
    return dry_setup(config, sizes, client_sizes(sizes.train, config.clients))


def dry_setup(config: Config, sizes: Sizes, counts: Sequence[int]) -> Setup:
    """Shapes only, for clients with so many examples each."""
    examples = [torch.empty(count, device=META) for count in counts]
    task = Classification(_shapes(sizes), META, augment=False)
    modules = _shape_parts(replace(Config(), model=config.model), sizes, MODELS.get(config.model.name))
    return assemble(config, make_algorithm(config), task, modules, examples)


@lru_cache(maxsize=16)  # the same for all algorithms and data that `cost` or a grid asks for
def _shape_parts(config: Config, sizes: Sizes, factory: object) -> dict[str, nn.Module]:
    return build_parts(config, sizes, META)


def assemble(
    config: Config, algorithm: Algorithm, task: Classification, modules: dict[str, nn.Module], examples: list[Tensor]
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


def _load(config: Config) -> ImageData:
    data = config.data
    return load_images(
        data.name,
        data.dir,
        test_fraction=data.test_fraction,
        train_images=data.train_images,
        test_images=data.test_images,
        seed=config.seed,
    )


def data_sizes(config: Config) -> Sizes:
    """The sizes of the configured data; reads it only where they are not known."""
    return known_sizes(config.data) or _load(config).sizes


def known_sizes(data: DataConfig) -> Sizes | None:
    """What can be known of a data set without reading it."""
    sizes = KNOWN_SIZES.get(data.name)
    if sizes is None:
        return None
    train = min(data.train_images or sizes.train, sizes.train)
    return Sizes(train, min(data.test_images or sizes.test, sizes.test), sizes.classes, sizes.image)


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


def build_model(config: Config, sizes: Sizes, device: torch.device) -> nn.Module:
    """The unsplit model with its initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "model"))
        # Drawn on the CPU whatever the device, so that every device starts from the same weights.
        with torch.device(META if device == META else "cpu"):
            model = make_model(config.model.name, sizes.classes, sizes.image)
            if config.model.batch_norm == "group":
                replace_batch_norm(model)
    return model


def build_parts(config: Config, sizes: Sizes, device: torch.device) -> dict[str, nn.Module]:
    """The model, cut in two, and the auxiliary."""
    model = build_model(config, sizes, device)
    example = torch.zeros(2, *sizes.image, device=META if device == META else "cpu")
    split = split_model(model, _cut(config, model, example), example)
    if len(config.model.cuts) == 2:  # a U-shape has no auxiliary: its server does not compute the loss
        return {part.name: part.to(device) for part in split.parts}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "auxiliary"))
        estimator = auxiliary(split, config.model.auxiliary, aligned=device != META)
    parts = {"client": split.client, "server": split.server, "auxiliary": estimator}
    return {part: module.to(device) for part, module in parts.items()}


def _cut(config: Config, model: nn.Module, example: Tensor) -> str | tuple[str, str]:
    if len(config.model.cuts) == 2:
        first, second = config.model.cuts
        return first, second
    cut = config.model.cut or DEFAULT_CUT.get(config.model.name)
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
