"""Timeline: replay's prediction of one steady step, as a JSON record. All times are simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qsync.errors import FormatError, MismatchError, shortened
from qsync.lowering.lowered_graph import Cast, Run
from qsync.records.record_json import FileRecord, as_record, without_header


@dataclass(frozen=True, slots=True)
class Event:
    """One activity of a class's ranks, in seconds from the start of the earliest class's step.

    `kind` is loading, host, forward, backward, cast, loss, optimizer, communication or wait.
    """

    device_class: str
    name: str
    kind: str
    start_s: float
    duration_s: float

    @property
    def phase(self) -> str:
        """Return the phase of the step: the kind, but a cast belongs to forward or to backward."""
        if self.kind != "cast":
            return self.kind
        return "backward" if self.name.endswith(", backward") else "forward"


@dataclass(frozen=True, slots=True)
class ClassTimeline:
    """The step of every rank of one class.

    step_s = compute_s + slowed_s + exposed_s + wait_s: own work at full speed, its delay by overlapping
    communication, communication with nothing left to compute, and waiting for slower classes. `loading_s` is
    the part of the own work spent waiting for the next batch; 0 if no loader was profiled. `nodes` are the
    priced nodes, computed at their first use.
    """

    compute_s: float
    slowed_s: float
    exposed_s: float
    wait_s: float
    wait_fraction: float
    memory_bytes: int
    num_ranks: int
    nodes: Sequence[Cast | Run] = ()
    origin: str = "measured"  # origin of the costs (Profile.origin)
    loading_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Timeline(FileRecord):
    """One steady synchronous step of the whole cluster, simulated.

    `interval_s` should contain the median of measured steps nine times in ten, by the profiles' stated errors
    (`Profile.uncertainty`). This holds for steps that alternate with the profile's steps, and for a later run
    if the profiles were carried `ahead`. `interval_s` is None if the profiles state no error. `events` are
    computed at their first use. `sent_bytes` are those that each rank sends for gradients in a step.

    >>> timeline = qsync.replay(graph, plan, profiles, cluster)
    >>> timeline.step_s, timeline.classes["infer"].wait_fraction
    """

    FILE_KIND = "timeline"

    step_s: float
    classes: Mapping[str, ClassTimeline]
    events: Sequence[Event]
    interval_s: tuple[float, float] | None = None
    sent_bytes: float = 0.0

    def __getitem__(self, device_class: str) -> ClassTimeline:
        """Return the timeline of one class; raise MismatchError if there is none."""
        if device_class not in self.classes:
            known = ", ".join(self.classes)
            raise MismatchError(f"this timeline has no device class {device_class!r}; it has {known}")
        return self.classes[device_class]

    def sequence(self, device_class: str) -> tuple[Cast | Run, ...]:
        """Return the priced nodes of a class in execution order, which its ranks must run."""
        return tuple(self[device_class].nodes)

    def to_json(self) -> dict[str, Any]:
        """Return the timeline as a JSON object."""
        classes = {}
        for name, entry in self.classes.items():
            numbers = {
                key: getattr(entry, key) for key in ClassTimeline.__dataclass_fields__ if key != "nodes"
            }
            classes[name] = {**numbers, "nodes": [_node_to_json(node) for node in entry.nodes]}
        return {
            "kind": self.FILE_KIND, "version": self.FILE_VERSION, "simulated": True, "step_s": self.step_s,
            "interval_s": list(self.interval_s) if self.interval_s else None, "classes": classes,
            "sent_bytes": self.sent_bytes, "events": [asdict(event) for event in self.events],
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: Any, where: str | None = None) -> Timeline:
        """Read a timeline from JSON; raise FormatError, which names `where`, if it is malformed."""
        body = without_header(value, cls.FILE_KIND)
        where = where or cls.FILE_KIND
        events = as_record(body.get("events"), tuple[Event, ...], f"{where}, events")
        try:
            classes = {
                name: ClassTimeline(
                    **{**entry, "nodes": tuple(_node_from_json(node) for node in entry["nodes"])}
                )
                for name, entry in body["classes"].items()
            }
            interval = tuple(body["interval_s"]) if body["interval_s"] else None
            sent_bytes = float(body.get("sent_bytes", 0.0))  # not in files from before
            return cls(float(body["step_s"]), classes, events, interval, sent_bytes)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise FormatError(
                f"{where} cannot be read ({shortened(error)}); replay the plan again"
            ) from error


def _node_to_json(node: Cast | Run) -> dict[str, Any]:
    return {"node": "cast" if isinstance(node, Cast) else "run", **asdict(node)}


def _node_from_json(entry: Mapping[str, Any]) -> Cast | Run:
    body = {key: item for key, item in entry.items() if key != "node"}
    return Cast(**body) if entry["node"] == "cast" else Run(**{**body, "operands": tuple(body["operands"])})
