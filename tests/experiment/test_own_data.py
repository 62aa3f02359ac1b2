"""Data of a user's own, of every kind: what a run costs, where it can be cut, and that it is resumed.

On Ray, and in reports: tests/engines/test_ray.py.
"""

import pytest
import torch

from fsl_sage import Tracker, cost, resume, run
from fsl_sage.config import from_dict, from_file
from fsl_sage.experiment.cuts import cuts_of
from fsl_sage.records.files import load_tensors
from tests.own_data import OWN_DATA, SMALL


class Interrupt(Tracker):
    """Kills a run after its first round."""

    def round(self, metrics):
        raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("kind", OWN_DATA)
def test_every_step_of_a_study_takes_it(tmp_path, kind):
    values = {**SMALL, "rounds": 2, **OWN_DATA[kind](tmp_path), "algorithm": "cse-fsl"}
    config, interrupted = (
        from_file(from_dict({**values, "out": str(tmp_path / "runs" / name)}), "tests", of_several=True)
        for name in ("whole", "interrupted")
    )
    whole = run(config)
    moved = [line["bytes_paper"] for line in whole.metrics]
    assert cost(config, algorithms=["cse-fsl"])["cse-fsl"]["bytes_paper"] == moved[1] - moved[0]
    if kind in ("folder", "prompts"):  # it takes seconds, and is the same for all images and for all texts
        assert len(cuts_of(config)) > 1
    with pytest.raises(KeyboardInterrupt):
        run(interrupted, callbacks=[Interrupt()])
    resumed = resume(tmp_path / "runs" / "interrupted")
    (one, _), (other, _) = load_tensors(resumed.model_file), load_tensors(whole.model_file)
    assert all(torch.equal(one[name], other[name]) for name in other)
