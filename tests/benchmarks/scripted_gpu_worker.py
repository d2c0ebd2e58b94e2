"""A worker of benchmarks.gpu that does what a row's name is scripted for.

Environment: `SCRIPT` is a JSON object from row to what happens: "measure", "error", "fatal" (an
error after which nothing runs), "die", "hang" (with a child process of its own),
"load" (for a second, then "measure"), "load for ever".
"""

import argparse
import json
import os
import subprocess
import sys
import time

from benchmarks.gpu.worker import MARK


def tell(what: object) -> None:
    print(f"{MARK}{json.dumps(what)}", flush=True)


parser = argparse.ArgumentParser()
parser.add_argument("--rows", nargs="+")
arguments, _ = parser.parse_known_args()
script = json.loads(os.environ["SCRIPT"])
tell({"machine": "a machine"})
for name in arguments.rows:
    print("what a library prints", flush=True)
    if script[name].startswith("load"):
        tell({"loads": True})
        time.sleep(1 if script[name] == "load" else 600)
        tell({"loads": False})
    match script[name]:
        case "measure" | "load":
            about = {"row": name, "what": "x", "streams": 1, "dtype": "float32", "unit": ""}
            value = {"median": 1.5, "low": 1.0, "high": 2.0}
            measure = about | {"value": value, "note": "", "goal": {"value": 2.0, "is_most": True}}
            tell({"row": name, "measure": measure})
            tell({"row": name, "error": None, "is_last": False})
        case "error" | "fatal" as kind:
            tell({"row": name, "error": "CUDA error: no", "is_last": kind == "fatal"})
            if kind == "fatal":
                sys.exit(1)
        case "die":
            os._exit(7)
        case "hang":
            about = {"row": name, "what": "x", "streams": 1, "dtype": "float32", "unit": ""}
            child = subprocess.Popen(["sleep", "600"])
            print(child.pid, file=sys.stderr, flush=True)
            tell({"row": name, "measure": about | {"value": None, "note": "early", "goal": None}})
            time.sleep(600)
