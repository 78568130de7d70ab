"""A Kubernetes API server of our own, on loopback: Deployments, their scale, their pods, and a controller that makes
the number of pods come true the way ReplicaSets do, with their order of deletion."""

from __future__ import annotations

import itertools
import json
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from http_serving import QuietHandler

NAMESPACE = "llm"
EPOCH = "penstock/leader-epoch"
COST = "controller.kubernetes.io/pod-deletion-cost"
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: test
clusters: [{{name: c, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: u, user: {{token: {token}}}}}]
contexts: [{{name: test, context: {{cluster: c, user: u, namespace: llm}}}}]
"""


class Refused(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Object:
    """Metadata common to all of them."""

    name: str
    labels: dict[str, str]
    version: int
    annotations: dict[str, str] = field(default_factory=dict)
    created: float = 0.0

    def meta(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "namespace": NAMESPACE,
            "labels": self.labels,
            "annotations": self.annotations,
            "resourceVersion": str(self.version),
            "creationTimestamp": datetime.fromtimestamp(self.created, UTC).isoformat().replace("+00:00", "Z"),
        }


@dataclass
class Deployment(Object):
    replicas: int = 0
    expressions: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        selector = {"matchLabels": self.labels, "matchExpressions": self.expressions}
        spec = {"replicas": self.replicas, "selector": selector, "template": {}}
        return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": self.meta(), "spec": spec}

    def scale(self) -> dict[str, Any]:
        meta = {"name": self.name, "namespace": NAMESPACE, "resourceVersion": str(self.version)}
        spec = {"replicas": self.replicas}
        return {"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": meta, "spec": spec}


@dataclass
class Pod(Object):
    ready: bool = False

    def as_json(self) -> dict[str, Any]:
        condition = {"type": "Ready", "status": "True" if self.ready else "False"}
        status = {"phase": "Running" if self.ready else "Pending", "conditions": [condition]}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": self.meta(), "status": status}


class Kube:
    """`with Kube(folder) as kube:` serves at `kube.port`; `kube.config` is a kubeconfig for it."""

    def __init__(self, folder: Path) -> None:
        self.lock = threading.RLock()
        self.deployments: dict[str, Deployment] = {}
        self.pods: dict[str, Pod] = {}
        self.writes: list[tuple[str, str, Any]] = []
        """(method, path, body) of what was asked to be changed, and was."""
        self.refused: list[tuple[int, str, str]] = []
        self.stale: list[tuple[str, str, str]] = []
        """(writer, method, path) of what was changed by anyone but the leader whose epoch is on the Deployment."""
        self.writers: list[str] = []
        """Whose epoch was written, in order: by the token each client has."""
        self.deleted: list[str] = []
        """Pods, in order."""
        self.down = False
        self._count = itertools.count(1)
        kube = self

        class Handler(QuietHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self) -> None:
                writer = self.headers.get("Authorization", "").rpartition(" ")[2]
                self.send(*kube.answer(self.command, self.path, self.read_json(), writer))

            do_GET = do_PATCH = do_PUT = do_DELETE = handle_one  # noqa: N815 - the names http.server looks for

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._folder = folder
        self.config = self.config_of("t")

    def __enter__(self) -> Kube:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def config_of(self, token: str) -> Path:
        """A kubeconfig for a client that is known by this token."""
        path = self._folder / f"kubeconfig-{token}"
        path.write_text(KUBECONFIG.format(port=self.port, token=token))
        return path

    # --- what a test does --------------------------------------------------------------------------------------------

    def deploy(self, name: str, replicas: int, *, ready: bool = True) -> Deployment:
        """A Deployment whose pods are there already."""
        with self.lock:
            deployment = Deployment(name, {"app": name}, self._next(), replicas=replicas)
            self.deployments[name] = deployment
            self._reconcile()
            if ready:
                self.all_ready()
            return deployment

    def all_ready(self) -> None:
        """Every pod has started."""
        with self.lock:
            for pod in self.pods.values():
                pod.ready, pod.version = True, self._next()

    # --- what a client asks ------------------------------------------------------------------------------------------

    def answer(self, method: str, path: str, body: Any, writer: str) -> tuple[int, dict[str, Any]]:
        with self.lock:
            try:
                if self.down:
                    raise Refused(500, "etcd is away")
                answer = self._route(method, path, body)
            except Refused as error:
                self.refused.append((error.code, method, path))
                status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": error.code}
                return error.code, {**status, "message": str(error), "metadata": {}}
            if method != "GET":
                self.writes.append((method, path, body))
                if EPOCH in json.dumps(body):
                    self.writers.append(writer)
                elif self.writers[-1:] != [writer]:
                    self.stale.append((writer, method, path))
                self._reconcile()
            return 200, answer

    def _route(self, method: str, path: str, body: Any) -> dict[str, Any]:
        url = urlsplit(path)
        match url.path.strip("/").split("/"):
            case ["apis", "apps", "v1", "namespaces", "llm", "deployments", name]:
                return self._deployment(method, name, body).as_json()
            case ["apis", "apps", "v1", "namespaces", "llm", "deployments", name, "scale"]:
                return self._scale(method, name, body)
            case ["api", "v1", "namespaces", "llm", "pods"]:
                wanted = dict(pair.split("=") for pair in parse_qs(url.query)["labelSelector"][0].split(","))
                found = [pod.as_json() for pod in self.pods.values() if wanted.items() <= pod.labels.items()]
                return {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": found}
            case ["api", "v1", "namespaces", "llm", "pods", name]:
                return self._pod(method, name, body)
        raise Refused(404, f"no such resource: {path}")

    def _deployment(self, method: str, name: str, body: Any) -> Deployment:
        deployment = self.deployments.get(name)
        if deployment is None:
            raise Refused(404, f'deployments.apps "{name}" not found')
        if method == "PATCH":
            self._patch(deployment, body)
        return deployment

    def _scale(self, method: str, name: str, body: Any) -> dict[str, Any]:
        deployment = self._deployment("GET", name, None)
        if method == "PUT":
            self._check(deployment, body["metadata"])
            deployment.replicas, deployment.version = body["spec"]["replicas"], self._next()
        return deployment.scale()

    def _pod(self, method: str, name: str, body: Any) -> dict[str, Any]:
        pod = self.pods.get(name)
        if pod is None:
            raise Refused(404, f'pods "{name}" not found')
        if method == "DELETE":
            self._delete(pod)
        elif method == "PATCH":
            self._patch(pod, body)
        return pod.as_json()

    def _patch(self, target: Object, body: Any) -> None:
        """A merge patch of the metadata."""
        meta = body["metadata"]
        self._check(target, meta)
        target.annotations |= meta.get("annotations", {})
        target.version = self._next()

    def _check(self, target: Object, meta: dict[str, Any]) -> None:
        if meta.get("resourceVersion") not in (None, str(target.version)):
            raise Refused(409, f"{target.name}: the object has been modified")

    # --- the controller ----------------------------------------------------------------------------------------------

    def _reconcile(self) -> None:
        for deployment in self.deployments.values():
            pods = [pod for pod in self.pods.values() if deployment.labels.items() <= pod.labels.items()]
            for _ in range(deployment.replicas - len(pods)):
                number = next(self._count)
                name = f"{deployment.name}-{number}"
                self.pods[name] = Pod(name, dict(deployment.labels), self._next(), created=1_700_000_000.0 + number)
            surplus = max(0, len(pods) - deployment.replicas)
            for pod in sorted(pods, key=self._rank)[:surplus]:
                self._delete(pod)

    @staticmethod
    def _rank(pod: Pod) -> tuple[bool, int, float]:
        """First to go: what is not ready, then the cheapest, then the youngest."""
        return (pod.ready, int(pod.annotations.get(COST, 0)), -pod.created)

    def _delete(self, pod: Pod) -> None:
        del self.pods[pod.name]
        self.deleted.append(pod.name)

    def _next(self) -> int:
        return next(self._count)
