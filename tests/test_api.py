"""What Python's help() shows is what the command line's help shows."""

import pydoc
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

import fsl_sage
from fsl_sage.config.help import document, help_of


def shown(thing: object) -> str:
    return pydoc.plain(pydoc.render_doc(thing))


def as_words(text: str) -> str:
    return " ".join(text.replace("|", " ").split())


@pytest.mark.parametrize("name", ["Config", "run"])
def test_help_explains_every_option(name: str) -> None:
    text = as_words(shown(getattr(fsl_sage, name)))
    groups = (fsl_sage.Config, fsl_sage.DataConfig, fsl_sage.ModelConfig, fsl_sage.AlignmentConfig)
    for group in groups:
        texts = help_of(group)
        for field in fields(group):
            if field.name in texts:
                assert as_words(texts[field.name]) in text, field.name
    assert "rounds = 10" in text


def test_documenting_twice_changes_nothing() -> None:
    before = fsl_sage.Config.__doc__
    document(fsl_sage.Config, fsl_sage.Config)
    assert fsl_sage.Config.__doc__ == before


@pytest.mark.parametrize("target", ["run", "test"])
def test_make_says_what_it_does_and_how_long_it_takes(target: str) -> None:
    said = subprocess.run(
        ["make", "--dry-run", "--always-make", target], capture_output=True, text=True, cwd=Path(__file__).parents[1]
    ).stdout
    assert "About" in said
    assert "minute" in said
