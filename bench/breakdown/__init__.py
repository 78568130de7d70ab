"""Where the time of a request goes, by concurrency: gateway, queue or engine, from the server's own stamps."""
