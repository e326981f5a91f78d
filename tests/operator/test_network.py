"""NetworkPolicies as Kubernetes reads them, and what those that we render let through.

The network of the test cluster enforces none, so reachability is computed from what is rendered.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml
from e2e import charts
from e2e.fixtures import needs_helm
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_operator.network.needs import NCCL, Ends, closed, installation, needed, operator_pod
from msa_operator.network.policies import Address, Pod, matches, may_reach
from msa_operator.reconcile.pods import CONTROL_PORT, Settings
from test_reconcile_desired import INSTALLED, rendered

API = Address("10.0.0.1")
WEB = Pod("web", "shop", {"app": "web"}, {"http": 8080}, "10.1.0.5")
DATABASE = Pod("db", "shop", {"app": "db", "tier": "back"}, {"sql": 5432}, "10.1.0.6")
FOREIGN = Pod("web", "other", {"app": "web"}, ip="10.2.0.7")
LABELS = {"shop": {"team": "a"}, "other": {"team": "b"}}


@pytest.fixture(scope="module", autouse=True)
def helm() -> None:
    needs_helm()


def policy(name: str = "p", namespace: str = "shop", **spec: Any) -> dict[str, Any]:
    spec.setdefault("podSelector", {})
    return {"metadata": {"name": name, "namespace": namespace}, "spec": spec}


def test_without_policies_everything_is_open():
    assert may_reach(FOREIGN, DATABASE, 5432, []).allowed


def test_a_policy_closes_only_the_pods_that_it_selects():
    deny = policy(podSelector={"matchLabels": {"app": "db"}})
    assert not may_reach(WEB, DATABASE, 5432, [deny]).allowed
    assert may_reach(DATABASE, WEB, 8080, [deny]).allowed
    assert "shop/p" in may_reach(WEB, DATABASE, 5432, [deny]).why


def test_a_policy_of_another_namespace_says_nothing():
    assert may_reach(WEB, DATABASE, 5432, [policy(namespace="other")]).allowed


def test_policies_add_up():
    deny = policy("deny")
    allow = policy("allow", ingress=[{"from": [{"podSelector": {}}]}])
    assert may_reach(WEB, DATABASE, 5432, [deny, allow]).allowed
    assert not may_reach(FOREIGN, DATABASE, 5432, [deny, allow]).allowed


@pytest.mark.parametrize(("peer", "web", "foreign"), [
    ({"podSelector": {}}, True, False),
    ({"namespaceSelector": {}}, True, True),
    ({"namespaceSelector": {"matchLabels": {"team": "b"}}}, False, True),
    ({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "shop"}}}, True, False),
    ({"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "x"}}}, False, False),
    ({"namespaceSelector": {"matchLabels": {"team": "b"}},
      "podSelector": {"matchLabels": {"app": "web"}}}, False, True),
    ({"ipBlock": {"cidr": "10.0.0.0/8"}}, True, True),
    ({"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.2.0.0/16"]}}, True, False),
])  # fmt: skip
def test_who_is_meant_by_a_peer(peer: dict[str, Any], web: bool, foreign: bool):
    rules = [policy(podSelector={"matchLabels": {"app": "db"}}, ingress=[{"from": [peer]}])]
    assert may_reach(WEB, DATABASE, 5432, rules, LABELS).allowed is web
    assert may_reach(FOREIGN, DATABASE, 5432, rules, LABELS).allowed is foreign


def test_two_selectors_in_one_peer_are_both_wanted_in_two_peers_either():
    both = {
        "namespaceSelector": {"matchLabels": {"team": "b"}},
        "podSelector": {"matchLabels": {"app": "db"}},
    }
    either = [{key: value} for key, value in both.items()]
    for peers, allowed in (([both], False), (either, True)):
        rules = [policy(ingress=[{"from": peers}])]
        assert may_reach(FOREIGN, WEB, 8080, rules, LABELS).allowed is allowed


@pytest.mark.parametrize(("ports", "allowed"), [
    ([{"port": 5432}], True),
    ([{"port": "sql"}], True),
    ([{"port": "http"}], False),
    ([{"port": 5432, "protocol": "UDP"}], False),
    ([{"port": 5000, "endPort": 6000}], True),
    ([{"port": 5433, "endPort": 6000}], False),
    ([{"protocol": "TCP"}], True),
    ([{"port": 80}, {"port": 5432}], True),
    ([], True),
    (None, True),
])  # fmt: skip
def test_which_ports_are_meant(ports: list[dict[str, Any]] | None, allowed: bool):
    rule = {} if ports is None else {"ports": ports}
    assert may_reach(WEB, DATABASE, 5432, [policy(ingress=[rule])]).allowed is allowed


def test_leaving_and_entering_are_asked_for_both():
    leave = policy("leave", podSelector={"matchLabels": {"app": "web"}}, policyTypes=["Egress"],
                   egress=[{"to": [{"podSelector": {"matchLabels": {"app": "db"}}}]}])  # fmt: skip
    assert may_reach(WEB, DATABASE, 5432, [leave]).allowed
    assert not may_reach(WEB, FOREIGN, 80, [leave]).allowed
    assert may_reach(FOREIGN, WEB, 8080, [leave]).allowed, "egress alone closes no ingress"
    deny = policy("deny", podSelector={"matchLabels": {"app": "db"}})
    verdict = may_reach(WEB, DATABASE, 5432, [leave, deny])
    assert not verdict.allowed and "ingress of db" in verdict.why


def test_rules_of_egress_without_types_close_egress_too():
    rules = [policy(egress=[{"ports": [{"port": 53, "protocol": "UDP"}]}])]
    assert not may_reach(WEB, API, 443, rules).allowed
    assert may_reach(WEB, API, 53, rules, protocol="UDP").allowed
    assert not may_reach(FOREIGN, WEB, 8080, rules).allowed


def test_addresses_are_met_by_blocks_only():
    rules = [policy(policyTypes=["Egress"], egress=[{"to": [{"namespaceSelector": {}}]}])]
    assert not may_reach(WEB, API, 443, rules).allowed
    block = policy(policyTypes=["Egress"], egress=[{"to": [{"ipBlock": {"cidr": "10.0.0.0/24"}}]}])
    assert may_reach(WEB, API, 443, [block]).allowed


KEYS = st.sampled_from(["a", "b"])
EXPRESSIONS = st.one_of(
    st.builds(
        lambda k, o, v: {"key": k, "operator": o, "values": v}, KEYS,
        st.sampled_from(["In", "NotIn"]), st.lists(st.sampled_from(["1", "2"]), min_size=1),
    ),
    st.builds(lambda k, o: {"key": k, "operator": o}, KEYS,
              st.sampled_from(["Exists", "DoesNotExist"])),
)  # fmt: skip


@given(st.dictionaries(KEYS, st.sampled_from(["1", "2", "3"])), st.lists(EXPRESSIONS, max_size=3))
@settings(deadline=None)
def test_expressions_are_all_wanted_and_opposites_exclude_each_other(
    labels: dict[str, str], expressions: list[dict[str, Any]]
):
    one_by_one = [matches({"matchExpressions": [e]}, labels) for e in expressions]
    assert matches({"matchExpressions": expressions}, labels) is all(one_by_one)
    opposite = {"In": "NotIn", "NotIn": "In", "Exists": "DoesNotExist", "DoesNotExist": "Exists"}
    for expression, held in zip(expressions, one_by_one, strict=True):
        other = {**expression, "operator": opposite[expression["operator"]]}
        assert matches({"matchExpressions": [other]}, labels) is not held


def test_an_operator_that_does_not_exist_is_no_answer():
    with pytest.raises(ValueError, match="Gt"):
        matches({"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["1"]}]}, {})


# What we render ---------------------------------------------------------------------------------

SCRAPED = replace(INSTALLED, namespace=charts.NAMESPACE, metrics_namespace="monitoring")
CLUSTER = "small-x"


def of_job(installed: Settings = SCRAPED, name: str = CLUSTER) -> list[dict[str, Any]]:
    children = rendered({"spec.hardware.workers": 4}, installed).children(name)
    return [c for c in children if c["kind"] == "NetworkPolicy"]


def of_chart(*arguments: str) -> list[dict[str, Any]]:
    text = charts.template(charts.OPERATOR, *arguments)
    return [x for x in yaml.safe_load_all(text) if x and x["kind"] == "NetworkPolicy"]


@pytest.fixture(scope="module")
def chart() -> list[dict[str, Any]]:
    return of_chart("--set=settings.metricsNamespace=monitoring")


def ends(name: str = CLUSTER) -> Ends:
    (cluster,) = [c for c in rendered().children(name) if c["kind"] == "RayCluster"]
    marks = cluster["spec"]["headGroupSpec"]["template"]["metadata"]["labels"]
    prometheus = Pod("prometheus", "monitoring", {"app.kubernetes.io/name": "prometheus"})
    operator = operator_pod(charts.NAMESPACE)
    return installation(name, "team", marks, 3, operator, prometheus)


def test_the_ends_are_labelled_as_what_is_rendered():
    found = ends()
    (deployment,) = [
        x for x in yaml.safe_load_all(charts.template(charts.OPERATOR))
        if x and x["kind"] == "Deployment"
    ]  # fmt: skip
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels == found.operator.labels
    (cluster,) = [c for c in rendered().children(CLUSTER) if c["kind"] == "RayCluster"]
    for group in (cluster["spec"]["headGroupSpec"], cluster["spec"]["workerGroupSpecs"][0]):
        template = group["template"]["metadata"]["labels"]
        assert template.items() <= found.head.labels.items()
    container = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert found.head.ports == {p["name"]: p["containerPort"] for p in container["ports"]}


def test_everything_that_is_needed_gets_through(chart: list[dict[str, Any]]):
    connections = needed(ends(), API)
    assert {c.why for c in connections} >= {
        "a worker joins its head", "workers exchange gradients and keys", "metrics of the run",
    }  # fmt: skip
    assert not closed(connections, [*of_job(), *chart])


def test_the_api_server_is_reached_on_the_ports_that_are_given():
    monitored = "--set=settings.metricsNamespace=monitoring"
    elsewhere = needed(ends(), API, 8443)
    found = closed(elsewhere, [*of_job(), *of_chart(monitored)])
    assert [c.connection.target for c in found] == [API]
    opened = of_chart("--set=networkPolicy.apiServerPorts={8443}", monitored)
    assert not closed(elsewhere, [*of_job(), *opened])


def test_listed_namespaces_are_reached_and_no_others():
    some = of_chart("--set=settings.namespaces={team,other}",
                    "--set=settings.metricsNamespace=monitoring")  # fmt: skip
    assert not closed(needed(ends(), API), [*of_job(), *some])
    unlisted = of_chart("--set=settings.namespaces={other}",
                        "--set=settings.metricsNamespace=monitoring")  # fmt: skip
    found = closed(needed(ends(), API), [*of_job(), *unlisted])
    assert {c.connection.source.name for c in found} == {"operator"}


def strangers() -> list[Pod]:
    """Pods that have no business with a run, some of which look as if they had."""
    other = ends("other-y")
    return [
        Pod("same-namespace", "team", {"app": "notebook"}),
        Pod("elsewhere", "default", {}),
        Pod("in-the-operators-namespace", charts.NAMESPACE, {"app": "debug"}),
        # A label is easily given; the namespace is not.
        Pod("named-like-the-operator", "team", {"app.kubernetes.io/name": "flash-msa-operator"}),
        other.head,
        other.workers[0],
        Pod("a-cluster-of-this-name-elsewhere", "rival", {"ray.io/cluster": CLUSTER}),
        replace(ends().head, name="same-labels-elsewhere", namespace="rival"),
    ]


@pytest.mark.parametrize("stranger", strangers(), ids=lambda pod: pod.name)
def test_nobody_else_reaches_a_run(chart: list[dict[str, Any]], stranger: Pod):
    found = ends()
    policies = [*of_job(), *of_job(name="other-y"), *chart]
    for target in (found.head, found.workers[0]):
        for port in (6379, 8265, CONTROL_PORT, 8080, 10001, 52365, *NCCL):
            assert not may_reach(stranger, target, port, policies).allowed, port


def test_the_scraper_reaches_metrics_only(chart: list[dict[str, Any]]):
    found = ends()
    assert found.scraper
    policies = [*of_job(), *chart]
    for port in (6379, 8265, 10001, *NCCL):
        assert not may_reach(found.scraper, found.head, port, policies).allowed
    unscraped = of_job(replace(SCRAPED, metrics_namespace=""))
    for port in (8080, CONTROL_PORT):
        assert not may_reach(found.scraper, found.head, port, unscraped).allowed


def test_the_operator_reaches_heads_and_is_reached_by_the_scraper_only(
    chart: list[dict[str, Any]],
):
    found = ends()
    policies = [*of_job(), *chart]
    for port in (6379, 8080, 10001, 22):
        assert not may_reach(found.operator, found.head, port, policies).allowed
    for port in NCCL:
        assert not may_reach(found.operator, found.workers[0], port, policies).allowed
    assert not may_reach(found.operator, Pod("web", "shop", {}), 80, policies).allowed
    for stranger in (*strangers(), found.head):
        assert not may_reach(stranger, found.operator, 8080, policies).allowed
    assert not may_reach(found.scraper or API, found.operator, 8080, of_chart()).allowed


def test_what_is_closed_names_the_policy_and_the_reason():
    deny = policy("default-deny", "team")
    found = closed(needed(ends(), API), [deny])
    assert found and all("team/default-deny" in c.verdict.why for c in found)
    # The policy of the job opens again what a default closes.
    assert not closed(needed(ends(), API), [deny, *of_job()])
    # But it cannot open what pods may not leave for.
    leave = policy("no-egress", "team", policyTypes=["Egress"])
    left = closed(needed(ends(), API), [leave, *of_job()])
    assert {c.connection.why for c in left} == {
        "a worker joins its head", "the head starts actors on a worker",
        "workers exchange gradients and keys",
    }  # fmt: skip
