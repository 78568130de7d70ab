"""Stand-in for OpenTelemetry's collector: prints whose spans came. It runs in an image with nothing but Python."""

import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SERVICE = re.compile(rb"service\.name\x12.\n.([\w-]+)", re.DOTALL)
"""The attribute in a protobuf message; each dot is the length of what follows."""


class Receiver(BaseHTTPRequestHandler):
    """Answers every export with success."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        for service in SERVICE.findall(body):
            print("spans of", service.decode())
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


if __name__ == "__main__":
    ThreadingHTTPServer(("0.0.0.0", 4318), Receiver).serve_forever()  # noqa: S104 - its container's only port
