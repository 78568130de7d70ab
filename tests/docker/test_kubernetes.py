"""The manifests: objects find each other, pods may little and have time to drain, settings are settings. Their form is
held against the schemas of Kubernetes by `make check`."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import docker_files
import pytest
from docker_files import (
    COMPOSE,
    KUBERNETES,
    SECTIONS,
    SLACK_S,
    document,
    documents,
    images,
    logins,
    new_key,
    settings_only,
)
from kube import Kube

from api.auth.keys import Keyring, check_exposure
from api.settings import ApiSettings, KeySettings
from offline.settings import OfflineSettings
from penstock.config import Config, build, load
from scheduler.pools.base import Pool
from scheduler.pools.kubernetes import KubernetesPool
from scheduler.settings import KubernetesSettings
from streaming.fleet.plans import Plan
from streaming.fleet.process import Process
from streaming.fleet.settings import ModelSettings
from streaming.redis.settings import RedisSettings
from workers.engines.llamacpp.settings import LlamacppSettings
from workers.engines.trtllm.settings import TrtllmSettings
from workers.engines.upstream.settings import UpstreamSettings
from workers.settings import WorkerSettings

pytestmark = pytest.mark.slow

OVERLAYS = ["cpu", "tensorrt-llm", "upstream"]
IMAGES = images()
ENGINES = {"llamacpp": LlamacppSettings, "trtllm": TrtllmSettings, "upstream": UpstreamSettings}
COMPONENT = "app.kubernetes.io/component"
DRAINS = {"api": ApiSettings, "worker": WorkerSettings, "offline": OfflineSettings}
"""Roles that take time to end, and the settings that say how long, in the section of the role's name."""
BROUGHT = {"penstock-models"}
"""Volume claims the cluster's owner makes."""

MAX_NAME = 63 - len("-1234567890-12345")
"""Of a Deployment: with what it adds, its pods' names are host names, by which the scheduler knows their workers."""

WORKER = "worker-smollm2-135m-instruct"
Object = dict[str, Any]


@cache
def objects(folder: Path) -> list[Object]:
    """Everything a kustomization is made of. Ours patch nothing."""
    kustomization = document(folder / "kustomization.yaml")
    known = {"apiVersion", "kind", "namespace", "resources", "components", "secretGenerator"}
    assert set(kustomization) <= known, "this test would not see what another field does"
    found: list[Object] = []
    for name in kustomization["resources"]:
        path = (folder / name).resolve()
        found += objects(path) if path.is_dir() else documents(path)
    return found


def of_kind(overlay: str, *kinds: str) -> list[Object]:
    return [each for each in objects(KUBERNETES / "overlays" / overlay) if each["kind"] in kinds]


def pods(overlay: str) -> list[Object]:
    """Whatever makes pods."""
    return of_kind(overlay, "Deployment", "StatefulSet")


def role_of(owner: Object) -> str:
    return str(owner["metadata"]["labels"][COMPONENT])


def template(owner: Object) -> Object:
    return dict(owner["spec"]["template"])


def container(owner: Object) -> Object:
    (only,) = template(owner)["spec"]["containers"]
    return dict(only)


def logins_of(owner: Object) -> set[str]:
    """Secrets that become its variables, without one that the cluster's owner may leave out."""
    given = [each["secretRef"] for each in container(owner).get("envFrom", ())]
    return {each["name"] for each in given if not each.get("optional")}


def environ_of(owner: Object) -> dict[str, str]:
    """The variables that are ours: the image's, and what the manifest lays over them."""
    image = IMAGES[container(owner)["image"]][1].environ()
    return settings_only({**image, **{each["name"]: each["value"] for each in container(owner).get("env", ())}})


@pytest.fixture(params=OVERLAYS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, str]:
    """An overlay, its penstock.toml as `docker/new-key` makes it, and the key."""
    overlay: str = request.param
    return overlay, *new_key(KUBERNETES / "overlays" / overlay, tmp_path / overlay)


def config_of(owner: Object, settings: Path) -> Config:
    return docker_files.config_of(role_of(owner), settings, environ_of(owner))


ALL = [(overlay, owner["metadata"]["name"]) for overlay in OVERLAYS for owner in pods(overlay)]


def owner_of(overlay: str, name: str) -> Object:
    (found,) = [owner for owner in pods(overlay) if owner["metadata"]["name"] == name]
    return found


# --- pods ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("overlay", "name"), ALL)
def test_a_pod_may_little(overlay: str, name: str) -> None:
    """What the "restricted" standard asks, and a root file system that cannot be written; an image of ours runs as the
    user that it was made for, only the scheduler gets a token of the cluster, and no variable comes from a Service:
    one named penstock-api would set PENSTOCK_API_PORT to an address."""
    owner = owner_of(overlay, name)
    spec, only = template(owner)["spec"], container(owner)
    assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert only["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert {"requests", "limits"} <= set(only["resources"]) and "memory" in only["resources"]["limits"]
    assert spec["enableServiceLinks"] is False
    if role_of(owner) == "scheduler":
        accounts = [account["metadata"]["name"] for account in of_kind(overlay, "ServiceAccount")]
        assert [spec["serviceAccountName"]] == accounts
    else:
        assert spec["automountServiceAccountToken"] is False and "serviceAccountName" not in spec
    if only["image"] in IMAGES:
        user = f"{spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}"
        assert user == IMAGES[only["image"]][1].last("USER")


@pytest.mark.parametrize(("overlay", "name"), ALL)
def test_mounts_and_ports_are_there(overlay: str, name: str) -> None:
    """Every mount has its volume, none may fill a node, every probe has its port, and what is scraped listens."""
    owner = owner_of(overlay, name)
    spec, only = template(owner)["spec"], container(owner)
    claimed = [claim["metadata"]["name"] for claim in owner["spec"].get("volumeClaimTemplates", ())]
    volumes = {volume["name"]: volume for volume in spec.get("volumes", ())} | {name: {} for name in claimed}
    assert {mount["name"] for mount in only["volumeMounts"]} == set(volumes)
    claims = {
        volume["persistentVolumeClaim"]["claimName"] for volume in volumes.values() if "persistentVolumeClaim" in volume
    }
    assert all("sizeLimit" in volume["emptyDir"] for volume in volumes.values() if "emptyDir" in volume)
    made = {claim["metadata"]["name"] for claim in of_kind(overlay, "PersistentVolumeClaim")}
    assert claims <= BROUGHT | made
    ports = {port["name"]: port["containerPort"] for port in only["ports"]}
    probed = {probe["httpGet"]["port"] for key, probe in only.items() if key.endswith("Probe") and "httpGet" in probe}
    assert probed <= set(ports)
    scraped = template(owner)["metadata"].get("annotations", {}).get("prometheus.io/port")
    assert scraped is None or int(scraped) in ports.values()
    if only["image"] in IMAGES:
        assert [str(port) for port in ports.values()] == IMAGES[only["image"]][1].ports()


# --- settings --------------------------------------------------------------------------------------------------------


def test_the_settings_are_settings(made: tuple[str, Path, str]) -> None:
    """Every role takes file and variables; the key that was printed opens the door."""
    overlay, settings, key = made
    for owner in pods(overlay):
        if role_of(owner) != "redis":
            config = config_of(owner, settings)
    api = config_of(owner_of(overlay, "penstock-api"), settings)
    keyring = Keyring(api.table("keys", KeySettings))
    check_exposure(api.section("api", ApiSettings).host, keyring)
    assert keyring.caller(f"Bearer {key}").tenant == "first"
    redis = config.section("redis", RedisSettings).url
    services = {service["metadata"]["name"] for service in of_kind(overlay, "Service")}
    assert redis.split("/")[2].split(":")[0] in services or "example" in redis, "nobody answers there"
    for role, url in logins(settings.parent).items():
        assert re.fullmatch(rf"redis://{role}:[0-9a-f]{{48}}@{re.escape(redis.partition('//')[2])}", url)


def test_proxies_are_named_in_a_comment(made: tuple[str, Path, str]) -> None:
    """Only the owner of the cluster knows where the Ingress runs; without the two marks the example is a setting."""
    overlay, settings, _ = made
    settings.write_text(re.sub(r"^# (?=\[api\]|trusted_proxies)", "", settings.read_text(), flags=re.MULTILINE))
    api = config_of(owner_of(overlay, "penstock-api"), settings).section("api", ApiSettings)
    assert len(api.trusted_proxies) == 1


def test_each_role_has_a_login_of_its_own(made: tuple[str, Path, str]) -> None:
    """In a Secret that no other pod gets, out of a file that is made; Redis has the users to them."""
    overlay, settings, _ = made
    kustomization = document(KUBERNETES / "overlays" / overlay / "kustomization.yaml")
    generated = {each["name"]: each.get("envs") or each["files"] for each in kustomization["secretGenerator"]}
    files = [path.rpartition("=")[2] for paths in generated.values() for path in paths]
    assert all((settings.parent / path).is_file() for path in files)
    for owner in pods(overlay):
        role, spec = role_of(owner), template(owner)["spec"]
        volumes = spec.get("volumes", ())
        secrets = {each["secret"]["secretName"] for each in volumes if "secret" in each} | logins_of(owner)
        parts = [part for each in volumes for part in each.get("projected", {}).get("sources", ())]
        secrets |= {part["secret"]["name"] for part in parts}
        if role == "redis":
            assert secrets == {"penstock-redis-users"}
            (mount,) = [each for each in container(owner)["volumeMounts"] if each["name"] == "users"]
            (path,) = generated["penstock-redis-users"]
            assert f"{mount['mountPath']}/{Path(path).name}" == container(owner)["args"][-1]
        else:
            own = f"penstock-settings-{role}"
            has_own = bool({"webhooks", "keys"} & set(SECTIONS[role]))
            assert secrets == {"penstock-settings", f"penstock-redis-{role}", *([own] if has_own else [])}
            assert not has_own or generated[own] == [f"penstock.{role}.toml=secrets/{role}.toml"]
            assert bool(config_of(owner, settings).raw.get("keys")) == (role == "api")
            assert generated[f"penstock-redis-{role}"] == [f"secrets/{role}.env"]


def test_every_model_has_its_workers(made: tuple[str, Path, str]) -> None:
    """One Deployment each, by the name the scheduler looks for, whose number of pods is left to the scheduler."""
    overlay, settings, _ = made
    workers = {owner["metadata"]["name"]: owner for owner in pods(overlay) if role_of(owner) == "worker"}
    config = config_of(next(iter(workers.values())), settings)
    models = config.table("models", ModelSettings)
    by_model = {model: KubernetesSettings().deployment_of(model) for model in models}
    assert set(by_model.values()) == set(workers)
    for model, name in by_model.items():
        assert len(name) <= MAX_NAME
        assert container(workers[name])["args"] == ["--model", model]
        assert "replicas" not in workers[name]["spec"], "applying the file again would undo what the scheduler decided"
        build(ENGINES[models[model].engine], models[model].options, model)


def test_there_is_time_to_drain(made: tuple[str, Path, str]) -> None:
    """The kubelet kills later than the role has given up waiting; its clock runs from before the hook."""
    overlay, settings, _ = made
    for owner in pods(overlay):
        if (kind := DRAINS.get(section := role_of(owner))) is None:
            continue
        hook = container(owner).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        needed = int(hook[1]) + config_of(owner, settings).section(section, kind).drain_s + SLACK_S
        assert template(owner)["spec"]["terminationGracePeriodSeconds"] >= needed


@pytest.mark.parametrize(("overlay", "name"), ALL)
def test_every_pod_is_probed(overlay: str, name: str) -> None:
    """Until it has started, and whether it lives; a Service asks besides whether it is ready. A pod that is alive at
    its start gets more time for it than later for an answer."""
    only = container(owner_of(overlay, name))
    services = [each["spec"]["selector"] for each in of_kind(overlay, "Service")]
    labels = template(owner_of(overlay, name))["metadata"]["labels"]
    served = any(selector.items() <= labels.items() for selector in services) and "redis" not in name
    assert ("readinessProbe" in only) == served
    start, life = only["startupProbe"], only["livenessProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 2 * life["periodSeconds"]
    assert life["periodSeconds"] * life["failureThreshold"] >= 60, "a pause of the store would end it"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_node_can_be_drained_and_some_pod_stays(overlay: str) -> None:
    """Every role has one budget that lets one pod go and keeps another. A single Redis has none: it would hold up the
    node for ever."""
    budgets = {each["metadata"]["name"]: each["spec"] for each in of_kind(overlay, "PodDisruptionBudget")}
    assert set(budgets) == {owner["metadata"]["name"] for owner in pods(overlay) if role_of(owner) != "redis"}
    for name, budget in budgets.items():
        spec = owner_of(overlay, name)["spec"]
        assert budget["selector"] == spec["selector"]
        assert budget.get("maxUnavailable") == 1 or 1 <= budget["minAvailable"] < spec["replicas"]


def test_keda_scales_the_workers_of_the_trial() -> None:
    """All signals are about the model whose Deployment it scales, within the limits that the settings name; it looks
    more often than the cooldown lasts."""
    spec = document(KUBERNETES / "keda/scaledobject.yaml")["spec"]
    assert spec["scaleTargetRef"]["name"] == owner_of("cpu", f"penstock-{WORKER}")["metadata"]["name"]
    model = WORKER.removeprefix("worker-")
    assert all(f'model="{model}"' in trigger["metadata"]["query"] for trigger in spec["triggers"])
    settings = load(SECTIONS["worker"], path=KUBERNETES / "overlays/cpu/penstock.example.toml", environ={})
    assert spec["maxReplicaCount"] == settings.table("models", ModelSettings)[model].max_workers
    assert spec["minReplicaCount"] == 0 and spec["pollingInterval"] < spec["cooldownPeriod"]


# --- objects ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_find_their_pods(overlay: str) -> None:
    """Owners select their own pods and no other's; Services, budgets and policies select some."""
    labels = {owner["metadata"]["name"]: template(owner)["metadata"]["labels"] for owner in pods(overlay)}

    def chosen(selector: dict[str, str]) -> set[str]:
        return {name for name, have in labels.items() if selector.items() <= have.items()}

    for owner in pods(overlay):
        assert chosen(owner["spec"]["selector"]["matchLabels"]) == {owner["metadata"]["name"]}
    for service in of_kind(overlay, "Service"):
        (name,) = chosen(service["spec"]["selector"])
        offered = {port["name"] for port in container(owner_of(overlay, name))["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= offered
    for policy in of_kind(overlay, "NetworkPolicy"):
        names = {name for name, have in labels.items() if selects(policy["spec"]["podSelector"], have)}
        offered = {port["name"] for name in names for port in container(owner_of(overlay, name))["ports"]}
        assert names
        assert {port["port"] for rule in policy["spec"].get("ingress", ()) for port in rule["ports"]} <= offered


def test_redis_opens_no_connection() -> None:
    """Where it is in the cluster; and workers and schedulers reach none but that one."""
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind("cpu", "NetworkPolicy")}
    redis = policies["penstock-to-redis"]
    assert redis["policyTypes"] == ["Ingress", "Egress"] and redis["egress"] == []
    (rule,) = policies["to-redis"]["egress"]
    assert rule["to"] == [{"podSelector": redis["podSelector"]}]
    assert [port["port"] for port in rule["ports"]] == [
        container(owner_of("cpu", "penstock-redis"))["ports"][0]["containerPort"]
    ]


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a policy is about pods with these labels."""
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    wanted = {(row["key"], row["operator"]): row["values"] for row in selector.get("matchExpressions", ())}
    listed = all(operator == "In" and labels.get(key) in values for (key, operator), values in wanted.items())
    return listed and selector.get("matchLabels", {}).items() <= labels.items()


def may_reach(overlay: str, name: str, namespace: str, port: int) -> bool:
    """Whether policies let these pods connect to pods of another namespace, or to addresses outside ("")."""
    labels = template(owner_of(overlay, name))["metadata"]["labels"]
    rules: list[Object] | None = None
    for policy in of_kind(overlay, "NetworkPolicy"):
        if selects(policy["spec"]["podSelector"], labels) and "Egress" in policy["spec"].get("policyTypes", ()):
            rules = [*(rules or ()), *policy["spec"]["egress"]]
    named = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    return rules is None or any(
        port in [each["port"] for each in rule["ports"]] and ("to" not in rule or named in rule["to"]) for rule in rules
    )


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_everyone_reaches_what_its_features_need(overlay: str) -> None:
    """Webhooks and brokers, the cluster's own API, names, collectors of traces, a Redis that is not in the overlay, and
    the servers of an upstream model; workers and schedulers nothing else."""
    for role, ports in {"offline": (443, 5671, 5672, 9092), "scheduler": (443, 6443)}.items():
        assert all(may_reach(overlay, f"penstock-{role}", "", port) for port in ports)
    (worker,) = [owner["metadata"]["name"] for owner in pods(overlay) if role_of(owner) == "worker"]
    for name in ("penstock-api", "penstock-scheduler", "penstock-offline", worker):
        assert may_reach(overlay, name, "kube-system", 53) and may_reach(overlay, name, "monitoring", 4318)
        assert overlay == "cpu" or all(may_reach(overlay, name, "", port) for port in (6379, 6380, 26379))
    settings = load(SECTIONS["worker"], path=KUBERNETES / "overlays" / overlay / "penstock.example.toml", environ={})
    for row in settings.table("models", ModelSettings).values():
        for url in map(urlsplit, row.options.get("urls", ())):
            _, namespace, _ = (url.hostname or "").split(".")
            assert may_reach(overlay, worker, namespace, url.port or 0)
    for name in (worker, "penstock-scheduler"):
        assert overlay != "cpu" or not may_reach(overlay, name, "", 6379)
        assert not any(may_reach(overlay, name, "default", port) for port in (80, 4318, 5672, 8000))
    assert not may_reach(overlay, worker, "default", 443)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_scheduler_may_do_what_its_pool_does(overlay: str) -> None:
    """And nothing beyond: no Deployment but those of workers, by name, none is made or deleted, and nothing is seen
    outside the namespace."""
    roles, bindings = of_kind(overlay, "Role"), of_kind(overlay, "RoleBinding")
    assert of_kind(overlay, "ClusterRole", "ClusterRoleBinding") == []
    assert {binding["roleRef"]["name"] for binding in bindings} == {role["metadata"]["name"] for role in roles}
    (account,) = of_kind(overlay, "ServiceAccount")
    for binding in bindings:
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["metadata"]["name"]}]
    (worker,) = [owner["metadata"]["name"] for owner in pods(overlay) if role_of(owner) == "worker"]
    assert rights(roles) == {
        ("apps", "deployments", worker): {"get", "patch"},
        ("apps", "deployments/scale", worker): {"update"},
        ("", "pods", ""): {"list", "patch", "delete"},
    }


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_names_cannot_bound_a_policy_does(overlay: str) -> None:
    """The scheduler may touch workers alone, and of them and their Deployments annotations: the policy is about its
    account, denies, and holds in every namespace. (That a cluster takes its words is for a cluster to show.)"""
    (policy,) = [each["spec"] for each in of_kind(overlay, "ValidatingAdmissionPolicy")]
    (binding,) = of_kind(overlay, "ValidatingAdmissionPolicyBinding")
    (named,) = [each["metadata"]["name"] for each in of_kind(overlay, "ValidatingAdmissionPolicy")]
    (account,) = of_kind(overlay, "ServiceAccount")
    assert policy["failurePolicy"] == "Fail"
    assert binding["spec"] == {"policyName": named, "validationActions": ["Deny"]}
    (condition,) = policy["matchConditions"]
    assert f"'system:serviceaccount:' + request.namespace + ':{account['metadata']['name']}'" in condition["expression"]
    ruled = {(each, op) for rule in policy["matchConstraints"]["resourceRules"]
             for each in rule["resources"] for op in rule["operations"]}  # fmt: skip
    assert ruled == {("pods", "UPDATE"), ("pods", "DELETE"), ("deployments", "UPDATE")}
    workers, changes = (each["expression"] for each in policy["validations"])
    assert f"oldObject.metadata.labels['{COMPONENT}'] == 'worker'" in workers
    assert all(
        f"object.{each} == oldObject.{each}" in changes
        for each in ("spec", "metadata.labels", "metadata.?ownerReferences", "metadata.?finalizers")
    )


def rights(roles: list[Object]) -> dict[tuple[str, str, str], set[str]]:
    """Verbs by group, resource and name."""
    return {(group, resource, name): set(rule["verbs"]) for role in roles for rule in role["rules"]
            for group in rule["apiGroups"] for resource in rule["resources"]
            for name in rule.get("resourceNames", [""])}  # fmt: skip


def right(method: str, path: str) -> tuple[tuple[str, str, str], str]:
    """The right that a request to the API server needs; pods have no names that are known before."""
    match = re.fullmatch(r"/(?:api/v1|apis/(\w+)/v1)/namespaces/\w+/(\w+)(?:/([\w-]+)(/\w+)?)?(?:\?.*)?", path)
    assert match, path
    group, resource, name, below = match.groups()
    verbs = {"GET": "get" if name else "list", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}
    return (group or "", resource + (below or ""), name if group else ""), verbs[method]


async def test_its_rights_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request the pool makes to go up, to let a drained pod go, and to replace one by name is among them."""
    asked: set[tuple[tuple[str, str, str], str]] = set()
    with Kube(tmp_path) as kube:
        monkeypatch.setenv("KUBECONFIG", str(kube.config))
        answer = kube.answer
        monkeypatch.setattr(kube, "answer", lambda *request: asked.add(right(*request[:2])) or answer(*request))
        pool = KubernetesPool(KubernetesSettings(), "s")
        kube.deploy("penstock-worker-m", 1)
        try:
            await follow(pool, want=3)
            await follow(pool, want=2)  # while another starts: one is taken away by name
            kube.all_ready()
            await follow(pool, want=1)
        finally:
            await pool.close()
        assert len(kube.pods) == 1 and kube.refused == []
    needed = {((group, kind, name.replace("worker-m", WORKER)), verb) for (group, kind, name), verb in asked}
    have = {(where, verb) for where, verbs in rights(of_kind("cpu", "Role")).items() for verb in verbs}
    assert needed == have


async def follow(pool: Pool, want: int) -> None:
    """A tick without a worker that says anything: its pods count as drained."""
    silent: list[Process] = []
    moves = await pool.moves([Plan(model="m", want=want, reason="because", pool="kubernetes")], silent, 1)
    await pool.carry_out(moves, 1)


def test_both_deployments_have_the_same_redis() -> None:
    """One test shows what these options keep: compose's."""
    services = document(COMPOSE / "compose.yaml")["services"]
    redis = container(owner_of("cpu", "penstock-redis"))
    assert redis["args"] == services["redis"]["command"]
    assert redis["startupProbe"]["exec"]["command"][-1] == services["redis"]["healthcheck"]["test"][1]
    assert " ".join(redis["livenessProbe"]["exec"]["command"]) in services["redis"]["healthcheck"]["test"][1]
