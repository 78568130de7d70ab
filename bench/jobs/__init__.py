"""One-token jobs per second, from the enqueuing to the result: Penstock through its HTTP door, and task queues."""
