"""What the charts render to, by a real helm: what is always so, and what the values change."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lupa.lua51
import promql_parser
import pytest
import yaml
from e2e import charts
from e2e.fixtures import needs_helm
from e2e.paths import REPOSITORY
from msa_operator import chart, metrics, rbac, settings
from msa_operator.api.read import Reader
from msa_operator.reconcile import conditions

MONITORING = [
    f"--set=monitoring.{part}.enabled=true"
    for part in ("serviceMonitor", "podMonitor", "rules", "dashboard")
]
EXAMPLES = sorted((charts.OPERATOR / "examples").glob("*.yaml"))
NAMESPACED = "--set=settings.namespaces={team-a,team-b}"


@pytest.fixture(scope="module", autouse=True)
def helm() -> None:
    needs_helm()


def rendered(*arguments: str, chart: Path = charts.OPERATOR) -> list[dict[str, Any]]:
    return [x for x in yaml.safe_load_all(charts.template(chart, *arguments)) if x]


def one(objects: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    (found,) = [
        x for x in objects if x["kind"] == kind and (not name or x["metadata"]["name"] == name)
    ]
    return found


def values() -> dict[str, Any]:
    return yaml.safe_load((charts.OPERATOR / "values.yaml").read_text())


def pod(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return one(objects, "Deployment")["spec"]["template"]["spec"]


def read_settings(objects: list[dict[str, Any]], folder: Path) -> settings.Settings:
    path = folder / "settings.yaml"
    path.write_text(one(objects, "ConfigMap", "flash-msa-operator")["data"]["settings.yaml"])
    return settings.load(path)


@pytest.mark.parametrize("folder", [charts.CRDS, charts.OPERATOR], ids=lambda p: p.name)
def test_helm_has_nothing_to_say(folder: Path):
    assert "0 chart(s) failed" in charts.helm("lint", "--strict", str(folder))
    about = yaml.safe_load((folder / "Chart.yaml").read_text())
    # A chart whose declared dependency is absent is refused, even when its condition is false.
    assert not about.get("dependencies") and not (folder / "charts").exists()


def test_versions_are_those_of_the_package():
    project = (REPOSITORY / "pyproject.toml").read_text()
    version = re.search(r'(?m)^version = "(.*)"', project)
    assert version
    for folder in (charts.CRDS, charts.OPERATOR):
        about = yaml.safe_load((folder / "Chart.yaml").read_text())
        assert about["appVersion"] == version[1]
        # SemVer writes 0.1.0.dev0 as 0.1.0-dev.0.
        assert about["version"] == re.sub(r"\.?(dev|a|b|rc)(\d+)$", r"-\1.\2", version[1])
    assert values()["settings"]["image"].endswith(f":{version[1]}")


def test_the_version_of_ray_is_the_one_that_is_tested():
    lock = (REPOSITORY / "requirements/dev.lock").read_text()
    pinned = re.search(r"(?m)^ray(?:\[.*\])?==(\S+)", lock)
    assert pinned and values()["settings"]["rayVersion"] == pinned[1]


def test_what_is_generated_is_current():
    for path, text in chart.files(REPOSITORY).items():
        assert path.read_text() == text, f"{path} is stale: make crd"
    assert charts.INSTALL.read_text() == charts.install_manifest(), "stale: make charts"


def test_definitions_are_the_ones_in_manifests_and_stay():
    for definition in rendered(chart=charts.CRDS):
        assert definition["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
        plural = definition["spec"]["names"]["plural"]
        plain = (REPOSITORY / f"manifests/crds/{plural}.yaml").read_text()
        assert definition == yaml.safe_load(plain)


def test_defaults_of_chart_and_code_agree():
    given = values()["settings"]
    plain = settings.Settings.model_validate(
        {"image": given["image"], "rayVersion": given["rayVersion"]}
    ).model_dump(by_alias=True, mode="json", exclude_none=True)
    assert given == plain


@pytest.mark.parametrize("arguments", [
    [],
    [NAMESPACED],
    ["--set=settings.checkpoint.claim=shared"],
    ["--set=settings.checkpoint.uri=s3://bucket/x", "--set=settings.metricsNamespace=monitoring"],
    ["--set-json=settings.lease.retrySeconds=0.5", "--set=settings.concurrency=1"],
])  # fmt: skip
def test_the_operator_reads_the_settings_that_the_chart_writes(
    tmp_path: Path, arguments: list[str]
):
    found = read_settings(rendered(*arguments), tmp_path)
    assert found.image == values()["settings"]["image"]
    assert found.namespaces == (("team-a", "team-b") if NAMESPACED in arguments else ())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_render_to_what_the_operator_reads(tmp_path: Path, path: Path):
    objects = rendered(f"--values={path}")
    found = read_settings(objects, tmp_path)
    assert found.checkpoint.uri or found.checkpoint.claim
    given = yaml.safe_load(path.read_text())
    assert found.model_dump(by_alias=True, mode="json").items() >= {
        (k, v) for k, v in given["settings"].items() if isinstance(v, str)
    }  # fmt: skip
    for name in given.get("settings", {}).get("namespaces", ()):
        assert any(x["metadata"].get("namespace") == name for x in objects)


@pytest.mark.parametrize("wrong", [
    "replicas=5",
    "replicas=one",
    "settings.namspaces={a}",
    "settings.headMemory=8GB",
    "settings.image=",
    "settings.rayVersion=2.60",
    "settings.concurrency=0",
    "settings.resyncSeconds=0",
    "settings.namespaces={a,a}",
    "settings.namespaces={Team_A}",
    "settings.checkpoint.uri=gs://bucket/x",
    "settings.checkpoint.uri=s3://bucket/x,settings.checkpoint.claim=shared",
    "settings.timeouts.apiSecs=5",
    "image.digest=latest",
    "image.pullPolicy=Sometimes",
    "logFormat=xml",
    "resources.limits.memory=lots",
    "networkPolicy.apiServerPorts={0}",
    "monitoring.serviceMonitor.interval=often",
    "serviceAcount.create=false",
    "env[0].name=A,env[0].valueFrom.secretKeyRef.name=x",
])  # fmt: skip
def test_wrong_values_are_refused(wrong: str):
    with pytest.raises(RuntimeError, match="values don't meet the specifications"):
        charts.template(charts.OPERATOR, "--set", wrong)


def test_the_definitions_have_no_values():
    with pytest.raises(RuntimeError, match="values don't meet the specifications"):
        charts.template(charts.CRDS, "--set=keep=false")


def test_whatever_the_schema_of_settings_lets_through_the_operator_takes():
    # The other way round is not so: rules over several fields are the operator's alone.
    schema = chart.settings_schema()
    plain = json.dumps(schema)
    assert "x-kubernetes" not in plain and schema["additionalProperties"] is False
    reader = Reader(lambda _: "")
    least = {"image": "a", "rayVersion": "2.60.0"}
    for name, node in schema["properties"].items():
        if "minimum" in node:
            for bound in (node["minimum"], node["maximum"]):
                assert reader.read(settings.Settings, {**least, name: bound}), name
    assert not reader.problems


def test_two_operators_never_act_at_once():
    spec = one(rendered(), "Deployment")["spec"]
    assert spec["strategy"] == {"type": "Recreate"} and spec["replicas"] == 1


def test_the_pod_can_do_no_more_than_it_must():
    objects = rendered()
    spec = pod(objects)
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}
    assert "memory" in container["resources"]["limits"]
    assert not any(x["kind"] == "Secret" for x in rendered(*MONITORING))
    # What must be written somewhere is written to memory of the pod's own.
    writable = [m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")]
    assert writable == ["/tmp"]


def test_probes_see_a_stalled_watch_and_give_the_first_list_time():
    (container,) = pod(rendered())["containers"]
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    start = container["startupProbe"]
    assert start["httpGet"]["path"] == "/healthz"
    assert start["periodSeconds"] * start["failureThreshold"] >= 120
    assert {"name": "http", "containerPort": settings.PORT} in container["ports"]


def test_changed_settings_are_another_pod():
    def mark(*arguments: str) -> str:
        template = one(rendered(*arguments), "Deployment")["spec"]["template"]
        return template["metadata"]["annotations"]["flashmsa.dev/settings"]

    assert mark() == mark("--set=logFormat=text")
    assert mark() != mark("--set=settings.headMemory=4Gi")


def test_a_digest_comes_before_a_tag():
    digest = f"sha256:{'a' * 64}"
    (container,) = pod(rendered("--set=image.tag=1.2", f"--set=image.digest={digest}"))[
        "containers"
    ]
    assert container["image"] == f"flash-msa-operator@{digest}"


def test_every_value_reaches_the_pod():
    spec = pod(rendered(
        "--set=priorityClassName=high", "--set=nodeSelector.pool=system",
        "--set=tolerations[0].key=system", "--set=imagePullSecrets[0].name=registry",
        "--set=env[0].name=HTTPS_PROXY", "--set=env[0].value=http://proxy.example:3128",
        "--set=affinity.nodeAffinity.x=y", "--set=replicas=2",
    ))  # fmt: skip
    assert spec["priorityClassName"] == "high" and spec["nodeSelector"] == {"pool": "system"}
    assert spec["tolerations"] == [{"key": "system"}]
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["affinity"] == {"nodeAffinity": {"x": "y"}}
    proxy = {"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"}
    assert proxy in spec["containers"][0]["env"]


def granted(objects: list[dict[str, Any]], kind: str, name: str, namespace: str = "") -> Any:
    """The rules that a binding of this kind and name gives the operator's account."""
    (role,) = [
        x for x in objects
        if x["kind"] == kind and x["metadata"]["name"] == name
        and x["metadata"].get("namespace", "") == namespace
    ]  # fmt: skip
    (binding,) = [
        x for x in objects
        if x["kind"] == f"{kind}Binding" and x["roleRef"]["name"] == name
        and x["metadata"].get("namespace", "") == namespace
    ]  # fmt: skip
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": "flash-msa-operator", "namespace": charts.NAMESPACE}
    ]
    assert binding["roleRef"]["kind"] == kind
    return role["rules"]


def test_rights_are_those_of_the_table_everywhere():
    objects = rendered()
    cluster = f"flash-msa-operator:{charts.NAMESPACE}"
    own = granted(objects, "Role", "flash-msa-operator", charts.NAMESPACE)
    assert own == rbac.rules("own")
    assert granted(objects, "ClusterRole", cluster) == rbac.rules("cluster")
    assert granted(objects, "ClusterRole", f"{cluster}:jobs") == rbac.rules("jobs")
    bound = [x for x in objects if x["kind"].endswith("Binding")]
    assert len(bound) == 3, "another binding gives rights that the table does not have"


def test_rights_in_some_namespaces_are_in_no_other():
    objects = rendered(NAMESPACED)
    cluster = f"flash-msa-operator:{charts.NAMESPACE}"
    for namespace in ("team-a", "team-b"):
        found = granted(objects, "Role", "flash-msa-operator-jobs", namespace)
        assert found == rbac.rules("jobs")
    assert granted(objects, "ClusterRole", cluster) == rbac.rules("cluster")
    assert not any(x["metadata"]["name"] == f"{cluster}:jobs" for x in objects)


def test_an_installation_can_do_without_anything_of_the_cluster():
    objects = rendered(NAMESPACED, "--set=rbac.clusterRead=false,rbac.aggregate=false")
    assert not any(x["kind"].startswith("Cluster") for x in objects)
    assert granted(objects, "Role", "flash-msa-operator-jobs", "team-a") == rbac.rules("jobs")


def test_the_table_grants_nothing_wide():
    for rule in rbac.RULES:
        assert "*" not in (rule.group, *rule.resources, *rule.verbs)
        assert rule.why
        if "secrets" in rule.resources:
            # A list would show every secret of a namespace.
            assert rule.verbs == ("get",)
        if rule.scope == "cluster":
            assert set(rule.verbs) <= {"get", "list", "watch"}, "the cluster is only read"
        assert not {
            "roles",
            "rolebindings",
            "clusterroles",
            "serviceaccounts/token",
            "pods/exec",
        } & {*rule.resources}


def test_installations_in_two_namespaces_share_nothing_of_the_cluster():
    def cluster_wide(namespace: str) -> set[tuple[str, str]]:
        text = charts.template(charts.OPERATOR, release="same", namespace=namespace)
        found = [x for x in yaml.safe_load_all(text) if x]
        assert {x["metadata"].get("namespace", namespace) for x in found} == {namespace}
        return {
            (x["kind"], x["metadata"]["name"]) for x in found if "namespace" not in x["metadata"]
        }

    assert cluster_wide("one") and not cluster_wide("one") & cluster_wide("two")


def test_roles_and_account_of_somebody_else_are_used():
    objects = rendered("--set=rbac.create=false", "--set=serviceAccount.create=false",
                       "--set=serviceAccount.name=theirs")  # fmt: skip
    assert pod(objects)["serviceAccountName"] == "theirs"
    assert not {x["kind"] for x in objects} & {"Role", "ClusterRole", "ServiceAccount"}
    with pytest.raises(RuntimeError, match=r"serviceAccount\.name is needed"):
        charts.template(charts.OPERATOR, "--set=serviceAccount.create=false")


def test_monitoring_is_left_out_unless_asked_for():
    kinds = {x["kind"] for x in rendered()}
    assert not kinds & {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    objects = rendered(*MONITORING, "--set=monitoring.serviceMonitor.labels.release=prom")
    monitor = one(objects, "ServiceMonitor")
    service = one(objects, "Service")
    assert (
        monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    )
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    assert monitor["metadata"]["labels"]["release"] == "prom"
    assert one(objects, "PodMonitor")["spec"]["namespaceSelector"] == {"any": True}
    some = one(rendered(*MONITORING, NAMESPACED), "PodMonitor")
    assert some["spec"]["namespaceSelector"] == {"matchNames": ["team-a", "team-b"]}


def names_in(expression: str) -> set[str]:
    """Names of the metrics in PromQL, as Prometheus reads it; ValueError when it would not."""
    for variable in ("$namespace", "$job"):
        expression = expression.replace(variable, "x")

    def walk(node: Any) -> Iterator[str]:
        if isinstance(node, promql_parser.VectorSelector):
            yield node.name
        for part in ("lhs", "rhs", "expr", "args", "vector_selector"):
            inner = getattr(node, part, None) or []
            for each in inner if isinstance(inner, list) else [inner]:
                yield from walk(each)

    return set(walk(promql_parser.parse(expression)))


def known_metrics() -> set[str]:
    """Every series name that the operator or a run serves."""
    found = set(metrics.RUN)
    for family in metrics.Metrics().registry.collect():
        suffixes = {
            "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"),
            "info": ("_info",),
        }.get(family.type, ("",))  # fmt: skip
        found |= {family.name + suffix for suffix in suffixes}
    return found


def test_every_panel_and_alert_asks_for_metrics_that_exist():
    objects = rendered(*MONITORING)
    data = one(objects, "ConfigMap", "flash-msa-operator-dashboard")["data"]
    dashboard = json.loads(data["flash-msa.json"])
    expressions = [t["expr"] for p in dashboard["panels"] for t in p.get("targets", ())]
    queries = [v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    expressions += [re.sub(r"label_values\((.*),[^,]*\)", r"\1", query) for query in queries]
    groups = one(objects, "PrometheusRule")["spec"]["groups"]
    alerts = [rule for group in groups for rule in group["rules"]]
    expressions += [rule["expr"] for rule in alerts]
    assert len(expressions) > 25
    known = known_metrics()
    for expression in expressions:
        used = names_in(expression)
        assert used, expression
        assert used <= known, f"{expression}: nobody serves {used - known}"
    assert all(rule["annotations"].keys() == {"summary", "action"} for rule in alerts)
    # Whatever is counted can be seen, but for what only sums and logs need.
    shown = set().union(*map(names_in, expressions))
    unseen = {n for n in known if n.startswith("msa_") and n not in shown}
    assert {re.sub(r"_(bucket|sum|count)$", "", n) for n in unseen} - {
        re.sub(r"_(bucket|sum|count)$", "", n) for n in shown
    } <= {"msa_operator_actions_total", "msa_operator_watch_events_total",
          "msa_operator_reconcile_seconds", *metrics.RUN}  # fmt: skip


def test_panels_do_not_overlap_and_have_names():
    dashboard = json.loads((charts.OPERATOR / "dashboards/flash-msa.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert panel["title"] and at["x"] + at["w"] <= 24 and not cells & taken
        taken |= cells
    assert len({p["id"] for p in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_plain_manifest_holds_all_and_nothing_of_helm():
    text = charts.INSTALL.read_text()
    objects = [x for x in yaml.safe_load_all(text) if x]
    assert objects[0]["kind"] == "Namespace"
    kinds = [x["kind"] for x in objects]
    assert kinds.index("CustomResourceDefinition") < kinds.index("Deployment")
    for found in objects:
        labels = found["metadata"].get("labels", {})
        assert "helm.sh/chart" not in labels
        assert labels.get("app.kubernetes.io/managed-by") != "Helm"


def health(job: dict[str, Any]) -> tuple[str, str]:
    """What Argo CD, which runs Lua 5.1, makes of a job by our rule."""
    patch = yaml.safe_load((REPOSITORY / "manifests/argocd-health.yaml").read_text())
    rule = patch["data"]["resource.customizations.health.flashmsa.dev_LongContextJob"]
    lua = lupa.lua51.LuaRuntime()  # type: ignore[attr-defined]

    def table(value: Any) -> Any:
        if isinstance(value, dict):
            return lua.table_from({k: table(v) for k, v in value.items()})
        if isinstance(value, list):
            return lua.table_from([table(v) for v in value])
        return value

    lua.globals().obj = table(job)
    found = lua.execute(rule)
    return found.status, found.message


def condition(kind: str, status: str, generation: int = 1, message: str = "why") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": "Because", "message": message,
            "observedGeneration": generation}  # fmt: skip


@pytest.mark.parametrize(("found", "expected"), [
    (None, "Progressing"),
    ([], "Progressing"),
    ([condition("Reconciling", "True"), condition("Ready", "False")], "Progressing"),
    ([condition("Ready", "True"), condition("Reconciling", "False")], "Healthy"),
    ([condition("Complete", "True"), condition("Ready", "True")], "Healthy"),
    ([condition("Suspended", "True"), condition("Ready", "True")], "Suspended"),
    ([condition("Stalled", "True"), condition("Ready", "False")], "Degraded"),
    ([condition("Failed", "True"), condition("Complete", "False")], "Degraded"),
    ([condition("Failed", "True", generation=0)], "Progressing"),
])  # fmt: skip
def test_argo_knows_how_a_job_is(found: list[dict[str, Any]] | None, expected: str):
    status = {} if found is None else {"status": {"conditions": found}}
    assert health({"metadata": {"generation": 1}, **status})[0] == expected


def test_argo_shows_the_reason_where_there_is_no_message():
    failed = condition("Failed", "True", message="")
    assert health({"metadata": {"generation": 1}, "status": {"conditions": [failed]}}) == (
        "Degraded",
        "Because",
    )


def test_the_rule_of_argo_asks_for_conditions_that_exist():
    text = (REPOSITORY / "manifests/argocd-health.yaml").read_text()
    asked = set(re.findall(r'is\("(\w+)"\)|found\["(\w+)"\]', text))
    assert {a or b for a, b in asked} <= set(conditions._OWNERS)
