"""The README.md of a run directory: what the model is, how good it is, and the lines that load it."""

from collections.abc import Mapping
from typing import Any

from fsl_sage.config import Config
from fsl_sage.problems.score import Score
from fsl_sage.records.subject import clients_text
from fsl_sage.units import gib_text

CLASSES_SHOWN = 20


def model_card(config: Config, score: Score, result: Mapping[str, Any], inference: Mapping[str, Any]) -> str:
    """The text of the card.

    Args:
        config: The run's configuration.
        score: What it is judged by.
        result: How it ended, as in result.json.
        inference: What the model needs besides its weights, as in inference.json.
    """
    best = f" {_BEST}" if config.keep == "best" else ""
    parts = [
        f"# {config.model.name} on {config.data.name}",
        f"Trained by {config.algorithm} with {clients_text(config.clients)} ({config.data.partition} partition), "
        f"rounds: {result['rounds']}; {result['stopped']}. Every option is in `config.json`.",
        _results(score, result),
        "## Using it",
        f"`model.safetensors` holds the merged weights of the last round, for the ordinary unsplit model.{best} "
        f"{_origin(config)}".strip(),
        '```python\nfrom fsl_sage import load_model\n\nmodel = load_model("DIR")  # this directory\n```',
        _inputs(inference),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


_BEST = '`best.safetensors` holds those of the best round: `load_model("DIR", best=True)`.'


def _results(score: Score, result: Mapping[str, Any]) -> str:
    rows = [
        (f"{score.title}, last round", score.text(result["final_score"], 2)),
        (f"{score.title}, best round ({result['best_round'] + 1})", score.text(result["best_score"], 2)),
        ("moved, by the paper's convention", gib_text(result["bytes_paper"])),
    ]
    return "\n".join(["| | |", "|---|---:|", *(f"| {name} | {value} |" for name, value in rows)])


def _origin(config: Config) -> str:
    """What else must be at hand."""
    name = config.model.name
    if name.startswith("hf:"):
        return f"The rest of {name.removeprefix('hf:')} is taken from transformers, or from the directory of that name."
    return f"The model's code is {name}, which Python must be able to import." if ":" in name else ""


def _inputs(inference: Mapping[str, Any]) -> str:
    """For images: how they are prepared, and how to classify files."""
    if "mean" not in inference:
        return ""
    channels, height, width = inference["image"]
    classes = list(inference["classes"])
    more = f", … ({len(classes)} in all)" if len(classes) > CLASSES_SHOWN else ""
    return (
        f"It takes images of {channels} x {height} x {width}, float32: `(x / 255 - mean) / std` by channel, with\n"
        f"mean {_numbers(inference['mean'])} and std {_numbers(inference['std'])}. `inference.json` has these numbers "
        f"exactly.\nThe outputs are the logits of: {', '.join(classes[:CLASSES_SHOWN])}{more}.\n\n"
        "```\nfsl-sage predict DIR image.png ...     # the class of each image\n"
        "fsl-sage evaluate DIR                  # its test set once more; --data npz:PATH for another\n```"
    )


def _numbers(values: Any) -> str:
    return "[" + ", ".join(f"{value:.4f}" for value in values) + "]"
