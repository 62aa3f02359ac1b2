"""The figures of a run say what they show."""

import matplotlib.figure
import numpy as np
import pytest

from fsl_sage.config import Config, DataConfig
from fsl_sage.problems.score import ACCURACY
from fsl_sage.records import figures

pytestmark = pytest.mark.drawn

CONFIG = Config(clients=3, data=DataConfig(partition="dirichlet", alpha=0.1))


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    found: list[matplotlib.figure.Figure] = []
    monkeypatch.setattr(figures, "_save", lambda figure, path: found.append(figure) or figure.canvas.draw())
    return found


def test_the_score_has_a_title_with_model_data_and_partition(drawn, tmp_path):
    metrics = [{"bytes_paper": 2**30, "test_accuracy": 0.5, "aligned": False}]
    figures.score_figure(tmp_path / "x.png", metrics, ACCURACY, CONFIG, "red")
    assert drawn[0].axes[0].get_title() == "resnet18 on cifar10-mini, dirichlet (alpha 0.1), 3 clients"


@pytest.mark.parametrize("clients", [1, 3, 12, 40, 60])
def test_every_client_is_labelled_where_there_is_room(drawn, tmp_path, clients):
    config = Config(clients=clients)
    figures.classes_figure(tmp_path / "x.png", np.ones((clients, 2), dtype=int), ["a", "b"], config)
    labels = [label.get_text() for label in drawn[0].axes[0].get_yticklabels()]
    assert labels == [str(client) for client in range(clients)]
    assert "cifar10-mini, iid" in drawn[0].axes[0].get_title()


def test_many_clients_are_labelled_sparsely(drawn, tmp_path):
    figures.classes_figure(tmp_path / "x.png", np.ones((200, 2), dtype=int), ["a", "b"], Config(clients=200))
    assert len(drawn[0].axes[0].get_yticks()) < 30


def test_names_of_classes_are_no_formulas(drawn, tmp_path):
    """matplotlib reads what is between two $ as a formula, and stumbles over one that is none."""
    names = [r"$\frac{a}$", "$x$", "a\nb", "\x1b[31m", "100 $"]
    figures.classes_figure(tmp_path / "x.png", np.ones((2, 5), dtype=int), names, CONFIG)
    shown = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert shown == [r"\$\frac{a}\$", r"\$x\$", "a\nb", "\ufffd[31m", r"100 \$"]
