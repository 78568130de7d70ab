"""The manifests before a real API server: it takes every overlay, and its admission and its rights bind the scheduler.
It is no part of the project, so only `make test-kubernetes` runs this."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from api_server import ApiServer, api_server, missing
from docker_files import KUBERNETES, images, new_key

from scheduler.pools.kubernetes import COST_ANNOTATION, KubernetesPool
from scheduler.settings import KubernetesSettings
from streaming.fleet.plans import Plan

WANTED = "PENSTOCK_TEST_KUBERNETES"
OVERLAYS = ["cpu", "tensorrt-llm", "upstream"]
SPACE, OTHER, MODEL = "penstock", "team-a", "smollm2-135m-instruct"
WORKER = f"penstock-worker-{MODEL}"
IMAGES, DIGEST = ["redis", *images()], f"sha256:{1:064}"
SCHEDULER = f"system:serviceaccount:{SPACE}:penstock-scheduler"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(WANTED not in os.environ, reason="needs a real API server: make test-kubernetes"),
    pytest.mark.skipif(bool(missing()), reason=missing() or "there is one"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """With the namespace, which a dry run of what lies in it needs."""
    with api_server(tmp_path_factory.mktemp("kubernetes")) as found:
        made = found.kubectl("apply", "--filename", str(KUBERNETES / "base/namespace.yaml"))
        assert made.returncode == 0, made.stderr
        yield found


@pytest.fixture(scope="module")
def overlays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies, with what docker/new-key makes in them, and digests as docker/pin-images writes them down."""
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(KUBERNETES / "base", tree / "base")
    for name in OVERLAYS:
        folder = tree / "overlays" / name
        new_key(KUBERNETES / "overlays" / name, folder)
        rows = [{"name": image, "newName": f"registry.example/{image}", "digest": DIGEST} for image in IMAGES]
        component = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component", "images": rows}
        (folder / "images-by-digest").mkdir()
        (folder / "images-by-digest/kustomization.yaml").write_text(json.dumps(component))
    return tree / "overlays"


@pytest.mark.parametrize("name", OVERLAYS)
def test_it_takes_every_overlay(server: ApiServer, overlays: Path, name: str) -> None:
    """Every object, as kubectl builds them, without a warning: one names a field it does not know, or a pod that the
    "restricted" standard would refuse."""
    taken = server.kubectl("apply", "--kustomize", str(overlays / name), "--dry-run=server", "--validate=strict")
    assert taken.returncode == 0 and "Warning" not in taken.stderr, taken.stderr
    assert len(taken.stdout.splitlines()) >= 28


@pytest.fixture(scope="module")
def applied(server: ApiServer, overlays: Path) -> ApiServer:
    """With the trial's overlay in it, and the rules about the scheduler in force."""
    taken = server.kubectl("apply", "--kustomize", str(overlays / "cpu"))
    assert taken.returncode == 0, taken.stderr

    def in_force() -> bool:
        return patched(server, WORKER, TEMPLATE).returncode != 0

    deadline = time.monotonic() + 30
    while not in_force():
        assert time.monotonic() < deadline, "no policy is in force"
        time.sleep(0.2)
    return server


TEMPLATE = '{"spec": {"template": {"metadata": {"annotations": {"another": "template"}}}}}'


def patched(server: ApiServer, name: str, patch: str) -> CompletedProcess[str]:
    """What the scheduler is told when it would change a Deployment."""
    words = ["--namespace", SPACE, "--type", "merge", "--patch", patch, "--dry-run=server"]
    return server.kubectl("patch", "deployment", name, *words, who=SCHEDULER)


def created(server: ApiServer, deployment: str, name: str, space: str = SPACE, **changed: Any) -> CompletedProcess[str]:
    """What is said to a pod as this Deployment would make it, or with a changed specification."""
    template = server.get("deployment", deployment, "--namespace", space)["spec"]["template"]
    metadata = {"name": name, "labels": template["metadata"]["labels"]}
    each = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"] | changed}
    return server.kubectl("create", "--namespace", space, "--filename", "-", given=each)


def test_every_pod_is_admitted(applied: ApiServer) -> None:
    """The namespace enforces the "restricted" standard, on pods themselves."""
    for deployment in ("penstock-api", "penstock-offline", "penstock-scheduler", WORKER):
        made = created(applied, deployment, f"{deployment}-0")
        assert made.returncode == 0, made.stderr
    assert "violates PodSecurity" in created(applied, WORKER, "bad", hostNetwork=True).stderr


def test_the_scheduler_may_touch_workers_only(applied: ApiServer) -> None:
    """Of Deployments by its rights, of pods by the policy, and of a Deployment never what its pods are."""
    assert "the scheduler may change annotations only" in patched(applied, WORKER, TEMPLATE).stderr
    assert "Forbidden" in patched(applied, "penstock-api", '{"spec": {"replicas": 0}}').stderr
    said = {}
    for deployment in ("penstock-api", WORKER):
        assert created(applied, deployment, f"{deployment}-1").returncode == 0
        words = ["pod", f"{deployment}-1", "--namespace", SPACE, "--wait=false"]
        said[deployment] = applied.kubectl("delete", *words, who=SCHEDULER)
    assert "the scheduler may change and remove workers only" in said["penstock-api"].stderr
    assert said[WORKER].returncode == 0, said[WORKER].stderr


CHANGES = {
    "image": {"spec": {"containers": [{"name": "worker", "image": "evil.example/x:1"}]}},
    "label": {"metadata": {"labels": {"app.kubernetes.io/component": "api"}}},
    "owner": {"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "1"}]}},
    "finalizer": {"metadata": {"finalizers": ["example.com/never"]}},
}


@pytest.mark.parametrize("what", [*CHANGES, "annotation"])
def test_of_a_pod_the_scheduler_changes_annotations_alone(applied: ApiServer, what: str) -> None:
    """Another image would run with the Secrets of a worker, and another label takes a pod from its policies."""
    name = f"{WORKER}-{what}"
    assert created(applied, WORKER, name).returncode == 0
    cost = {"metadata": {"annotations": {COST_ANNOTATION: "-1"}}}
    status, said = applied.patch(f"/api/v1/namespaces/{SPACE}/pods/{name}", CHANGES.get(what, cost), SCHEDULER)
    if what in CHANGES:
        assert status == 422 and "the scheduler may change annotations only" in said
    else:
        assert status == 200, said


def test_an_overlay_may_have_another_namespace(applied: ApiServer, overlays: Path) -> None:
    """There the scheduler has its rights and is bound by the policy, and it has none in the namespace of another."""
    folder = shutil.copytree(overlays / "cpu", overlays / OTHER)
    kustomization = folder / "kustomization.yaml"
    kustomization.write_text(kustomization.read_text().replace(f"namespace: {SPACE}\n", f"namespace: {OTHER}\n"))
    taken = applied.kubectl("apply", "--kustomize", str(folder))
    assert taken.returncode == 0, taken.stderr
    said = {}
    for space in (SPACE, OTHER):
        for deployment in ("penstock-api", WORKER):
            assert created(applied, deployment, f"{deployment}-2", space).returncode == 0
            words = ["pod", f"{deployment}-2", "--namespace", space, "--wait=false"]
            said[space, deployment] = applied.kubectl("delete", *words, who=SCHEDULER.replace(SPACE, OTHER, 1)).stderr
    assert "the scheduler may change and remove workers only" in said[OTHER, "penstock-api"]
    assert said[OTHER, WORKER] == "" and "Forbidden" in said[SPACE, WORKER]


async def test_the_pool_scales_with_these_rights(
    applied: ApiServer, overlays: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a token of the scheduler's account; applying the overlay again leaves its number alone."""
    token = applied.kubectl("create", "token", "penstock-scheduler", "--namespace", SPACE).stdout.strip()
    monkeypatch.setenv("KUBECONFIG", str(applied.config(token, SPACE)))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    pool = KubernetesPool(KubernetesSettings(), "s")
    try:
        moves = await pool.moves([Plan(model=MODEL, want=3, reason="because", pool="kubernetes")], [], 1)
        await pool.carry_out(moves, 1)
    finally:
        await pool.close()
    for _ in range(2):
        assert applied.get("deployment", WORKER, "--namespace", SPACE)["spec"]["replicas"] == 3
        assert applied.kubectl("apply", "--kustomize", str(overlays / "cpu")).returncode == 0
