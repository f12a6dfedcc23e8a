"""Attention kernels: what computes blocks of queries and keys on one device."""

from lightning_dcp.attention.kernels.base import Kernel, Rows
from lightning_dcp.attention.kernels.choice import KERNELS, choose_kernel, kernel_names

__all__ = ["KERNELS", "Kernel", "Rows", "choose_kernel", "kernel_names"]
