"""Plan in a process of its own: the training process loses neither its cores nor its interpreter to it.

`python -m qsync.elastic_training.planning_process`: JSON of the basis on stdin, of the plan on stdout. It
imports no torch. Exit code 2 and one sentence on stderr where there is no plan.
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
    """Read a basis, and write its plan."""
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
