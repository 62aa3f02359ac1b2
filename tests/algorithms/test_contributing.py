"""The worked example of CONTRIBUTING.md runs, as it stands there."""

import re
from pathlib import Path

from fsl_sage.algorithms import ALGORITHMS
from fsl_sage.experiment import run
from fsl_sage.records.files import load_tensors
from tests.algorithms.test_laws import assert_same

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def test_the_worked_example(tmp_path, monkeypatch, capsys, tiny):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(code.splitlines()) < 60
    monkeypatch.chdir(tmp_path)
    try:
        space = {}
        exec(compile(code, "CONTRIBUTING.md", "exec"), space)
        assert "bytes a round" in capsys.readouterr().out
        # The law that the page names: without its term it is FedAvg.
        space["FedProx"].mu = 0.0
        weights = [load_tensors(run(tiny(algorithm=name)).model_file)[0] for name in ("fedprox", "fedavg")]
        assert_same(*weights)
    finally:
        ALGORITHMS.pop("fedprox", None)
