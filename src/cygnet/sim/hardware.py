"""Accelerators as planning sees them: memory, peak rates, links, and how much of each is reached."""

from dataclasses import dataclass

from cygnet.base.registry import Registry


@dataclass(frozen=True)
class Calibration:
    """What a profile was fitted to, and how far it is off on steps that it was not fitted to."""

    model: str
    machine: str
    num_samples: int
    median_error: float
    """Of |predicted / measured - 1|, over steps held out in turn."""
    p90_error: float


@dataclass(frozen=True)
class HardwareProfile:
    """One accelerator and its node. Rates are per accelerator and second, links count one direction.

    The `..._efficiency` are the parts of the peaks that large kernels are taken to reach. They are assumptions until
    they are measured on the machine in question.
    """

    name: str
    source: str
    memory_bytes: float
    flops_16bit: float
    """Dense matrix FLOPs with 16-bit operands."""
    flops_8bit: float
    """With 8-bit operands; where there are none, as `flops_16bit`."""
    memory_bandwidth: float
    link_bandwidth: float
    """To the other accelerators of the node."""
    network_bandwidth: float
    """To other nodes, per accelerator."""
    host_bandwidth: float = 64e9
    """To and from host memory, each way: PCIe 5.0 x16."""
    per_node: int = 8
    host_memory_bytes: float = 2e12
    """Of a whole node."""
    flops_efficiency: float = 0.6
    attention_efficiency: float = 0.5
    bandwidth_efficiency: float = 0.8
    """Reading weights."""
    kv_efficiency: float = 0.8
    """Reading KV."""
    head_speed: float = 1.0
    """How much faster the LM head's products are than others: an exact greedy choice need not compute all of them."""
    overlap: float = 1.0
    """How much of the shorter of computing and reading goes on beside the longer."""
    link_efficiency: float = 0.7
    host_efficiency: float = 0.8
    collective_ns: float = 10_000.0
    """What one collective costs before its first byte."""
    step_overhead_ns: float = 500_000.0
    """What a step costs beside its kernels: launching, sampling, scheduling that nothing hides."""
    request_overhead_ns: float = 0.0
    """The same per request in it."""
    calibration: Calibration | None = None
    """`None`: not measured."""


HARDWARE: Registry[HardwareProfile] = Registry("gpu")


def _add(profile: HardwareProfile) -> None:
    HARDWARE.register(profile.name)(profile)


_NDR = 50e9
"""One 400 Gb/s port per accelerator, as in an eight-accelerator HGX node."""

_CONSTANTS = "dense peaks, memory and NVLink as in NVIDIA's data sheet of the SXM part"
_MLPERF = "node and memory size as in MLPerf Inference submissions (H200: v4.1, B200: v6.0)"

# fmt: off
_add(HardwareProfile("A100", _CONSTANTS, 80e9, 312e12, 312e12, 2.039e12, 300e9, 25e9,
                     host_bandwidth=32e9))
_add(HardwareProfile("H20", "huggingface.co/hardware/h20 (96 GB, 148 TFLOPS); citsjtu2020/LLM-Prof hardware_spec.md "
                     "(296 in 8 bits, 4.0 TB/s, NVLink 900 GB/s)", 96e9, 148e12, 296e12, 4.0e12, 450e9, _NDR))
_add(HardwareProfile("H100", _CONSTANTS, 80e9, 989e12, 1979e12, 3.35e12, 450e9, _NDR))
_add(HardwareProfile("H200", f"{_CONSTANTS}; {_MLPERF}", 141e9, 989e12, 1979e12, 4.8e12, 450e9, _NDR))
_add(HardwareProfile("B200", f"{_CONSTANTS} (HGX); {_MLPERF}", 180e9, 2250e12, 4500e12, 8.0e12, 900e9, _NDR,
                     host_memory_bytes=1.8e12))
# fmt: on
