"""Plan in a separate process, so that planning blocks neither cores nor GIL of the training process.

`python -m qsync.elastic_training.planning_process`: reads the basis as JSON on stdin and writes the plan on
stdout. No torch. Without a plan: exit code 2 and one sentence on stderr.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from qsync.errors import QSyncError
from qsync.planning import plan
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.profiles import Profile, Sensitivity
from qsync.replayer import slowed


def main() -> None:
    """Read a basis from stdin, and write its plan to stdout."""
    os.nice(10)
    content: dict[str, Any] = json.load(sys.stdin)
    profiles = {
        name: slowed(Profile.from_json(entry), content["slowdowns"][name])
        for name, entry in content["profiles"].items()
    }
    try:
        found = plan(
            OpGraph.from_json(content["graph"]), profiles, Sensitivity.from_json(content["sensitivity"]),
            Cluster.from_json(content["cluster"]), **content["options"],
        )  # fmt: skip
    except QSyncError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    json.dump(found.to_json(), sys.stdout)


if __name__ == "__main__":
    main()
