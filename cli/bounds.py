"""Resource limits of one worker process: CPU affinity, memory and nice level.

The supervisor sets them right after it has started the process, with system calls that need no privileges. Shares of a
CPU and limits of the page cache need containers.
"""

from __future__ import annotations

import os
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from streaming.fleet.settings import Resources

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Limits of one process; None or 0: unlimited."""

    cpus: frozenset[int] | None = None
    memory_mib: int = 0
    """Limit of its data: heap, stacks, buffers. Mapped files (weights) do not count."""
    nice: int = 0

    @classmethod
    def of(cls, wanted: Resources, others: Iterable[ProcessLimits]) -> ProcessLimits:
        """Limits for a new worker, on the CPUs that the fewest of the `others` use. Raises ValueError."""
        cpus = None
        if wanted.cpus:
            cpus = choose(wanted.cpus, allowed(), (cpu for each in others for cpu in each.cpus or ()))
        return cls(cpus, wanted.memory_mib, wanted.nice)


def allowed() -> frozenset[int]:
    """CPUs that this process may run on."""
    if sys.platform != "linux":
        return frozenset(range(os.cpu_count() or 1))
    return frozenset(os.sched_getaffinity(0))


def choose(count: int, among: Iterable[int], taken: Iterable[int]) -> frozenset[int]:
    """The `count` least used CPUs; all of them if there are fewer."""
    times = Counter(taken)
    return frozenset(sorted(among, key=lambda cpu: (times[cpu], cpu))[:count])


def bind(pid: int, bounds: ProcessLimits) -> list[str]:
    """Apply the limits to a process that was just started. Returns an error text for each the system refuses."""
    steps: list[tuple[str, Callable[[], object]]] = []
    if bounds.nice:
        steps.append(("nice", lambda: os.setpriority(os.PRIO_PROCESS, pid, bounds.nice)))
    if bounds.cpus is not None:
        steps.append(("cpus", lambda: _on(pid, bounds.cpus or frozenset())))
    if bounds.memory_mib:
        steps.append(("memory_mib", lambda: _within(pid, bounds.memory_mib * MIB)))
    refused = []
    for name, step in steps:
        try:
            step()
        except ProcessLookupError:
            break  # it has ended already; its exit code is reported
        except (OSError, ValueError) as error:
            refused.append(f"resources.{name}: {error}")
    return refused


def _on(pid: int, cpus: frozenset[int]) -> None:
    if sys.platform != "linux":
        raise OSError("only Linux binds a process to processors")
    os.sched_setaffinity(pid, cpus)


def _within(pid: int, size: int) -> None:
    if sys.platform != "linux":
        raise OSError("only Linux bounds the memory of a running process")
    resource.prlimit(pid, resource.RLIMIT_DATA, (size, size))
