"""A trace, or requests made to look like one, against a live endpoint: no request waits for another's answer."""
