"""A report whose runs failed says so, and why."""

import pytest

from fsl_sage import Tracker, TrainingError, report, resume, run
from fsl_sage.records.run_directory import RunDirectory
from tests.report.made_up import made_up_config, write_run


class Trouble(Tracker):
    def __init__(self, t: int) -> None:
        self.t = t

    def round(self, metrics) -> None:
        if metrics["round"] == self.t:
            raise TrainingError("The loss became nan.")


def test_failed_runs_are_named_until_they_are_resumed(tiny, tmp_path):
    fine, broken = tiny(rounds=1, out=str(tmp_path / "all/fine")), tiny(rounds=2, out=str(tmp_path / "all/broken"))
    run(fine)
    with pytest.raises(TrainingError):
        run(broken, [Trouble(0)])
    told = report(tmp_path / "all")
    assert told.notes == ["broken failed: The loss became nan. It is shown up to round 1."]
    assert "broken failed: The loss became nan." in told.page.read_text()
    resume(broken.out)
    assert RunDirectory(broken.out).failure() is None
    assert report(str(tmp_path / "all")).notes == []


def test_a_reason_without_a_full_stop_gets_one(tmp_path):
    write_run(tmp_path / "a", made_up_config("fedavg"))
    path = write_run(tmp_path / "b", made_up_config("fsl-sage"), finished=False)
    RunDirectory(path).failure_file.write_text("ValueError: no (mine.py, line 11)")
    assert report(tmp_path).notes == ["b failed: ValueError: no (mine.py, line 11). It is shown up to round 12."]
