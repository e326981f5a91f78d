"""What is rendered for a job: the rules of KubeRay, Ray and EFA, and names that follow content."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msa_operator.api import JobError, parse_job
from msa_operator.models import resolve
from msa_operator.planner.hardware import local
from msa_operator.planner.runtime import EVERYTHING
from msa_operator.reconcile import names, patch
from msa_operator.reconcile.desired import Owner, Rendered, render
from msa_operator.reconcile.pods import Settings
from msa_operator.runs import machines_of, plan_job, run_spec
from msa_workloads.runspec import RunSpec
from operator_jobs import GPU, job

UID = "6f1d2c3b-0000-4000-8000-000000000001"
INSTALLED = Settings(image="example.org/worker:1", ray_version="2.60.0")
GOLDEN = Path(__file__).parent / "golden"
HOST = local(cpus=4, memory_mib=32_000)
TWO = {**GPU, "spec.hardware.accelerators": {"min": 16, "max": 16}}
ONE = {**GPU, "spec.hardware.accelerators": {"min": 8, "max": 8}}


def rendered(changes: dict[str, Any] | None = None, installed: Settings = INSTALLED) -> Rendered:
    parsed = parse_job(job(changes))
    model = resolve(parsed.spec.model)
    plan = plan_job(parsed, model, machines_of(parsed, (), lambda: HOST), EVERYTHING)
    run = run_spec(
        parsed, plan, model, output="/out", checkpoint_uri="s3://ckpt/x", owner="operator"
    )
    return render(parsed, plan, run, Owner("small", "team", UID), installed)


def cluster(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    return rendered(changes).children("c")[-1]["spec"]


def worker(spec: dict[str, Any]) -> dict[str, Any]:
    return spec["workerGroupSpecs"][0]["template"]["spec"]


def refused(changes: dict[str, Any]) -> list[tuple[str, str]]:
    with pytest.raises(JobError) as caught:
        rendered(changes)
    return [(p.path, p.nearest) for p in caught.value.problems]


def test_workers_are_a_fixed_gang():
    spec = cluster(TWO)
    (group,) = spec["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (2, 2, 2)
    assert spec["enableInTreeAutoscaling"] is False


def test_ray_counts_what_the_pod_is_given():
    spec = cluster(TWO)
    (group,) = spec["workerGroupSpecs"]
    resources = worker(spec)["containers"][0]["resources"]
    assert group["rayStartParams"]["num-gpus"] == resources["limits"]["nvidia.com/gpu"] == "8"
    head = spec["headGroupSpec"]
    given = head["template"]["spec"]["containers"][0]["resources"]
    assert (head["rayStartParams"]["num-cpus"], head["rayStartParams"]["num-gpus"]) == ("0", "0")
    assert not {"nvidia.com/gpu", "vpc.amazonaws.com/efa"} & {*given["limits"], *given["requests"]}


def test_efa_comes_with_several_machines_only():
    resources = worker(cluster(TWO))["containers"][0]["resources"]
    assert resources["limits"]["vpc.amazonaws.com/efa"] in ("16", "32")
    assert (
        "vpc.amazonaws.com/efa" not in worker(cluster(ONE))["containers"][0]["resources"]["limits"]
    )
    off = worker(cluster({**TWO, "spec.network.efa": "Disabled"}))["containers"][0]
    assert "vpc.amazonaws.com/efa" not in off["resources"]["limits"]
    assert "FI_PROVIDER" not in {e["name"] for e in off["env"]}


def test_nothing_disturbs_and_nothing_restarts_in_place():
    spec = cluster()
    for template in (spec["headGroupSpec"]["template"], spec["workerGroupSpecs"][0]["template"]):
        assert template["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
        assert template["spec"]["restartPolicy"] == "Never"
        seconds = [t["tolerationSeconds"] for t in template["spec"]["tolerations"][:2]]
        assert all(s <= 60 for s in seconds)


def test_shared_memory_is_part_of_the_pods_memory():
    for changes in (None, TWO):
        for group in (cluster(changes)["headGroupSpec"], cluster(changes)["workerGroupSpecs"][0]):
            spec = group["template"]["spec"]
            (shm,) = [v for v in spec["volumes"] if v["name"] == "shared-mem"]
            size = int(shm["emptyDir"]["sizeLimit"])
            limit = int(spec["containers"][0]["resources"]["limits"]["memory"])
            assert int(group["rayStartParams"]["object-store-memory"]) < size < limit


def test_children_belong_to_the_job_and_find_each_other():
    children = rendered().children("small-x")
    assert [c["kind"] for c in children] == ["ConfigMap", "NetworkPolicy", "RayCluster"]
    for child in children:
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (
            UID,
            True,
            True,
        )
        assert child["metadata"]["namespace"] == "team"
    config, policy, ray = children
    volumes = ray["spec"]["headGroupSpec"]["template"]["spec"]["volumes"]
    assert {"name": "runspec", "configMap": {"name": "small-x"}} in volumes
    assert RunSpec.from_json(config["data"]["runspec.json"]).recovery.owner == "operator"
    accepted = {"metadata": {"name": "small"}, **json.loads(config["data"]["job.json"])}
    assert parse_job(accepted).spec == parse_job(job()).spec
    assert policy["spec"]["podSelector"]["matchLabels"] == {"ray.io/cluster": "small-x"}
    assert [p["port"] for p in policy["spec"]["ingress"][1]["ports"]] == [8265, 8267]


def test_the_pod_block_arrives():
    spec = worker(cluster({
        "spec.pod": {
            "image": "mine:2", "serviceAccountName": "trainer", "cpu": "3", "memory": "6Gi",
            "imagePullSecrets": [{"name": "pull"}], "env": [{"name": "A", "value": "1"}],
            "volumes": [{"name": "data", "mountPath": "/data", "readOnly": True,
                         "source": {"persistentVolumeClaim": {"claimName": "d"}}}],
            "nodeSelector": {"pool": "a"}, "priorityClassName": "high",
            "tolerations": [{"key": "team", "operator": "Exists"}],
        },
    }))  # fmt: skip
    (container,) = spec["containers"]
    assert container["image"] == "mine:2" and {"name": "A", "value": "1"} in container["env"]
    assert container["resources"]["requests"] == {"cpu": "3", "memory": str(6 << 30)}
    assert {"name": "data", "mountPath": "/data", "readOnly": True} in container["volumeMounts"]
    assert {"name": "data", "persistentVolumeClaim": {"claimName": "d"}} in spec["volumes"]
    assert spec["nodeSelector"] == {"pool": "a"} and spec["priorityClassName"] == "high"
    assert spec["tolerations"][-1] == {"key": "team", "operator": "Exists"}
    assert (spec["serviceAccountName"], spec["imagePullSecrets"]) == (
        "trainer",
        [{"name": "pull"}],
    )


def test_a_pod_patch_merges_by_name():
    spec = worker(cluster({"spec.podPatch": {"spec": {
        "containers": [{"name": "ray-worker", "env": [{"name": "B", "value": "2"}]},
                       {"name": "side", "image": "s"}],
        "schedulerName": "other",
    }}}))  # fmt: skip
    assert [c["name"] for c in spec["containers"]] == ["ray-worker", "side"]
    assert spec["containers"][0]["image"] == INSTALLED.image
    assert spec["schedulerName"] == "other"


def test_a_pod_patch_cannot_take_away_what_the_plan_stands_on():
    at = "spec.podPatch.spec"
    assert refused({"spec.podPatch": {"spec": {"restartPolicy": "Always"}}}) == [
        (f"{at}.restartPolicy", "Never")
    ]
    fewer = {"name": "ray-worker", "resources": {"limits": {"nvidia.com/gpu": 4}}}
    ((path, nearest),) = refused({**TWO, "spec.podPatch": {"spec": {"containers": [fewer]}}})
    assert path.endswith("limits.nvidia.com/gpu") and nearest == "8"


@pytest.mark.parametrize(
    ("limits", "requests", "nearest"),
    [
        ({"hugepages-2Mi": "512Mi"}, {"hugepages-2Mi": "256Mi"}, ["512Mi"]),
        ({"hugepages-2Mi": "5Mi"}, {}, ["6Mi", "6Mi"]),
        ({"hugepages-2Mi": "5120Mi"}, {"hugepages-2Mi": "5120Mi"}, []),
    ],
)
def test_huge_pages_are_checked_before_pods_are_made(limits, requests, nearest):
    container = {"name": "ray-worker", "resources": {"limits": limits, "requests": requests}}
    changes = {"spec.podPatch": {"spec": {"containers": [container]}}}
    if nearest:
        assert [n for _, n in refused(changes)] == nearest
    else:
        rendered(changes)


def test_what_no_cluster_could_run_is_refused():
    g5 = {**TWO, "spec.hardware.instanceTypes": ["p5.48xlarge"], "spec.pod.memory": "8Gi"}
    assert refused(g5) == [("spec.pod.memory", "32Gi")]
    assert refused({"spec.queue": {"name": "q" * 64}}) == [("spec.queue.name", "")]


def test_checkpoints_that_other_pods_cannot_see_are_refused():
    local_ = {"spec.checkpoint.uri": "file:///ckpt/a"}
    assert refused(local_) == [("spec.checkpoint.uri", "")]
    rendered({**local_, "spec.hardware.workers": 1})
    claim = {"persistentVolumeClaim": {"claimName": "c"}}
    volume = {"name": "ckpt", "mountPath": "/ckpt", "source": claim}
    rendered({**local_, "spec.pod": {"volumes": [volume]}})


def test_the_queue_is_a_label_of_the_cluster():
    made = rendered({"spec.queue": {"name": "research"}}).children("c")[-1]
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"


NAME = st.from_regex(r"[a-z]([-a-z0-9]{0,36}[a-z0-9])?", fullmatch=True)


@settings(deadline=None)
@given(NAME, st.uuids(), st.text(), st.integers(0, 10**9), st.integers(1, 10**6))
def test_names_stay_within_every_limit(name, uid, content, epoch, attempt):
    made = names.cluster_name(name, str(uid), content, epoch)
    assert len(made) <= 53 and made.startswith(f"{name}-{str(uid)[:5]}-")
    assert all(len(v) <= 63 for v in names.labels(name, str(uid)).values())
    assert len(names.submission_id(made, attempt)) <= 128


def test_a_longer_name_is_refused():
    with pytest.raises(ValueError, match="53"):
        names.cluster_name("a" * 39, UID, "", 1)


CHANGES: list[dict[str, Any]] = [
    {}, {"spec.pod.image": "other"}, {"spec.pod.env": [{"name": "A", "value": "1"}]},
    {"spec.training.seed": 7}, {"spec.hardware.workers": 1}, {"spec.queue": {"name": "q"}},
    {"spec.podPatch": {"spec": {"schedulerName": "x"}}}, {"spec.checkpoint.keep": 9},
]  # fmt: skip


def test_the_hash_follows_what_is_rendered():
    made = [rendered(change) for change in CHANGES]
    for a in made:
        for b in made:
            same = a.children("n") == b.children("n")
            assert same == (a.name(1) == b.name(1))
    base = made[0]
    assert base.name(1) == rendered().name(1) != base.name(2)
    assert rendered(installed=replace(INSTALLED, ray_version="2.61.0")).name(1) != base.name(1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=2),
    lambda leaf: st.lists(leaf, max_size=3) | st.dictionaries(st.text("ab", max_size=2), leaf),
    max_leaves=8,
)


@settings(deadline=None)
@given(JSON, JSON)
def test_equal_hashes_mean_equal_values(a, b):
    assert (names.content_hash(a) == names.content_hash(b)) == (
        json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
    )


@settings(deadline=None)
@given(JSON, JSON)
def test_merging_is_repeatable_and_leaves_its_inputs_alone(base, change):
    before = json.dumps([base, change])
    once = patch.merge(base, change)
    assert patch.merge(once, change) == once
    assert json.dumps([base, change]) == before


@pytest.mark.parametrize(("name", "changes"), [("cpu", None), ("efa", TWO)])
def test_the_rendering_is_the_one_that_was_read(name, changes):
    """A change here gives every new job another hash: read the difference, then record it anew."""
    made = rendered(changes)
    spec = made.children("small-6f1d2-00000000")[-1]
    text = json.dumps(spec, indent=1, sort_keys=True) + "\n"
    assert text == (GOLDEN / f"raycluster-{name}.json").read_text()
