import builtins
import contextlib

import pytest

from fsl_sage.errors import MissingExtra
from fsl_sage.experiment import resume, run
from fsl_sage.records.trackers import TRACKERS, Tracker


class Listener(Tracker):
    def __init__(self):
        self.heard = []

    def start(self, config, directory, done):
        self.heard.append(("start", len(done)))

    def round(self, metrics):
        self.heard.append(("round", metrics["round"]))

    def finish(self, result):
        self.heard.append(("finish", result["rounds"]))


def test_a_tracker_is_told_of_everything(tiny):
    listener = Listener()
    run(tiny(), [listener])
    assert listener.heard == [("start", 0), ("round", 0), ("round", 1), ("finish", 2)]


def test_tensorboard(tiny):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result = run(tiny(track=["tensorboard"]))
    events = reader.EventAccumulator(str(result.directory / "tensorboard"))
    events.Reload()
    seen = [event.value for event in events.Scalars("test_accuracy")]
    assert seen == pytest.approx([line["test_accuracy"] for line in result.metrics])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow(tiny, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    result = run(tiny(track=["mlflow"]))
    run_id = (result.directory / "mlflow-run-id").read_text()
    history = mlflow.MlflowClient().get_metric_history(run_id, "test_loss")
    assert [point.value for point in history] == pytest.approx([line["test_loss"] for line in result.metrics])
    assert mlflow.get_run(run_id).data.params["data.name"] == "cifar10-mini"


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_missing_extra_says_how_to_get_it(tiny, name, monkeypatch):
    real = builtins.__import__

    def without(module, *args, **kwargs):
        if module.split(".")[0] == "mlflow" or module == "torch.utils.tensorboard":
            raise ImportError(module)
        return real(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    config = tiny(track=[name])
    with pytest.raises(MissingExtra, match=r"pip install -c constraints.txt -e '\.\[track\]'"):
        run(config)
    assert not config.out.exists()


class Closing(Listener):
    def close(self):
        self.heard.append("close")


class Breaking(Closing):
    def round(self, metrics):
        raise KeyboardInterrupt


def test_a_tracker_is_closed_however_the_run_ends(tiny):
    for listener in (Closing(), Breaking()):
        with contextlib.suppress(KeyboardInterrupt):
            run(tiny(), [listener])
        assert listener.heard[-1] == "close"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_goes_on_with_other_workers_and_lets_others_start(tiny, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    config = tiny(track=["mlflow"])
    with pytest.raises(KeyboardInterrupt):
        run(config, [Breaking()])
    assert mlflow.active_run() is None
    (config.out / "checkpoint.safetensors").unlink()
    resume(config.out, workers=1)
    run_id = (config.out / "mlflow-run-id").read_text()
    assert mlflow.get_run(run_id).info.status == "FINISHED"


@pytest.mark.parametrize("name", ["tensorboard", pytest.param("mlflow", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_a_tracker_may_start_again_after_a_loss(tiny, tmp_path, monkeypatch, name):
    pytest.importorskip(name)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    closed, tracker = [], TRACKERS[name]()
    monkeypatch.setattr(
        TRACKERS[name], "close", lambda self, close=TRACKERS[name].close: (closed.append(1), close(self))
    )
    for _ in range(2):
        tracker.start(tiny(), tmp_path, [])
        tracker.round({"round": 0, "test_loss": 1.0})
    tracker.close()
    assert len(closed) == 3
