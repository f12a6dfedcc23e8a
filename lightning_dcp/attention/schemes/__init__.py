"""Exchange schemes: ways to bring queries together with keys that lie on other ranks."""

from lightning_dcp.attention.schemes.all_gather import AllGather
from lightning_dcp.attention.schemes.base import AttentionCall, Scheme
from lightning_dcp.attention.schemes.ring import Ring
from lightning_dcp.attention.schemes.ulysses import Ulysses

SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in (Ring(), AllGather(), Ulysses())}
"""The schemes by name."""
ALONE = Ring.name
"""What a group of one rank uses: alone, all schemes are the same, and the ring has the least to do."""

__all__ = ["ALONE", "SCHEMES", "AllGather", "AttentionCall", "Ring", "Scheme", "Ulysses"]
