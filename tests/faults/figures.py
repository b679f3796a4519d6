"""How many faults were tried and survived, by kind: `make test-faults` prints it, docs/reliability.md quotes it.

While ODCLUSTER_FAULTS names a file, the tests append a line to it for each fault.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path


def record(kind: str, survived: bool) -> None:
    """One fault of that kind was tried."""
    if path := os.environ.get("ODCLUSTER_FAULTS"):
        with open(path, "a") as file:
            file.write(json.dumps({"kind": kind, "survived": survived}) + "\n")


def table(path: Path) -> str:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    tried, survived = Counter(x["kind"] for x in lines), Counter(x["kind"] for x in lines if x["survived"])
    rows = [(kind, tried[kind], survived[kind]) for kind in sorted(tried)]
    rows.append(("all", sum(tried.values()), sum(survived.values())))
    head = "| fault | tried | survived | lost |\n|---|---|---|---|\n"
    return head + "\n".join(f"| {kind} | {count} | {well} | {count - well} |" for kind, count, well in rows)


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
