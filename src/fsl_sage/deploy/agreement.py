"""What server and sites have agreed on: the configuration, and the sizes and the meaning of the data."""

from dataclasses import dataclass, replace
from pathlib import Path

from fsl_sage.algorithms import make_algorithm, names_where, resolve
from fsl_sage.config import Config, from_dict, option, to_dict
from fsl_sage.errors import InputError
from fsl_sage.own_modules import find_modules_in
from fsl_sage.problems.classification import BALANCED, Classes
from fsl_sage.problems.sites import Terms
from fsl_sage.problems.texts.language_modelling import LanguageModelling
from fsl_sage.reading import read_json
from fsl_sage.records.files import write_json

MODEL = "model"
"""The directory in the app, beside its configuration, with the configuration of a model hf:PATH."""


@dataclass(frozen=True)
class Agreement(Terms):
    """What every site and the server must see in the same way."""

    examples: tuple[int, ...] = ()
    """For each client the number of its training examples. Averages and learning rates depend on them."""


def check(config: Config, agreement: Agreement) -> None:
    """Refuse what cannot run on Flower, with the reason."""
    algorithm = make_algorithm(config)
    algorithm.check()
    for name in ("theory", "parameter_fidelity"):
        if getattr(config, name) is not None:
            raise InputError(
                f"{option(name)} cannot run on Flower: it needs the clients' data, which stay at the sites."
            )
    if any(algorithm.waits_in(t) for t in range(config.rounds)):
        others = names_where(lambda kind: not kind.waits and not kind.own_parts)
        raise InputError(
            f"{config.algorithm} cannot run on Flower with these options: its clients wait for {algorithm.waits_for}, "
            "and Flower starts a process for every message. Run it with --engine ray; of the algorithms "
            f"{', '.join(others)} wait for nothing unless an option says so."
        )
    if algorithm.own_parts:
        raise InputError(
            f"{config.algorithm} cannot run on Flower: the evaluation would need every site's own part of the model, "
            "which does not leave it. Run it with --engine ray."
        )
    if config.model.batch_norm == "local":
        raise InputError(
            "--model.batch-norm local cannot run on Flower: the evaluation would need every site's statistics, which "
            "do not leave it. Give average or group."
        )
    if any(set(algorithm.averaged) - set(algorithm.averaged_in(t)) for t in range(config.rounds)):
        raise InputError(
            f"{config.algorithm} cannot run on Flower with these options: in some rounds nothing is averaged, and the "
            "evaluation would need every site's own weights, which do not leave it. Average in every round."
        )
    if config.order == "arrival":
        raise InputError(
            "--order arrival cannot run on Flower, where uploads come at the end of a round: give interleaved."
        )
    if config.data.class_weights == BALANCED:
        raise InputError(
            "--data.class-weights balanced cannot run on Flower: no process knows all sites' labels. Give the weights."
        )
    if len(agreement.examples) != config.clients or min(agreement.examples) < 2:
        raise InputError(
            f"The numbers of examples {list(agreement.examples)} do not fit --clients {config.clients}: "
            "give one for each client, from 2 up."
        )
    agreement.check()


def what_leaves(config: Config, labels: str) -> str:
    """What of a site's data is seen by whoever runs the servers, in a sentence.

    Args:
        config: Says by which algorithm.
        labels: What a batch's target tells of its examples.
    """
    algorithm = make_algorithm(config)
    if not algorithm.has_s_server:
        return "Of a site's data nothing leaves it but what its trained weights tell."
    return (
        f"What leaves a site: the activations at the cut of every batch that it uploads, and {labels}. Whoever runs "
        "the S-server sees them, and can reconstruct inputs in part from activations. All else of its data stays."
    )


def agreed_on(config: Config, agreement: Agreement) -> list[str]:
    """What a site must have and know before it joins, in sentences."""
    texts = agreement.texts
    said = []
    if texts.kind:
        said.append(
            f"Every site needs the same tokenizer, of {texts.vocabulary:,} tokens, and texts of at most "
            f"{texts.longest} tokens."
        )
    if agreement.classes:
        said.append(f"The classes, in this order: {', '.join(agreement.classes)}.")
    labels = {"prompts": LanguageModelling.labels_are, "labels": Classes.labels_are}.get(texts.kind, Classes.labels_are)
    return [*said, what_leaves(config, "the target of every example" if agreement.own else labels)]


def write_agreement(path: Path, config: Config, agreement: Agreement) -> None:
    """The file that an app carries to the server and to every site."""
    check(config, agreement)
    write_json(path, {"config": to_dict(config), "federation": to_dict(agreement)})


def read_agreement(path: Path) -> tuple[Config, Agreement]:
    """What `write_agreement` wrote; the app that it lies in may bring the module of its algorithm."""
    find_modules_in(path.parents[1])
    try:
        values = read_json(path)
        agreement: Agreement = from_dict(values["federation"], Agreement())
        config: Config = resolve(from_dict(values["config"]))
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not the configuration of an app ({type(error).__name__}).") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    check(config, agreement)
    return config, agreement


def at_site(config: Config, config_file: Path) -> Config:
    """The configuration as it is at a site: of a model hf:PATH the structure is in the app."""
    structure = config_file.parent / MODEL
    if not (structure / "config.json").is_file():
        return config
    return replace(config, model=replace(config.model, name=f"hf:{structure}"))
