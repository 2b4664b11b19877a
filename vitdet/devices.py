"""Which device, and which precision it is fast in."""

from __future__ import annotations

import torch

from vitdet.errors import UserError


def pick_device(name: str | torch.device) -> torch.device:
    """``"auto"`` is CUDA, else MPS, else the CPU; another name must be a device that exists here."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch raises each, by kind of device
        raise UserError(f"the device {str(name)!r} cannot be used here; choose 'cpu' or 'auto'") from error
    return device


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """``"bf16"``, ``"fp32"`` or ``"auto"``: bfloat16 where the hardware multiplies it faster than float32.

    Those are CUDA devices that support it, and CPUs with a matrix unit (AMX); elsewhere a CPU is slower with it.
    """
    if precision == "auto":
        if device.type == "cuda":
            fast = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            fast = device.type == "cpu" and has_matrix_unit()
        precision = "bf16" if fast else "fp32"
    return torch.bfloat16 if precision == "bf16" else None


def has_matrix_unit() -> bool:
    """Whether this CPU has AMX."""
    return bool(torch.backends.cpu.get_cpu_capability() == "AVX512") and bool(torch.cpu._is_amx_tile_supported())
