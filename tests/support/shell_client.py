"""The program `sparsekv` of tests' shell scripts: it asks the zygote, whose socket is the first argument, to fork the
command.

The command has this process's arguments, folder, environment and standard files, and this process ends with its exit
code. Nothing of sparsekv is imported, so a call takes some hundredths of a second.
"""

import json
import os
import socket
import sys

with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    files = {name: f"/proc/{os.getpid()}/fd/{number}" for number, name in enumerate(("stdin", "stdout", "stderr"))}
    request = {
        "arguments": [one.replace("/dev/fd/", f"/proc/{os.getpid()}/fd/") for one in sys.argv[2:]],
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "seconds": 600,
        "limits": {"CORE": 0},
        "unprivileged": False,
        "kill_before": None,
        "ignored": [],
        "program": None,
        **files,
    }
    with connection.makefile("rw") as lines:
        print(json.dumps(request), file=lines, flush=True)
        lines.readline()
        code = json.loads(lines.readline())["code"]
sys.exit(code if code >= 0 else 128 - code)
