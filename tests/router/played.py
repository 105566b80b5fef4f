"""A process as ``infer_router.process`` is one, that does without models: its settings say what it does."""

import json
import os
import sys
import threading
from typing import Any

SAID: dict[str, Any] = {"kind": sys.argv[1]}
if SAID["kind"] == "spare":
    SAID |= json.loads(sys.stdin.readline())
    if "hangs" in SAID["modules"]:
        threading.Event().wait()
    print("infer: warm", flush=True)
if not (line := sys.stdin.readline()):
    sys.exit()
orders = json.loads(line)
SAID |= {"orders": orders, "environment": {**os.environ}, "folder": os.getcwd()}
if SAID["kind"] == "spare":
    if orders["settings"].get("hangs"):
        threading.Event().wait()
    if orders["settings"].get("dies") == "orders":
        sys.exit(7)
    print("infer: orders taken", flush=True)
    if not orders["room"]:
        SAID["then"] = sys.stdin.readline()
    if orders["settings"].get("dies") == "load":
        sys.exit(8)
print(f"infer: ready on {json.dumps(SAID)}", flush=True)
for line in sys.stdin:
    if line == "modules\n":
        print(f"infer: modules {json.dumps(orders['settings'].get('modules', []))}", flush=True)
