"""Follows a stream with the Python client of Durable Streams, in an environment of its own: URL, offset, kind of read.

Prints each batch as one line of JSON: the offset behind it, and its messages; an empty one as it begins. Ends behind
the job's last message.
"""

import json
import sys

from durable_streams import stream

ENDS = {"completed", "failed", "cancelled", "expired"}


def follow(url: str, offset: str, live: str) -> None:
    print('["", []]', flush=True)
    with stream(url, offset=offset, live=live) as response:  # type: ignore[arg-type]
        for event in response.iter_events(mode="json"):
            print(json.dumps([event.next_offset, event.data]), flush=True)
            if ENDS & {message["event"] for message in event.data}:  # this version knows no end of a stream
                return


if __name__ == "__main__":
    follow(*sys.argv[1:])
