"""`fsl-sage deploy init`: the app that it writes is one that Flower takes."""

import io
import sys
import zipfile

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.cli.build import build_fab_from_disk

from fsl_sage.cli import main
from fsl_sage.deploy.agreement import read_agreement
from fsl_sage.errors import InputError
from fsl_sage.problems.images.sites import load_server_data, load_site

SMALL = ("--clients", "3", "--model.name", "small-cnn", "--data.train-images", "150", "--data.test-images", "50")


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as exit:
        main(["deploy", *arguments])
    assert exit.value.code == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.filterwarnings("ignore::DeprecationWarning:flwr", "ignore::DeprecationWarning:pathspec")
def test_the_app_builds_and_carries_licence_and_configuration(tmp_path):
    main(["deploy", "init", str(tmp_path / "app"), *SMALL, "--sites", str(tmp_path / "sites")])
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(tmp_path / "app"))) as fab:
        assert {"LICENSE", "fsl_sage_app/config.json", "fsl_sage_app/client_app.py"} <= set(fab.namelist())
    config, agreement = read_agreement(tmp_path / "app" / "fsl_sage_app" / "config.json")
    assert config.engine == "flower"
    assert agreement.examples == (50, 50, 50)
    whole = load_server_data(config)
    assert (agreement.classes, agreement.mean, agreement.std) == (whole.classes, whole.mean, whole.std)
    sites = [load_site(tmp_path / "sites" / f"client-{client}.npz", agreement) for client in range(3)]
    counts = [np.bincount(site.data.train.y, minlength=10) for site in sites]
    assert (sum(counts) == np.bincount(whole.train.y)).all()


def test_a_server_with_test_images_alone_and_sites_with_their_own(tmp_path):
    x, y = np.zeros((6, 8, 8, 3), np.uint8), np.array([0, 1, 2] * 2)
    x[:, :4] = 255
    names = np.array(["a", "b", "c"])
    np.savez(tmp_path / "test.npz", x_test=x, y_test=y, classes=names)
    data = ("--data.name", f"npz:{tmp_path / 'test.npz'}")
    main(["deploy", "init", str(tmp_path / "app"), "--clients", "2", "--examples", "4", "12", *data])
    _, agreement = read_agreement(tmp_path / "app" / "fsl_sage_app" / "config.json")
    assert (agreement.examples, agreement.image, agreement.classes) == ((4, 12), (3, 8, 8), ("a", "b", "c"))
    assert agreement.mean == agreement.std == (0.5, 0.5, 0.5)

    # A site's images may be in several archives, and its classes must be those of all.
    (tmp_path / "site").mkdir()
    for part in "12":
        np.savez(tmp_path / "site" / f"{part}.npz", x=x, y=y, classes=names)
    assert len(load_site(tmp_path / "site", agreement).data.train) == 12
    np.savez(tmp_path / "site" / "2.npz", x=x, y=y, classes=names[::-1])
    with pytest.raises(InputError, match="not those agreed on, or in another order"):
        load_site(tmp_path / "site", agreement)
    np.savez(tmp_path / "site" / "2.npz", x=x[:, :5], y=y)
    with pytest.raises(InputError, match="several shapes"):
        load_site(tmp_path / "site", agreement)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no \.npz archive"):
        load_site(tmp_path / "empty", agreement)


def test_what_cannot_be_is_refused_in_a_sentence(tmp_path, capsys):
    app = str(tmp_path / "app")
    assert "splitfed-ss cannot run on Flower" in refused(capsys, "init", app, *SMALL, "--algorithm", "splitfed-ss")
    assert not (tmp_path / "app").exists()
    assert "do not fit --clients 3" in refused(capsys, "init", app, *SMALL, "--examples", "5", "5")
    both = ("--examples", "50", "50", "50", "--sites", app)
    assert "--sites divides a data set" in refused(capsys, "init", app, *SMALL, *both)
    assert "needs the directory of the app first" in refused(capsys, "init", "--clients", "3")
    assert "There are 'fsl-sage deploy init DIR'" in refused(capsys, "inti")
    main(["deploy", "init", app, *SMALL])
    assert "is not empty" in refused(capsys, "init", app, *SMALL)


def test_without_the_extra_it_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "flwr", None)
    assert "pip install -c constraints.txt -e '.[flower]'" in refused(capsys, "demo")


def test_a_run_on_flower_is_not_started_by_run(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["run", "--engine", "flower", "--out", str(tmp_path / "run"), *SMALL])
    assert "fsl-sage deploy init DIR" in " ".join(capsys.readouterr().err.split())
