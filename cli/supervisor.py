"""Process supervisor: keeps all child processes of one machine running until they are stopped.

It does not know what the processes do, how many there should be, or what is shown about them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cli.child import Child, Program


class Supervisor:
    """Supervises children. It calls `on_change` with a child whenever its status has changed."""

    def __init__(self, on_change: Callable[[Child], None]) -> None:
        self.children: dict[str, Child] = {}
        """By id, oldest first, without stopped ones that have exited."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._on_change = on_change
        self._changed = asyncio.Event()
        self._broken: BaseException | None = None

    def start(self, program: Program) -> Child:
        """Keep one process of this program running until it is stopped."""
        child = Child(program, self._on_child_change)
        self.children[program.id] = child
        task = asyncio.create_task(child.run(), name=program.id)
        self._tasks[program.id] = task
        task.add_done_callback(lambda _: self._forget(program.id))
        self.guard(task)
        return child

    def guard(self, task: asyncio.Task[None]) -> None:
        """Watch a task of the supervisor's own: if it fails, `until` raises its error."""
        task.add_done_callback(self._ended)

    def of(self, *roles: str) -> list[Child]:
        """Return the child processes that run one of these roles, oldest first."""
        return [child for child in self.children.values() if child.program.role in roles]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition`, which is evaluated when a child changes or on `wake`. Raises what it raises."""
        while not condition():
            if self._broken is not None:
                raise self._broken
            await self._changed.wait()

    def wake(self) -> None:
        """Make `until` evaluate its condition again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def stop(self, *roles: str) -> None:
        """Drain the children of these roles together, and wait until they have exited."""
        tasks = [self._tasks[child.program.id] for child in self.of(*roles)]
        for child in self.of(*roles):
            child.stop()
        if tasks:
            await asyncio.wait(tasks)

    def kill(self, *roles: str) -> None:
        """Kill the children of these roles."""
        for child in self.of(*roles):
            child.kill()

    def _on_child_change(self, child: Child) -> None:
        self._on_change(child)
        self.wake()

    def _forget(self, child_id: str) -> None:
        del self.children[child_id], self._tasks[child_id]

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._broken = self._broken or task.exception()
        self.wake()
