"""What a node of the test federation does instead of its duty, as planned: a Flower mod around the real ClientApp.

The plan is a JSON file beside the nodes' states: `ROUND/CLIENT` to one of
hold         answer only when the test says so, by a file
hang         never answer; the test kills the ClientApp or its node
late:S       answer S seconds late
replay       answer as for the round before
KIND         answer with a report spoilt as in tests/engines/hostile.py
"""

import json
import os
import time
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from fsl_sage.engines.flower.contents import ABOUT
from tests.engines.hostile import HOSTILE


def misbehave(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    directory = Path(str(context.node_config["state"])).parent
    key = f"{message.metadata.group_id}/{context.node_config['client']}"
    action = json.loads((directory / "plan.json").read_text()).get(key, "")
    if message.metadata.message_type != "train" or not action:
        return call_next(message, context)
    marker = directory / f"at-{key.replace('/', '-')}"
    marker.with_suffix(".part").write_text(str(os.getpid()))
    marker.with_suffix(".part").rename(marker)
    if action == "hang":
        time.sleep(3600)
    reply = call_next(message, context)
    if action == "hold":
        while not marker.with_name(marker.name.replace("at", "go")).exists():
            time.sleep(0.1)
    elif action.startswith("late:"):
        time.sleep(float(action.removeprefix("late:")))
    elif action == "replay":
        reply.content[ABOUT]["round"] -= 1
    else:
        HOSTILE[action][0](reply.content)
    return reply
