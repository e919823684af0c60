"""Save and load a plan with its inputs, to replay, explain and check it later.

plan.json  graph.json  cluster.json  sensitivity.json  profile-<class>.json
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qsync.errors import FormatError, MismatchError, shortened
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.json_files import read_json, write_json
from qsync.records.plans import Plan
from qsync.records.profiles import Profile, Sensitivity


@dataclass(frozen=True, slots=True)
class Basis:
    """The inputs of a plan: the graph, the cluster, a profile per class, and the sensitivity."""

    graph: OpGraph
    cluster: Cluster
    profiles: Mapping[str, Profile]
    sensitivity: Sensitivity

    def save(self, folder: str | Path) -> None:
        """Write the basis, each file atomically."""
        folder = Path(folder)
        self.graph.save(folder / "graph.json")
        write_json(folder / "cluster.json", self.cluster.to_json())
        self.sensitivity.save(folder / "sensitivity.json")
        for name, profile in self.profiles.items():
            profile.save(folder / f"profile-{name}.json")

    @classmethod
    def load(cls, folder: str | Path, cluster: Cluster | None = None) -> Basis:
        """Read a basis, for its own or a given cluster.

        Classes from data sheets have no profile. FormatError names a missing or malformed file.
        """
        folder = Path(folder)
        if not (folder / "graph.json").is_file():
            raise FormatError(
                f"{folder} has no graph.json: give an output folder of qsync demo or qsync.hybrid"
            )
        if cluster is None:
            cluster = Cluster.from_json(
                read_json(folder / "cluster.json"), where=str(folder / "cluster.json")
            )
        profiles = {}
        for c in cluster.classes:
            if c.datasheet is None:  # simulated profiles are not on disk: see qsync.commands.loading
                path = folder / f"profile-{c.name}.json"
                profiles[c.name] = Profile.load(path)
                _check_name(path, profiles[c.name].device_class, c.name)
        graph = OpGraph.load(folder / "graph.json")
        return cls(graph, cluster, profiles, Sensitivity.load(folder / "sensitivity.json"))


def _check_name(path: Path, device_class: str, name: str) -> None:
    """Raise MismatchError for another class's profile under a class's file name."""
    if device_class != name:
        raise MismatchError(
            f"{path} is the profile of {shortened(device_class)}, not of {name}; replace it, or change its "
            "device_class if both are the same device"
        )


def save_plan(folder: str | Path, plan: Plan, basis: Basis) -> None:
    """Write a plan beside its basis.

    An old plan is removed first and the new one written last, so no plan lies beside another's basis.
    """
    (Path(folder) / "plan.json").unlink(missing_ok=True)
    basis.save(folder)
    plan.save(Path(folder) / "plan.json")
