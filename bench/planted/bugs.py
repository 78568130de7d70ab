"""The table of planted bugs: mistakes that every queue of this kind has made, one at a time.

Each test is chosen to show its bug in seconds; the whole suite has slower ones that would show it too.
"""

from __future__ import annotations

from bench.planted import order, planner, tenants
from bench.planted.attempts import ATTEMPTS
from bench.planted.channels import CALLERS, CHANNELS, LOOKS
from bench.planted.clients import CLIENTS
from bench.planted.connections import CONNECTIONS
from bench.planted.conversations import CONVERSATIONS
from bench.planted.door import DOORS
from bench.planted.durable import DURABLE
from bench.planted.entrypoints import ENTRYPOINTS
from bench.planted.fencing import ENDS, FENCING
from bench.planted.gate import GATE
from bench.planted.leavings import LEAVINGS
from bench.planted.long_results import LONG_RESULTS
from bench.planted.measurements import MEASUREMENTS
from bench.planted.order_promises import PROMISES
from bench.planted.pools import POOLS
from bench.planted.preemption import PREEMPTIONS
from bench.planted.queue import QUEUE
from bench.planted.readers import READERS
from bench.planted.records import RECORDS
from bench.planted.request_fields import REQUEST_FIELDS
from bench.planted.responses import RESPONSES
from bench.planted.room import ROOM_BUGS
from bench.planted.screens import SCREENS
from bench.planted.security import SECURITY
from bench.planted.store_access import STORE_ACCESS
from bench.planted.survivors import SURVIVORS
from bench.planted.terminal import TERMINAL
from bench.planted.tokens import TOKENS
from bench.planted.tools import TOOLS
from bench.planted.traces import TRACES
from bench.planted.unreadable import UNREADABLE
from bench.planted.upkeep import LINES, STORE
from bench.planted.upstream import UPSTREAM
from bench.planted.work import WORK

BUGS = (
    *FENCING,
    *ENDS,
    *QUEUE,
    *TOKENS,
    *CHANNELS,
    *LOOKS,
    *CALLERS,
    *LINES,
    *STORE,
    *POOLS,
    *LONG_RESULTS,
    *DURABLE,
    *READERS,
    *REQUEST_FIELDS,
    *ENTRYPOINTS,
    *WORK,
    *DOORS,
    *CONNECTIONS,
    *SECURITY,
    *SCREENS,
    *STORE_ACCESS,
    *tenants.BUGS,
    *order.BUGS,
    *planner.BUGS,
    *UNREADABLE,
    *ROOM_BUGS,
    *PREEMPTIONS,
    *SURVIVORS,
    *MEASUREMENTS,
    *CLIENTS,
    *TERMINAL,
    *ATTEMPTS,
    *GATE,
    *PROMISES,
    *LEAVINGS,
    *RECORDS,
    *TRACES,
    *RESPONSES,
    *CONVERSATIONS,
    *UPSTREAM,
    *TOOLS,
)
