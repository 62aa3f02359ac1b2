"""comparison.json: the runs that a comparison has planned, for whoever looks into its folder while it goes on."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from fsl_sage.records.files import write_json

PLANNED = "comparison.json"


def save_plan(folder: Path, rounds: Mapping[str, int], at_once: int) -> None:
    """Write down the runs of a comparison that begins.

    Args:
        folder: The comparison's folder.
        rounds: By the name of each run, in order, the rounds that it has at most.
        at_once: How many run side by side.
    """
    runs = [{"name": name, "rounds": count} for name, count in rounds.items()]
    who = {"process": os.getpid(), "machine": socket.gethostname()}
    write_json(folder / PLANNED, {**who, "at_once": at_once, "runs": runs})
