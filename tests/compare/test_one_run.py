"""The process of one run of a comparison."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SESSION = Path("/proc/self/autogroup")
LOWER = "import os; os.nice(7); from fsl_sage.compare.one_run import keep_priority; keep_priority(); "
PRINT = f"print(open('{SESSION}').read())"


@pytest.mark.slow
@pytest.mark.skipif(not SESSION.exists(), reason="this system has no priorities of sessions")
@pytest.mark.parametrize("own_session", [True, False])
def test_a_session_of_its_own_has_the_priority_of_the_process_and_no_other_session_does(own_session):
    before = SESSION.read_text().split()
    command = [sys.executable, "-c", LOWER + PRINT]
    told = subprocess.run(
        command, start_new_session=own_session, capture_output=True, text=True, check=True, env=os.environ
    )
    assert told.stdout.split()[1:] == (["nice", "7"] if own_session else before[1:])
