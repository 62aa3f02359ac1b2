"""A newcomer's first hour with nothing but the installed package: own model, images, algorithm, and the Python API.

Every numbered point of what a newcomer stumbles over is played, and the wrong turns beside it.

    python hour.py          the short form, in this process, in the current folder
    python hour.py --long   by the installed command, with a comparison, its report and the default model too

It needs no file of the repository and leaves everything in the current folder. It ends with an error if anything is
not as a newcomer would expect it.
"""

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

MODEL = '''
from torch import nn


class Net(nn.Module):
    """A model whose submodules have names that anybody might choose."""

    def __init__(self, classes, channels):
        super().__init__()
        self.plan = nn.Sequential(nn.Conv2d(channels, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.drop = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.name = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        return self.head(self.name(self.drop(self.plan(x))).mean((2, 3)))


def needs_width(classes, width):
    return nn.Linear(width, classes)


def too_narrow(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(7, classes))
'''

ALGORITHM = '''
from fsl_sage import Algorithm


class Mine(Algorithm):
    """FedAvg, written by a newcomer."""

    title = "Mine"
    uses = ()
    waits = False
    averaged = ("client", "server")
    holds = ("client", "server")
    has_s_server = False

    def local_round(self, client, t):
        for batch in client.batches(t):
            z = client.forward(batch)
            client.backward(z, client.server_gradient(z, batch.target))
            client.step()
        yield from ()


class Forgot(Algorithm):
    """Without a local round."""


class Plain(Mine):
    """Without a yield."""

    def local_round(self, client, t):
        pass
'''

SMALL = ["--clients", "2", "--batch-size", "8", "--device", "cpu", "--alignment.steps", "4"]
OWN = ["--model.name", "mine:Net", "--model.cut", "plan", "--data.name", "npz:shapes.npz", *SMALL]


def images(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Dark images [N, 16, 16, 3], each with a bright bar that lies or stands."""
    draw = np.random.default_rng(seed)
    x, y = draw.integers(0, 40, (count, 16, 16, 3), dtype=np.uint8), np.arange(count) % 2
    for image, label, place in zip(x, y, draw.integers(2, 13, count), strict=True):
        bar = image[place : place + 2] if label else image[:, place : place + 2]
        bar += 60
    return x, y


class Hour:
    """The commands, as one gives them, and what they print."""

    def __init__(self, installed: bool) -> None:
        self._installed = installed

    def __call__(self, *words: str, fails: bool = False) -> str:
        print("$ fsl-sage", *words, flush=True)
        code, said = self._run(words)
        assert (code != 0) == fails, f"exit code {code}: {said}"
        assert "Traceback" not in said, said
        return " ".join(said.split()) if fails else said

    def refused(self, *words: str) -> str:
        """What is said of a command that cannot work."""
        return self(*words, fails=True)

    def _run(self, words: tuple[str, ...]) -> tuple[int, str]:
        if self._installed:
            command = Path(sys.executable).with_name("fsl-sage")
            done = subprocess.run([command, *words], capture_output=True, text=True)
            return done.returncode, done.stdout + done.stderr
        from fsl_sage.cli import main
        from fsl_sage.cli.consoles import ERRORS, OUT

        said = io.StringIO()
        OUT.file = ERRORS.file = said
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                main(words)
        except SystemExit as end:
            return int(end.code or 0), said.getvalue()
        return 0, said.getvalue()


def play(fsl_sage: Hour, long: bool) -> None:
    from PIL import Image

    Path("mine.py").write_text(MODEL)
    Path("algo.py").write_text(ALGORITHM)
    x, y = images(64, 0)
    x_test, y_test = images(32, 1)
    np.savez("shapes.npz", x=x, y=y, x_test=x_test, y_test=y_test, classes=np.array(["standing", "lying"]))

    assert fsl_sage("--version").startswith("fsl-sage ")
    assert "predict" in fsl_sage("--help")
    wrong_words(fsl_sage)
    assert "deploy init" in fsl_sage("deploy", "--help")
    assert "reveals" in fsl_sage("cuts", *OWN)

    fsl_sage("run", *OWN, "--rounds", "3", "--optimizer.lr", "0.01", "--keep", "best", "--out", "first")
    last = [json.loads(line) for line in Path("first/metrics.jsonl").read_text().splitlines()][-1]
    assert json.loads(fsl_sage("evaluate", "first", "--json"))["test_accuracy"] == last["test_accuracy"]
    Path("test").mkdir()
    for number, image in enumerate(x_test):
        Image.fromarray(image).save(f"test/{number:02}.png")
    told = [json.loads(line) for line in fsl_sage("predict", "first", "test", "--json").splitlines()]
    right = [
        next(iter(line["classes"])) == ("standing", "lying")[label] for line, label in zip(told, y_test, strict=True)
    ]
    assert sum(right) / len(right) == last["test_accuracy"], "the model predicts otherwise than it was tested"
    assert "load_model" in Path("first/README.md").read_text()
    assert Path("first/best.safetensors").exists()
    wrong_turns(fsl_sage)

    fsl_sage("run", *OWN[:-2], "--algorithm", "algo:Mine", "--rounds", "1", "--out", "second")
    from_python()
    if long:
        grid = ["--algorithms", "fsl-sage", "cse-fsl", "--rounds", "2", "--out", "both"]
        assert "report.html" in fsl_sage("compare", *OWN, *grid)
        fsl_sage("report", "both")
        own_pictures(fsl_sage, x, y)
        fsl_sage("run", "--rounds", "1", "--data.train-images", "200", "--data.test-images", "100", "--out", "third")
    print("The hour is over: everything worked.")


def wrong_words(fsl_sage: Hour) -> None:
    """Typing errors: each is answered with what was meant."""
    Path("typo.toml").write_text('rouns = 3\nalgorithm = "fedavg"\n')
    Path("group.toml").write_text('[model]\nnmae = "small-cnn"\n')
    for words, meant in (
        (["rum"], "did you mean run?"),
        (["run", "typo.toml"], "did you mean rounds?"),
        (["run", "group.toml"], "did you mean name?"),
        (["run", "nowhere.toml"], "There is no file nowhere.toml."),
        (["run", "--rouns", "3"], "--rounds"),
        (["run", "--algorithm", "fslsage"], "did you mean fsl-sage?"),
        (["run", "--data.name", "cifar11"], "did you mean cifar10?"),
        (["run", "--data.name", "shapes.npz"], "to learn from it give npz:shapes.npz."),
        (["run", "--model.name", "resnet81"], "did you mean resnet18?"),
        (["run", "--rounds", "0"], "--rounds 0 is not possible"),
        (["run", *OWN, "--model.cut", "nowhere"], "cuts that work: "),
        (["run", *OWN, "--clients", "100"], "64 training examples are too few for 100 clients"),
        (["run", *OWN, "--model.name", "mine:Nett"], "did you mean Net?"),
        (["run", *OWN, "--model.name", "mine:needs_width"], "needs 'width'"),
        (["run", *OWN, "--model.name", "mine:too_narrow", "--model.cut", "0"], "the model fails on a batch"),
        (["run", *OWN[:-2], "--algorithm", "algo:Forgot"], "lacks local_round"),
        (["run", *OWN[:-2], "--algorithm", "algo:Plain", "--out", "plain"], "it must be a generator"),
    ):
        said = fsl_sage.refused(*words)
        assert meant in said, said


def wrong_turns(fsl_sage: Hour) -> None:
    """What one tries with a run that is finished."""
    for words, meant in (
        (["run", *OWN, "--out", "first"], "already holds a run"),
        (["resume", "first"], "is finished"),
        (["predict", "first"], "needs images"),
        (["predict", "first", "mine.py"], "mine.py is not an image"),
        (["predict", "first", "nowhere.png"], "There is no file nowhere.png."),
        (["predict", "mine.py", "test"], "mine.py is a file"),
        (["evaluate", "nowhere"], "nowhere holds no run"),
        (["report", "test"], "There is no run to report"),
    ):
        said = fsl_sage.refused(*words)
        assert meant in said, said


def own_pictures(fsl_sage: Hour, x: np.ndarray, y: np.ndarray) -> None:
    """A folder of pictures whose name has a space and an umlaut, one client, and a batch larger than the data."""
    from PIL import Image

    for number, (image, label) in enumerate(zip(x, y, strict=True)):
        folder = Path("my pictures ü") / ("stehend", "liegend")[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"Bild {number}.png")
    pictures = ["--data.name", "folder:my pictures ü", "--model.name", "mine:Net", "--model.cut", "plan"]
    few = ["--clients", "1", "--rounds", "1", "--batch-size", "500", "--alignment.steps", "2", "--out", "my run ü"]
    assert "1 client, batch 500" in fsl_sage("run", *pictures, *few)
    fsl_sage("predict", "my run ü", "my pictures ü/stehend")
    fsl_sage("evaluate", "my run ü", "--data", "folder:my pictures ü")


def from_python() -> None:
    """The same from Python: values as one writes them, a callback, the model."""
    sys.path.insert(0, "")
    import fsl_sage as fs

    class Enough(fs.Tracker):
        def round(self, metrics: dict) -> None:
            raise fs.StopRun("one round is enough")

    data = {"name": "npz:shapes.npz"}
    model = {"name": "mine:Net", "cut": ["plan"]}
    config = fs.Config(out="api", rounds="3", clients=2, batch_size=8, device="cpu", data=data, model=model)
    result = fs.run(config, [Enough()])
    assert (len(result.metrics), result.stopped) == (1, "one round is enough")
    assert fs.evaluate("api")["test_accuracy"] == result.metrics[-1]["test_accuracy"]
    assert fs.load_model("api").head.out_features == 2
    (told,) = fs.predict("api", "test/00.png")
    assert told.classes[0] in ("standing", "lying")
    assert all("rounds = 10" in (each.__doc__ or "") for each in (fs.run, fs.Config))
    for wrong, meant in (
        (lambda: fs.Config(rouns=3), "did you mean rounds?"),
        (lambda: fs.Config(rounds="many"), "--rounds 'many' is not possible"),
        (lambda: fs.Config(data={"nmae": "x"}), "did you mean name?"),
        (lambda: fs.run({"rounds": 1}), "run takes a Config"),
        (lambda: fs.run(replace(config, out="other"), [print]), "derives from fsl_sage.Tracker"),
        (lambda: fs.run(config), "already holds a run"),
        (lambda: fs.resume("api"), "is finished"),
    ):
        said = refusal(wrong)
        assert meant in said, said


def refusal(wrong: Callable[[], object]) -> str:
    """What Python says of something that cannot work."""
    import fsl_sage as fs

    try:
        wrong()
    except fs.InputError as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    play(Hour(installed="--long" in sys.argv), "--long" in sys.argv)
