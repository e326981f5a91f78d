"""The catalogue of machines, and machines described by others."""

from __future__ import annotations

import pytest
from msa_operator.api import load_profile
from msa_operator.planner.hardware import (
    CATALOGUE,
    MachineError,
    check_memory_request,
    local,
    machine,
    memory_request_mib,
)
from msa_operator.runs import described
from operator_jobs import SAMPLES


def test_efa_interfaces_are_not_network_cards():
    b300 = machine("p6-b300.48xlarge")
    assert (b300.efa, b300.network_cards, b300.network_gbps) == (16, 17, 6400)


def test_bandwidth_is_the_instances_and_not_a_sum_over_cards():
    assert machine("p6-b200.48xlarge").network_gbps == 3200
    assert machine("g6e.48xlarge").network_gbps == 400
    assert machine("g6e.24xlarge").network_gbps == 200


@pytest.mark.parametrize(
    ("name", "gpu", "count", "mib", "efa"),
    [
        ("p4d.24xlarge", "A100-40G", 8, 40_960, 4),
        ("p4de.24xlarge", "A100-80G", 8, 81_920, 4),
        ("p5.4xlarge", "H100", 1, 81_920, 1),
        ("p5.48xlarge", "H100", 8, 81_920, 32),
        ("p5e.48xlarge", "H200", 8, 144_384, 32),
        ("p5en.48xlarge", "H200", 8, 144_384, 16),
        ("p6-b200.48xlarge", "B200", 8, 183_359, 8),
        ("p6-b300.48xlarge", "B300", 8, 275_040, 16),
        ("g5.48xlarge", "A10G", 8, 22_888, 1),
        ("g6.12xlarge", "L4", 4, 22_888, 1),
        ("g6e.48xlarge", "L40S", 8, 45_776, 4),
    ],
)
def test_devices(name: str, gpu: str, count: int, mib: int, efa: int):
    found = machine(name)
    assert found.accelerator is not None
    assert (found.accelerator.name, found.count) == (gpu, count)
    assert (found.accelerator.memory_mib, found.efa) == (mib, efa)


def test_gpus_behind_pcie_share_no_fast_links():
    for name, found in CATALOGUE.items():
        assert found.domain == (1 if name.startswith("g") else found.count), name


def test_fractions_of_a_gpu_are_refused():
    for name in ("g6f.xlarge", "gr6f.4xlarge", "ml.g6f.2xlarge"):
        with pytest.raises(MachineError, match="fractional GPU not supported"):
            machine(name)


def test_sagemaker_types_are_ec2_types():
    assert machine("ml.p5.48xlarge") == machine("p5.48xlarge")


def test_unknown_types_name_the_nearest():
    with pytest.raises(MachineError, match=r"nearest: p5\.48xlarge"):
        machine("p5.48xlage")


@pytest.mark.parametrize(
    ("name", "mib"),
    [("p5.48xlarge", 1_938_410), ("p4d.24xlarge", 1_082_712), ("g6e.48xlarge", 1_449_132)],
)
def test_what_pods_can_request_is_what_karpenter_advertises(name: str, mib: int):
    assert memory_request_mib(machine(name)) == mib
    assert memory_request_mib(machine(name), 2048) == mib - 2048


def test_a_request_of_all_memory_is_refused_with_the_most_that_fits():
    p5 = machine("p5.48xlarge")
    check_memory_request(p5, 1_938_410)
    with pytest.raises(MachineError, match="nearest: 1936362Mi"):
        check_memory_request(p5, 2048 * 1024, daemonsets_mib=2048)


def test_a_profile_is_a_machine():
    profile = load_profile(SAMPLES / "hardware-profile.yaml")
    found = machine("rack-h200", {"rack-h200": described(profile)})
    assert found.accelerator is not None
    assert (found.count, found.domain, found.accelerator.memory_mib) == (8, 8, 143_771)
    assert found.allocatable_memory_mib < found.memory_mib


def test_this_machine():
    plain = local(cpus=2, memory_mib=1000)
    assert plain.accelerator is None and plain.shared
    h200 = local(cpus=16, memory_mib=1 << 20, gpus=(("NVIDIA H200", 143_771),) * 2, linked=True)
    assert h200.accelerator is not None
    assert (h200.count, h200.domain, h200.accelerator.peak_tflops) == (2, 2, 989.0)
    assert h200.accelerator.memory_mib == 143_771
    a100 = local(cpus=16, memory_mib=1 << 20, gpus=(("NVIDIA A100-SXM4-40GB", 40_536),))
    assert a100.accelerator is not None and a100.accelerator.memory_gbps == 1555.0
    unknown = local(cpus=16, memory_mib=1 << 20, gpus=(("Something New", 20_000),))
    assert unknown.accelerator is not None and unknown.accelerator.peak_tflops == 0
    with pytest.raises(MachineError, match="differ"):
        local(cpus=1, memory_mib=1, gpus=(("A", 1), ("B", 1)))
